"""Context x head parallel attention: put in place of a layer's attention core, from outside the model.

Queries, keys and values come in for the rank's own tokens and the heads of its projections. They are exchanged
inside the context group (all tokens of the group, the rank's own heads), attended to block by block while keys
and values of other groups pass by, and the result goes back to the tokens' owners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hetero_megatron.comm import Comm
from hetero_megatron.layout.mask import chunk_starts, tiles, visible
from hetero_megatron.model.gpt import GPTStage
from hetero_megatron.model.layers import Context, CoreAttention
from hetero_megatron.ops.block_attention import BlockAttention, RowTile, TileKernel, attn_merge_, key_heads
from hetero_megatron.ops.tile_kernels import tile_kernel
from hetero_megatron.parallel.context_ring import HeadHops, RingAttention, RingProgram
from hetero_megatron.parallel.head_exchange import HeadExchange, local_size
from hetero_megatron.plans.context_plan import (
    Block,
    ContextGroup,
    RingSchedule,
    StageContext,
    head_moves,
    ring_schedule,
    seen_tokens,
)

Documents = Sequence[Sequence[int]] | None
PROGRAMS = 8  # kept by documents: a micro-batch's layers, its backward, and some micro-batches in flight


class StageAttention:
    """What all layers with one window and one size of chunks of a context-parallel stage share on one rank: exchanges,
    and programs by documents. ``dropout``: there may be some, which needs tiles of tokens that follow each other."""

    def __init__(
        self, context: StageContext, comm: Comm, window: int | None, kernel: TileKernel | None = None,
        merge: Callable[..., Any] = attn_merge_, dropout: bool = False, chunk: int | None = None,
    ) -> None:  # fmt: skip
        self.context, self.comm, self.window, self.chunk, self.dropout = context, comm, window, chunk, dropout
        self.member = context.member(comm.rank)
        self.group = next(g for g in context.groups if g.index == self.member.group)
        ranks, queries, keys = head_moves(context, self.group)
        held_heads, computed = self.member.held, self.member.computed
        own_tokens = sum(b - a for a, b in self.member.tokens)
        self.gather = context.transport == "gather" or len(context.groups) == 1
        self.key_tokens = seen_tokens(self.group.tokens) if context.transport == "gather" else self.group.tokens
        seen_keys = sum(b - a for a, b in self.key_tokens)
        q_shapes = ((own_tokens, _size(held_heads.q_heads)), (self.group.num_tokens, _size(computed.q_heads)))
        k_shapes = ((own_tokens, _size(held_heads.kv_heads)), (seen_keys, _size(computed.kv_heads)))
        for move, shapes in ((queries, q_shapes), (keys, k_shapes)):
            for layout, shape in zip((move.before, move.after), shapes, strict=True):
                assert local_size(layout, comm.rank) in (shape, (0, 0)), (layout, shape)
        group = comm.group(ranks)
        self.enter = HeadExchange(group, [queries, keys, keys], [q_shapes, k_shapes, k_shapes])
        self.enter_sinks = HeadExchange(group, [queries], [q_shapes])
        self.leave = HeadExchange(group, [queries.adjoint()], [(q_shapes[1], q_shapes[0])])
        spec = context.spec
        users = [i // spec.queries_per_kv - computed.kv_heads[0] for i in range(*computed.q_heads)]
        kernel = kernel or tile_kernel(comm.device)
        self.attention = BlockAttention(kernel, key_heads(users), window, merge, self.group.tokens)
        self.blocks = self._blocks()
        self.hops = HeadHops(context, comm.rank)
        self._programs: OrderedDict[tuple[tuple[int, ...], ...] | None, RingProgram] = OrderedDict()

    def sinks(self, held: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Sinks of the heads that this rank computes, from those of the heads of its projections. Where the former are
        not among the latter, they travel as one feature of the queries would."""
        if all(_within(m.computed.q_heads, m.held.q_heads) for m in self.group.members):
            first = self.member.held.q_heads[0]
            a, b = self.member.computed.q_heads
            return held[a - first : b - first] if b > a else held[:0]
        (entered,) = self.enter_sinks(held[None, None, :, None].expand(*q.shape[:3], 1).contiguous())
        return entered[:1, :1].sum((0, 1, 3))  # equal for all tokens; of a group without tokens: nothing

    def _blocks(self) -> tuple[Block, ...]:
        """Keys and values come in blocks with the ring; else they are one block that is here already."""
        if self.gather:
            key_range = (0, sum(b - a for a, b in self.key_tokens))
            return (Block(self.group.index, (key_range,), self.key_tokens),)
        return self.context.blocks

    def program(self, documents: Documents) -> RingProgram:
        """What this rank does for a micro-batch with these documents."""
        one_document = documents is None or all(len(starts) <= 1 for starts in documents)
        key = None if one_document else tuple(tuple(starts) for starts in documents or ())
        if key not in self._programs:
            self._programs[key] = self._make(key)
            while len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _make(self, documents: tuple[tuple[int, ...], ...] | None) -> RingProgram:
        length = self.context.seq_length
        alone = {starts: chunk_starts(starts, length, self.chunk) for starts in sorted(set(documents or [(0,)]))}

        def needs(group: ContextGroup, block: Block) -> bool:
            return any(visible(group.tokens, block.tokens, starts, self.window) for starts in alone.values())

        groups = [self.group] if self.gather else list(self.context.groups)
        schedule: RingSchedule = ring_schedule(groups, self.blocks, needs)
        per_block: list[list[RowTile]] = []
        for block in self.blocks:
            tiles_of_starts = {
                starts: tiles(self.group.tokens, block.tokens, cut, self.window, not self.dropout)
                for starts, cut in alone.items()
            }
            if documents is None:
                per_block.append([(None, tile) for tile in tiles_of_starts[0,]])
            else:
                per_block.append(
                    [(row, tile) for row, starts in enumerate(documents) for tile in tiles_of_starts[starts]]
                )
        return RingProgram(self.comm, self.group.index, schedule, self.hops, per_block, self.attention)


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner[0] == inner[1] or (outer[0] <= inner[0] and inner[1] <= outer[1])


