"""Activation memory of the members of a concrete context stage, by the scheduler's formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.context_plan import (
    ContextGroup,
    Member,
    StageContext,
    seen_tokens,
    stage_contexts,
)
from hetero_megatron.plan.memory import MemoryBytes, RankWork, linear_bytes, most_held, operand_bytes
from hetero_megatron.planner.context.memory import block_bytes, core_bytes, home_bytes, outside_bytes
from hetero_megatron.schedule import Held
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import head_activation_bytes


def context_activations(
    plan: Plan, spec: ModelSpec, stage: Stage, chunks: Sequence[RankWork], states: Iterable[Held], item: int
) -> dict[int, MemoryBytes]:
    """By rank, bytes of the activations in flight and of one layer's backward; empty without context groups.

    Args:
        chunks: of the stage; only what all its ranks have in common counts. states: what it may hold at once.
    """
    found = {}
    weights = {rank: sum(u.tp_split) / w for u in stage.units for rank, w in zip(u.ranks, u.tp_split, strict=True)}
    contexts = stage_contexts(spec, stage, plan.seq_length)
    for context, rows in zip(contexts, stage.dp_split if contexts else ()):
        for group in context.groups:
            for member in group.members:
                tp, own = weights[member.rank], rows * sum(b - a for a, b in member.tokens)
                kept, waiting, work = [], [], 0
                for chunk in chunks:
                    each, working = _member(context, group, member, chunk, item, tp)
                    head = head_activation_bytes(spec, own, item, tp, limit=chunk.limit) if chunk.head else 0
                    kept.append(round(rows * each) + head)
                    waiting.append(operand_bytes(spec, replace(chunk, tokens=own, tp=tp)))
                    linear = linear_bytes(spec, replace(chunk, tokens=own, tp=tp, rows=rows)) if chunk.layers else None
                    if linear is not None:
                        working = max(working, linear(spec.hidden_size, spec.ffn_hidden_size / tp) / rows)
                    work = max(work, round(rows * working))
                found[member.rank] = MemoryBytes(activations=most_held(kept, waiting, states) + work)
    return found


def _member(
    context: StageContext, group: ContextGroup, member: Member, chunk: RankWork, item: int, tp: float
) -> tuple[float, float]:
    """(kept, working) bytes of one sequence on one rank, all layers of a chunk; without the head."""
    spec, wide, kind, full = context.spec, max(item, 4), chunk.recompute, chunk.full
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
    whole = own * (outside_bytes(spec, item, tp) + home_bytes(spec, item, kind, alone) / tp)
    kept = full * own * spec.hidden_size * item / tp
    if kind == "selective":
        kept += (chunk.layers - full) * whole
        work += core
    else:
        kept += (chunk.layers - full) * (whole + core)
    if full:
        work += whole + core
    return kept, work if chunk.layers else 0.0
