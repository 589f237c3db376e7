"""Activations in stages with context groups: O(own shard + 2 blocks) with a ring, O(sequence x own KV heads) with a
gather."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.plan.canonical import Stage
from hetero_megatron.plan.context_plan import ContextGroup, Member, StageContext, seen_tokens, stage_contexts
from hetero_megatron.plan.memory.activations import RankWork, linear_bytes, most_held, operand_bytes
from hetero_megatron.schedule import Held
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import head_activation_bytes, layer_activation_bytes

KeptWorking = tuple[Any, Any]  # bytes from forward to backward in all layers; more during the backward of one


@dataclass(frozen=True)
class ContextLayers:
    """Layers of a stage with context groups; bytes are of one sequence.

    Args:
        full: how many of the ``layers`` are recomputed whole; ``selective``: of all, the attention core is.
        item: bytes of an activation; wide: of a gradient of keys and values.
    """

    spec: ModelSpec
    layers: int
    full: int
    selective: bool
    item: int
    wide: int

    def per_own_token(self, tp: float, alone: bool) -> KeptWorking:
        """Of what a rank with 1/tp of a layer has for every token of its member; ``alone``: it is its whole group."""
        queries, _, keys, _ = self._core(self.spec.num_heads, self.spec.num_kv_heads)
        outside = layer_activation_bytes(self.spec, 4096, "none", self.item, tp) / 4096 - (queries + keys) / tp
        whole = outside + self._home(alone) / tp
        inputs = self.full * self.spec.hidden_size * self.item / tp
        return inputs + (self.layers - self.full) * whole, whole if self.full else 0.0

    def per_core_token(self, q: Any, kv: Any) -> tuple[KeptWorking, KeptWorking]:
        """Of the attention core on a rank with ``q`` query heads and ``kv`` KV heads: for every query token of its
        group, and for every token whose keys it has."""
        queries, d_queries, keys, d_keys = self._core(q, kv)
        kept, again = 0 if self.selective else self.layers - self.full, bool(self.selective or self.full)
        return (kept * queries, again * queries + d_queries), (kept * keys, again * keys + d_keys)

    def blocks(self, kv: Any, block: int) -> Any:
        """Of the ring's buffers: two blocks of keys and values, and of their gradients."""
        return kv * 2 * self.spec.head_dim * (self.item + self.wide) * 2 * block

    def _core(self, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
        """Of one layer's attention core, per query token (queries, output and log-sum-exp; dQ and the output's
        gradient), and per key token (keys and values; their gradients)."""
        d = self.spec.head_dim
        keys, d_keys = 2 * d * self.item * kv, 2 * d * self.wide * kv
        return (2 * d * self.item + 4) * q, d * (self.wide + self.item) * q, keys, d_keys

    def _home(self, alone: bool) -> int:
        """Per own token and layer, over all heads, that attention keeps besides its core: the output before the
        projection (shared with the core where a member is ``alone``); with selective recompute also q, k and v."""
        q, kv = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        if self.selective:
            return self.item * (2 * q + 2 * kv)
        return 0 if alone else self.item * q


def context_activations(
    spec: ModelSpec, stage: Stage, seq_length: int, work: Mapping[int, Sequence[RankWork]], states: Iterable[Held]
) -> dict[int, int]:
    """By rank, bytes of the activations in flight and of one layer's backward; empty without context groups.

    Args:
        work: of the stage's ranks, by chunk. states: what the stage may hold at once.
    """
    found = {}
    contexts = stage_contexts(spec, stage, seq_length)
    for context, rows in zip(contexts, stage.dp_split if contexts else ()):
        for group in context.groups:
            for member in group.members:
                own, kept, waiting, most = rows * _tokens(member), list[int](), list[int](), 0
                for chunk in work[member.rank]:
                    each, working = _member(context, group, member, chunk)
                    head = head_activation_bytes(spec, own, chunk.item, chunk.tp, limit=chunk.limit)
                    kept.append(round(rows * each) + (head if chunk.head else 0))
                    waiting.append(operand_bytes(spec, replace(chunk, tokens=own)))
                    linear = linear_bytes(spec, replace(chunk, tokens=own, rows=rows)) if chunk.layers else None
                    if linear is not None:
                        working = max(working, linear(spec.hidden_size, spec.ffn_hidden_size / chunk.tp) / rows)
                    most = max(most, round(rows * working))
                found[member.rank] = most_held(kept, waiting, states) + most
    return found


def _tokens(member: Member) -> int:
    return sum(b - a for a, b in member.tokens)


def _member(context: StageContext, group: ContextGroup, member: Member, chunk: RankWork) -> tuple[float, float]:
    """(kept, working) bytes of one sequence on one rank, all layers of a chunk; without the head."""
    layers = ContextLayers(
        context.spec, chunk.layers, chunk.full, chunk.recompute == "selective", chunk.item, max(chunk.item, 4)
    )
    gather = context.transport == "gather"
    seen = sum(b - a for a, b in seen_tokens(group.tokens)) if gather else group.num_tokens
    q, kv = (b - a for a, b in (member.computed.q_heads, member.computed.kv_heads))
    own, (queries, keys) = layers.per_own_token(chunk.tp, len(group.members) == 1), layers.per_core_token(q, kv)
    kept, work = (
        _tokens(member) * own[i] + group.num_tokens * queries[i] + seen * keys[i] for i in (0, 1)
    )
    if not gather and len(context.groups) > 1:
        work += layers.blocks(kv, max((x.size for x in context.blocks), default=0))
    return kept, work if chunk.layers else 0.0
