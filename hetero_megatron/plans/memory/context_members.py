"""Bytes of activations of stages whose ranks divide the tokens and heads of every sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Stage
from hetero_megatron.plans.context_plan import stage_contexts
from hetero_megatron.plans.memory.activations import (
    RankWork,
    beside_layers,
    ends_bytes,
    member_bytes,
    member_layers,
    most_held,
    operand_bytes,
    own_tokens,
    working_bytes,
)
from hetero_megatron.schedule import Held
from hetero_megatron.spec import ModelSpec

if TYPE_CHECKING:
    from hetero_megatron.schedule.split_moments import Moment


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
    found, states = {}, list(states)
    contexts = stage_contexts(spec, stage, seq_length)
    for context, rows in zip(contexts, stage.dp_split if contexts else ()):
        for group in context.groups:
            for member in group.members:
                chunks = [replace(chunk, tokens=rows * own_tokens(member), rows=rows) for chunk in work[member.rank]]
                kept, working, host, splitting = list[int](), list[int](), list[int](), list[int]()
                for chunk in chunks:
                    each, core = member_bytes(context, group, member, chunk)
                    layers = [x.times(rows) for x in member_layers(context, group, member, chunk)]
                    head = sum(ends_bytes(spec, chunk)) if chunk.head else 0
                    host.append(round(sum(layer.host for layer in layers)))
                    kept.append(round(rows * each) + head - host[-1] + beside_layers(spec, chunk))
                    working.append(working_bytes(spec, chunk, layers, rows * core))
                    if moments:
                        from hetero_megatron.plans.memory.split_backward import splitting_bytes

                        splitting.append(splitting_bytes(spec, chunk, layers, kept[-1], rows * core))
                if moments:
                    from hetero_megatron.plans.memory.split_backward import most_at_moments

                    device = most_at_moments(spec, chunks, moments, kept, working, splitting)
                else:
                    device = most_held(kept, [operand_bytes(spec, x) for x in chunks], states) + max(working)
                found[member.rank] = device, most_held(host, [0] * len(host), states)
    return found
