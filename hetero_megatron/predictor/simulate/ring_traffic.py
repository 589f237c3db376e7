"""Traffic of one layer of a context stage, and the query-key pairs that every group computes per round.

Taken from the structures that the runtime executes (``head_moves``, ``make_blocks``, ``ring_schedule``, ``head_hop``),
in units of (token, head) of one sequence, so it does not depend on rates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.layout import Transfer
from hetero_megatron.layout.mask import chunk_starts, tiles, visible
from hetero_megatron.plans.context_plan import (
    Block,
    ContextGroup,
    Hop,
    RingSchedule,
    StageContext,
    head_hop,
    head_moves,
    ring_schedule,
    seen_tokens,
)
from hetero_megatron.utils.cached_method import cached_method

Volumes = Mapping[tuple[int, int], int]  # (source rank, destination rank) -> (token, head) units


@dataclass(frozen=True)
class Passage:
    """One message exchange between two groups: a block's keys and values, or their gradients."""

    source: int
    to: int
    tokens: int
    gradients: bool


class LayerTraffic:
    """One layer of one inner replica of a stage. A token sees ``window`` tokens, itself among them, of its own chunk of
    ``chunk`` tokens; None: all.

    Attributes:
        ranks: ranks of each head exchange.
        enter, leave: traffic of the exchange before attention (queries, keys, values) and after it (output). Backward
            sends the same amounts in the opposite direction.
        pairs: by group and block, the (query, key) pairs of one head.
    """

    def __init__(self, context: StageContext, window: int | None, chunk: int | None = None) -> None:
        self.context, self.window = context, window
        self._starts = chunk_starts((0,), context.seq_length, chunk)
        self.groups = {g.index: g for g in context.groups}
        self.ring = context.transport != "gather" and len(context.groups) > 1
        one_exchange = context.transport == "gather" or len(context.groups) == 1
        exchanged = context.groups[:1] if one_exchange else context.groups
        self.ranks, self.enter, self.leave = [], [], []
        self.exchange_of: dict[int, int] = {}  # by group: place in these lists
        for group in exchanged:
            ranks, queries, keys = head_moves(context, group)
            self.ranks.append(ranks)
            self.enter.append(_volumes([(queries.pieces, 1), (keys.pieces, 2)]))
            self.leave.append(_volumes([(queries.pieces.adjoint(), 1)]))
        for place, group in enumerate(context.groups):
            self.exchange_of[group.index] = 0 if one_exchange else place
        self.blocks: tuple[Block, ...] = ()
        self.schedule: RingSchedule | None = None
        if self.ring:
            self.blocks = context.blocks
            self.schedule = ring_schedule(context.groups, self.blocks, self._needs)
        self.pairs = self._pairs()

    def _needs(self, group: ContextGroup, block: Block) -> bool:
        return visible(group.tokens, block.tokens, self._starts, self.window)

    def _pairs(self) -> dict[int, list[int]]:
        areas = {}
        for g, group in self.groups.items():
            keys = [block.tokens for block in self.blocks]
            if not self.ring:
                keys = [seen_tokens(group.tokens) if self.context.transport == "gather" else group.tokens]
            areas[g] = [sum(t.area for t in tiles(group.tokens, k, self._starts, self.window)) for k in keys]
        return areas

    def volumes(self, passage: Passage) -> dict[tuple[int, int], int]:
        """Units by pair of ranks: keys and values together (or both gradients)."""
        return _volumes([(self._hop(passage.source, passage.to)[passage.gradients], 2 * passage.tokens)])

    @cached_method
    def _hop(self, source: int, to: int) -> tuple[Transfer, Transfer]:
        return head_hop(self.groups[source], self.groups[to], self.context.spec.num_kv_heads)

    def keys_of(self, t: int) -> list[Passage]:
        """Passages that arrive in round ``t``."""
        assert self.schedule is not None
        return [Passage(h.source, h.to, self.blocks[h.block].size, False) for h in self._round(t)]

    def gradients_of(self, t: int) -> list[Passage]:
        """Passages sent at the end of round ``t`` of backward: to the block's next group, or to its owner."""
        following = {h.block: h.to for h in self._round(t + 1)}
        ends = [(h, self.blocks[h.block].group if h.last else following[h.block]) for h in self._round(t)]
        return [Passage(h.to, end, self.blocks[h.block].size, True) for h, end in ends]

    def _round(self, t: int) -> tuple[Hop, ...]:
        assert self.schedule is not None
        return self.schedule.rounds[t] if t < len(self.schedule.rounds) else ()


def _volumes(moves: list[tuple[Transfer, int]]) -> dict[tuple[int, int], int]:
    total: dict[tuple[int, int], int] = defaultdict(int)
    for transfer, weight in moves:
        for piece in transfer.pieces:
            if piece.src != piece.dst:
                total[piece.src, piece.dst] += piece.box.size * weight
    return dict(total)
