"""Memory of a second model that only runs forward beside the one that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES, MemoryBytes, estimate_memory


def with_teacher(memory: Mapping[int, MemoryBytes], teacher: CompiledPlan, dtype: str) -> dict[int, MemoryBytes]:
    """``memory`` of the student's ranks with the teacher's weights, whole; and on ranks with a head the inputs that it
    gets, of all micro-batches of a step."""
    plan, spec, item = teacher.plan, teacher.spec, ITEM_BYTES[dtype]
    weights = {r: m.weights for r, m in estimate_memory(plan, spec, dtype, 0, teacher.buckets).items()}
    head_inputs = {
        rank: unit.micro_batch_tokens * spec.hidden_size * item * pipeline.num_micro_batches
        for pipeline in plan.pipelines for stage in pipeline.stages if stage.head
        for unit in stage.units for rank in unit.ranks
    }  # fmt: skip
    return {rank: replace(m, teacher=weights[rank] + head_inputs.get(rank, 0)) for rank, m in memory.items()}
