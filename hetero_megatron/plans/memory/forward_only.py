"""Memory of a second model that only runs forward beside the one that is trained, on the same ranks or its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.plans.canonical import Plan, Recompute
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


def with_teacher_on_own_ranks(
    memory: Mapping[int, MemoryBytes], student: Plan, teacher: CompiledPlan, top_k: int, dtype: str, logits_bytes: int
) -> dict[int, MemoryBytes]:
    """``memory`` of the student's ranks with the teacher's scores of their samples, and that of the teacher's own
    ranks: its weights, its scores, and at most what one layer's forward of one micro-batch works with beside the
    inputs of the others."""
    plan, spec = teacher.plan, teacher.spec
    single = replace(
        plan, global_batch_size=sum(pipeline.micro_batch_size for pipeline in plan.pipelines),
        pipelines=tuple(replace(pipeline, num_micro_batches=1) for pipeline in plan.pipelines),
    ).with_stages(lambda stage: replace(stage, recompute=Recompute("full") if stage.num_layers else Recompute()))
    forward = estimate_memory(single, spec, dtype, 0, teacher.buckets, logits_bytes)
    scores = {**_score_bytes(student, top_k), **_score_bytes(plan, top_k)}
    own = {rank: replace(m, teacher=m.teacher + scores.get(rank, 0)) for rank, m in memory.items()}
    apart = {rank: MemoryBytes(activations=m.activations, teacher=m.weights + scores.get(rank, 0))
             for rank, m in forward.items()}  # fmt: skip
    return dict(sorted((own | apart).items()))


def _score_bytes(plan: Plan, top_k: int) -> dict[int, int]:
    """By rank with a head, bytes of the scores of its positions of a step."""
    return {
        rank: unit.micro_batch_tokens * pipeline.num_micro_batches * (2 * top_k + 1) * 4
        for pipeline in plan.pipelines for stage in pipeline.stages if stage.head
        for unit in stage.units for rank in unit.ranks
    }  # fmt: skip