def _size(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


class ContextAttention(nn.Module):
    """Stands in for a layer's ``core_attention``: q [b, own tokens, held heads, d], k, v alike, out like q; sinks [held
    heads].

    Args:
        core: what it stands in for; None: without dropout.
    """

    def __init__(self, shared: StageAttention, core: CoreAttention | None = None) -> None:
        super().__init__()
        self.shared = shared
        self.score_dropout = (lambda *_: None) if core is None else core.score_dropout

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        shared = self.shared
        sinks = None if sinks is None else shared.sinks(sinks, q)
        q, k, v = shared.enter(q, k, v)
        dropout = self.score_dropout(context.draws, shared.member.computed.q_heads[0])
        out = RingAttention.apply(q, k, v, sinks, shared.program(context.documents), dropout)
        return shared.leave(out)[0]


def apply_context_parallel(
    stage: GPTStage, context: StageContext, comm: Comm, kernel: TileKernel | None = None,
    merge: Callable[..., Any] = attn_merge_,
) -> None:  # fmt: skip
    """Make the layers of ``stage`` attend across the context groups, by ``kernel`` and the operator ``attn_merge``, and
    those of linear attention pass their states."""
    shared: dict[tuple[int | None, int | None], StageAttention] = {}  # by window and chunk
    linear: list[Any] = [layer.linear_attn for layer in stage.layers() if layer.kind.linear]
    if linear:
        from hetero_megatron.parallel.context_states import ContextDelta, StageStates

        states = StageStates(context, comm)
        for mixer in linear:
            setattr(mixer, "core_attention", ContextDelta(states, mixer.core_attention))  # noqa: B010 (another type)
    for layer in (layer for layer in stage.layers() if layer.kind.mixer == "attention"):
        core = layer.self_attn.core_attention
        limits, dropout = (core.window, core.chunk), core.dropout > 0
        if limits not in shared:
            shared[limits] = StageAttention(context, comm, core.window, kernel, merge, dropout, core.chunk)
        layer.self_attn.kv_of_query = None  # keys travel as they are; heads are matched where they are computed
        setattr(layer.self_attn, "core_attention", ContextAttention(shared[limits], core))  # noqa: B010 (another type)
