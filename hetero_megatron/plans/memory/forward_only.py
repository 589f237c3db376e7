"""Memory of a second model that only runs forward beside the one that is trained, on the same ranks or its own, and of
answers that the ranks that train sample themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.plans.canonical import Plan, Recompute
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import ForwardRole
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES, MemoryBytes, estimate_memory, with_communicators
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.plans.shares import pipeline_shares
from hetero_megatron.spec import ModelSpec


def with_role(
    memory: Mapping[int, MemoryBytes], plan: Plan, role: ForwardRole, dtype: str, logits_bytes: int,
    cluster: Cluster | None,
) -> dict[int, MemoryBytes]:  # fmt: skip
    """``memory`` of the ranks of ``plan`` with what the role needs there and on its own ranks; with a cluster also its
    communicators there."""
    if not role.apart:
        return _on_the_same_ranks(memory, role.compiled, dtype)
    all_memory = _on_own_ranks(memory, plan, role, dtype, logits_bytes)
    if cluster is None:
        return all_memory
    compiled = role.compiled
    apart = {rank: all_memory[rank] for rank in compiled.plan.ranks}
    return {**all_memory, **with_communicators(apart, compiled.plan, compiled.spec, (), cluster, dtype)}


def with_sampling(
    memory: Mapping[int, MemoryBytes], plan: Plan, spec: ModelSpec, dtype: str, rows: int
) -> dict[int, MemoryBytes]:
    """``memory`` of the ranks of ``plan``, which sample answers before each step, ``rows`` of a pipeline at once: with
    the trained weights, and with keys, values and what prompts and draws work with in the place of activations."""
    from hetero_megatron.plans.memory.generator import generator_memory, head_bytes, sampling_pipeline

    sizes = [min(rows, max(count, 1)) for count in pipeline_shares(plan, plan.global_batch_size)]
    pipelines = tuple(
        sampling_pipeline(pipeline, size, plan.seq_length)
        for pipeline, size in zip(plan.pipelines, sizes, strict=True)
    )
    compiled = CompiledPlan(Plan(plan.seq_length, sum(sizes), "1f1b", pipelines), spec)
    forward = forward_memory(compiled, dtype, head_bytes(compiled, dtype))
    all_memory = dict(memory)
    for rank, needs in generator_memory(compiled, dtype, forward).items():
        working = needs.activations + needs.second_model - forward[rank].second_model
        all_memory[rank] = replace(memory[rank], activations=max(memory[rank].activations, working))
    return all_memory


def _on_the_same_ranks(
    memory: Mapping[int, MemoryBytes], other: CompiledPlan, dtype: str
) -> dict[int, MemoryBytes]:
    """With the other model's weights, whole; and on ranks with a head the inputs that it gets, of all micro-batches of
    a step."""
    plan, spec, item = other.plan, other.spec, ITEM_BYTES[dtype]
    weights = {r: m.weights for r, m in estimate_memory(plan, spec, dtype, 0, other.buckets).items()}
    head_inputs = {rank: positions * spec.hidden_size * item for rank, positions in _head_positions(plan).items()}
    return {rank: replace(m, second_model=weights[rank] + head_inputs.get(rank, 0)) for rank, m in memory.items()}


def _on_own_ranks(
    memory: Mapping[int, MemoryBytes], plan: Plan, role: ForwardRole, dtype: str, logits_bytes: int
) -> dict[int, MemoryBytes]:
    """With what the role says of a rank's samples; and its own ranks: its weights, what it says, and at most what one
    layer's forward of one micro-batch works with beside the inputs of the others; or what a generator needs."""
    if role.name == GENERATOR:
        from hetero_megatron.plans.memory.generator import generator_memory, head_bytes

        whole_forward = forward_memory(role.compiled, dtype, head_bytes(role.compiled, dtype))
        forward = generator_memory(role.compiled, dtype, whole_forward)
    else:
        forward = forward_memory(role.compiled, dtype, logits_bytes)
    said = {**_head_positions(plan), **_head_positions(role.compiled.plan)}
    return {
        rank: replace(m, second_model=m.second_model + 4 * role.words * said.get(rank, 0))
        for rank, m in sorted({**memory, **forward}.items())
    }


def forward_memory(compiled: CompiledPlan, dtype: str, logits_bytes: int) -> dict[int, MemoryBytes]:
    """Of a model that only runs forward: weights, and at most what one layer's forward of one micro-batch works with
    beside the inputs of the others."""
    plan = compiled.plan
    single = replace(
        plan, global_batch_size=sum(pipeline.micro_batch_size for pipeline in plan.pipelines),
        pipelines=tuple(replace(pipeline, num_micro_batches=1) for pipeline in plan.pipelines),
    ).with_stages(lambda stage: replace(stage, recompute=Recompute("full") if stage.num_layers else Recompute()))
    memory = estimate_memory(single, compiled.spec, dtype, 0, compiled.buckets, logits_bytes)
    return {rank: MemoryBytes(activations=m.activations, second_model=m.weights) for rank, m in memory.items()}


def _head_positions(plan: Plan) -> dict[int, int]:
    """By rank with a head, its positions of a step."""
    return {
        rank: unit.micro_batch_tokens * pipeline.num_micro_batches
        for pipeline in plan.pipelines for stage in pipeline.stages if stage.head
        for unit in stage.units for rank in unit.ranks
    }  # fmt: skip
