"""Ragged exchange of tensors [b, tokens, heads, d], of any d, between two layouts over (token, head), differentiable.

All tensors of one call travel in one all-to-all; what a rank keeps is copied without passing through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero_megatron.comm import Group
from hetero_megatron.layout import Box, Layout
from hetero_megatron.plans.context_plan import Move

Place = tuple[slice, slice]  # (tokens, heads) inside a rank's tensor


def local_place(boxes: tuple[Box, ...], part: Box) -> Place:
    """Where ``part`` is in a tensor that strings the rank's boxes (one head range) together along tokens."""
    offset = 0
    for box in boxes:
        if box.contains(part):
            tokens, heads = part.slices(box)
            return slice(tokens.start + offset, tokens.stop + offset), heads
        offset += box.shape[0]
    raise AssertionError(f"{part} is not in one of {boxes}")


def local_size(layout: Layout, rank: int) -> tuple[int, int]:
    """(tokens, heads) of a rank's tensor."""
    boxes = layout.of(rank)
    return (sum(b.shape[0] for b in boxes), boxes[0].shape[1]) if boxes else (0, 0)


class _Way:
    """One tensor in one direction on one rank."""

    def __init__(self, move: Move, me: int, shape: tuple[int, int], adds: bool) -> None:
        self.shape, self.adds = shape, adds
        self.give: dict[int, list[Place]] = {}
        self.take: dict[int, list[Place]] = {}
        for piece in move.pieces.sends(me):
            self.give.setdefault(piece.dst, []).append(local_place(move.before.of(me), piece.box))
        for piece in move.pieces.receives(me):
            self.take.setdefault(piece.src, []).append(local_place(move.after.of(me), piece.box))

    def size(self, places: dict[int, list[Place]], peer: int) -> int:
        return sum((t.stop - t.start) * (h.stop - h.start) for t, h in places.get(peer, ()))


class HeadExchange:
    """Moves of several tensors in one exchange.

    Args:
        moves: one per tensor.
        shapes: per tensor, (tokens, heads) of this rank before and after; a rank without tokens or without heads
            has no boxes that would say.
    """

    def __init__(
        self, group: Group, moves: Sequence[Move], shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    ) -> None:
        me = group.comm.rank
        self.group, self.me = group, me
        # A gradient comes back from every rank that got a copy: those are added.
        self.forward = [_Way(m, me, target, False) for m, (_, target) in zip(moves, shapes, strict=True)]
        self.backward = [_Way(m.adjoint(), me, source, True) for m, (source, _) in zip(moves, shapes, strict=True)]
        self.nothing = group.size == 1 and all(m.before.boxes == m.after.boxes for m in moves)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[b, tokens, heads, d] in the layout before -> in the layout after."""
        return tensors if self.nothing else _Exchange.apply(self, *tensors)  # type: ignore[no-any-return]

    def run(self, ways: Sequence[_Way], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        b, features = tensors[0].shape[0], [x.shape[3] for x in tensors]
        other_ranks = [r for r in self.group.ranks if r != self.me]
        parts = [
            x[:, t, h].reshape(-1)
            for peer in other_ranks
            for way, x in zip(ways, tensors, strict=True)
            for t, h in way.give.get(peer, ())
        ]
        give, take = (
            [
                0 if r == self.me else b * sum(d * w.size(getattr(w, side), r) for w, d in zip(ways, features))
                for r in self.group.ranks
            ]
            for side in ("give", "take")
        )
        send = torch.cat(parts) if parts else tensors[0].new_empty(0)
        handle = self.group.all_to_all(send, give, take)
        out = [self._start(way, x) for way, x in zip(ways, tensors, strict=True)]
        received = handle.wait()
        assert received is not None
        offset = 0
        for peer in other_ranks:
            for way, target in zip(ways, out, strict=True):
                for t, h in way.take.get(peer, ()):
                    part = target[:, t, h]
                    values = received[offset : offset + part.numel()].view(part.shape)
                    offset += part.numel()
                    part.add_(values) if way.adds else part.copy_(values)
        return tuple(x.to(t.dtype) for x, t in zip(out, tensors, strict=True))

    def _start(self, way: _Way, x: torch.Tensor) -> torch.Tensor:
        """The result with this rank's own part in it."""
        b, d = x.shape[0], x.shape[3]
        wide_dtype = torch.promote_types(x.dtype, torch.float32) if way.adds else x.dtype
        out = x.new_zeros(b, *way.shape, d, dtype=wide_dtype) if way.adds else x.new_empty(b, *way.shape, d)
        for (t0, h0), (t1, h1) in zip(way.give.get(self.me, ()), way.take.get(self.me, ()), strict=True):
            if way.adds:
                out[:, t1, h1] += x[:, t0, h0]
            else:
                out[:, t1, h1] = x[:, t0, h0]
        return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange.run(exchange.forward, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange.run(ctx.exchange.backward, grads)
