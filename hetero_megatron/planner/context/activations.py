"""Activation memory of the members of a concrete context stage, by the scheduler's formulas."""

from __future__ import annotations

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.context_plan import (
    ContextGroup,
    Member,
    StageContext,
    seen_tokens,
    stage_contexts,
)
from hetero_megatron.plan.memory import MemoryBytes
from hetero_megatron.planner.context.memory import block_bytes, core_bytes, home_bytes, outside_bytes
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import head_activation_bytes


def context_activations(
    plan: Plan, spec: ModelSpec, stage: Stage, in_flight: int, item: int, limit: int | None = None
) -> dict[int, MemoryBytes]:
    """By rank, bytes of the activations of micro-batches in flight and of one layer's backward; empty for stages
    without context groups. ``limit``: of the logits, as in :class:`~hetero_megatron.plan.memory.RankWork`."""
    found = {}
    weights = {rank: sum(u.tp_split) / w for u in stage.units for rank, w in zip(u.ranks, u.tp_split, strict=True)}
    contexts = stage_contexts(spec, stage, plan.seq_length)
    for context, rows in zip(contexts, stage.dp_split if contexts else ()):
        for group in context.groups:
            for member in group.members:
                tp = weights[member.rank]
                kept, work = _member(context, group, member, stage, item, tp)
                if stage.head:
                    own = sum(b - a for a, b in member.tokens)
                    kept += head_activation_bytes(spec, rows * own, item, tp, limit=limit) / rows
                found[member.rank] = MemoryBytes(activations=round(rows * (in_flight * kept + work)))
    return found


def _member(
    context: StageContext, group: ContextGroup, member: Member, stage: Stage, item: int, tp: float
) -> tuple[float, float]:
    """(kept, working) bytes of one sequence on one rank, for all layers of the stage but the head."""
    spec, wide, kind = context.spec, max(item, 4), stage.recompute
    own = sum(b - a for a, b in member.tokens)
    gather = context.transport == "gather"
    seen = sum(b - a for a, b in seen_tokens(group.tokens)) if gather else group.num_tokens
    q, kv = (b - a for a, b in (member.computed.q_heads, member.computed.kv_heads))
    queries, keys, dq, dkv = core_bytes(spec, item, wide, q, kv)
    core = group.num_tokens * queries + seen * keys
    work = float(group.num_tokens * dq + seen * dkv)
    if not gather and len(context.groups) > 1:
        work += kv * block_bytes(spec, item, wide, max((x.size for x in context.blocks), default=0))
    alone = len(group.members) == 1
    whole = own * (outside_bytes(spec, item, tp) + home_bytes(spec, item, kind.kind, alone) / tp)
    full = {"full": stage.num_layers, "first": kind.layers}.get(kind.kind, 0)
    kept = full * own * spec.hidden_size * item / tp
    if kind.kind == "selective":
        kept += (stage.num_layers - full) * whole
        work += core
    else:
        kept += (stage.num_layers - full) * (whole + core)
    if full:
        work += whole + core
    return kept, work if stage.num_layers else 0.0
