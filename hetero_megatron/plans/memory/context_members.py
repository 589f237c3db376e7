"""Bytes of activations of stages whose ranks divide the tokens and heads of every sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Stage
from hetero_megatron.plans.context_plan import ContextGroup, Member, StageContext, seen_tokens, stage_contexts
from hetero_megatron.plans.memory.activations import (
    RankWork,
    beside_layers,
    ends_bytes,
    most_held,
    operand_bytes,
    working_bytes,
)
from hetero_megatron.plans.memory.context_layers import ContextLayers
from hetero_megatron.plans.memory.offloaded import LayerBytes, chunk_layers, input_goes, layer_models, product_bytes
from hetero_megatron.schedule import Held
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.backward_bytes import Cores

if TYPE_CHECKING:
    from hetero_megatron.schedule.actions import Moment


def context_activations(
    spec: ModelSpec, stage: Stage, seq_length: int, work: Mapping[int, Sequence[RankWork]], states: Iterable[Held],
    moments: Sequence[Moment] = (),
) -> dict[int, tuple[int, int]]:  # fmt: skip
    """By rank, bytes of the activations in flight and of one layer's backward, on the device and in host memory; empty
    without context groups.

    Args:
        work: of the stage's ranks, by chunk. states, moments: what it holds, and what comes then where backwards
            are split, as of plain stages.
    """
    activations, states = {}, list(states)
    contexts = stage_contexts(spec, stage, seq_length)
    for context, rows in zip(contexts, stage.dp_split if contexts else ()):
        for group in context.groups:
            for member in group.members:
                chunks = [replace(chunk, tokens=rows * own_tokens(member), rows=rows) for chunk in work[member.rank]]
                kept, working, host, splitting = list[int](), list[int](), list[int](), list[int]()
                for chunk in chunks:
                    layers_kept, cores = member_bytes(context, group, member, chunk)
                    layers = [x.times(rows) for x in member_layers(context, group, member, chunk)]
                    head = sum(ends_bytes(spec, chunk)) if chunk.head else 0
                    host.append(round(sum(layer.host for layer in layers)))
                    kept.append(round(rows * layers_kept) + head - host[-1] + beside_layers(spec, chunk))
                    working.append(working_bytes(spec, chunk, layers, cores.times(rows)))
                    if moments:
                        from hetero_megatron.plans.memory.split_backward import splitting_bytes

                        splitting.append(splitting_bytes(spec, chunk, layers, kept[-1], cores.times(rows)))
                if moments:
                    from hetero_megatron.plans.memory.split_backward import most_at_moments

                    device = most_at_moments(spec, chunks, moments, kept, working, splitting)
                else:
                    device = most_held(kept, [operand_bytes(spec, x) for x in chunks], states) + max(working)
                activations[member.rank] = device, most_held(host, [0] * len(host), states)
    return activations


def context_host_layers(
    spec: ModelSpec, stage: Stage, seq_length: int, work: Mapping[int, Sequence[RankWork]]
) -> dict[int, list[list[float]]]:
    """By rank and chunk, bytes of a micro-batch in host memory of each layer; empty without context groups."""
    contexts = stage_contexts(spec, stage, seq_length)
    return {
        member.rank: [
            [rows * layer.host for layer in member_layers(context, group, member, chunk)]
            for chunk in work[member.rank]
        ]
        for context, rows in zip(contexts, stage.dp_split if contexts else ())
        for group in context.groups
        for member in group.members
    }


def member_layers(
    context: StageContext, group: ContextGroup, member: Member, chunk: RankWork
) -> tuple[LayerBytes, ...]:
    """Of one sequence, on one rank."""
    def kept(kind: str, model: ModelSpec) -> float:
        one = replace(chunk, layers=1, recompute=kind, first=0, layers_spec=model)
        return member_bytes(context, group, member, one)[0]

    input_bytes = own_tokens(member) * context.spec.hidden_size * chunk.item / chunk.tp
    models, given = layer_models(context.spec, chunk), 0.0 if input_goes(context.spec, chunk) else input_bytes
    return chunk_layers(chunk, models, kept, given, lambda model: product_bytes(model, chunk, own_tokens(member)))


def own_tokens(member: Member) -> int:
    return sum(b - a for a, b in member.tokens)


def member_bytes(context: StageContext, group: ContextGroup, member: Member, chunk: RankWork) -> tuple[float, Cores]:
    """Bytes of one sequence on one rank: (kept by all layers of a chunk without the head, what the cores of one work
    with in backward)."""
    spec = chunk.layers_spec or context.spec
    layers = ContextLayers(
        spec, chunk.layers, chunk.full, chunk.recompute == "selective", chunk.item, max(chunk.item, 4),
        chunk.recompute == "elementwise",
    )  # fmt: skip
    gather = context.transport == "gather"
    seen_keys = sum(b - a for a, b in seen_tokens(group.tokens)) if gather else group.num_tokens
    q, kv = (b - a for a, b in (member.computed.q_heads, member.computed.kv_heads))
    queries, keys = layers.per_core_token(q, kv)
    kept, core = (group.num_tokens * queries[i] + seen_keys * keys[i] for i in (0, 1))
    alone = len(group.members) == 1 and not (gather and len(context.groups) > 1)  # nothing is copied
    kept += own_tokens(member) * layers.per_own_token(chunk.tp, alone)
    if not gather and len(context.groups) > 1:
        core += layers.blocks(kv, max((x.size for x in context.blocks), default=0))
    later = [b - a for a, b in member.tokens if a]  # runs with a state before them
    longest = max((b - a for a, b in member.tokens), default=0)
    states_kept, in_rule = layers.states(own_tokens(member), sum(later), len(later), longest, chunk.tp)
    return kept + states_kept / chunk.tp, Cores(core * (layers.attention > 0), in_rule / chunk.tp)
