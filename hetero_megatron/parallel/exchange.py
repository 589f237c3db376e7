"""One bucket on one rank: packing, exchanging and adding gradients; sending updated parameters back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hetero_megatron.comm import Comm, Handle
from hetero_megatron.layout import Box, reduction
from hetero_megatron.plan.buckets import Bucket

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class OwnedPiece:
    """A box of one tensor that this rank owns. ``slices`` index it inside the local parameter."""

    name: str
    box: Box
    slices: Slices
    offset: int  # of its first element in the bucket's flat gradient


class BucketExchange:
    """Gradients to owners, parameters to holders, for one bucket.

    Messages between two ranks list the common boxes in (tensor, position) order on both sides, so no index
    travels with the data.
    """

    def __init__(self, bucket: Bucket, comm: Comm, boxes: Mapping[str, Box]) -> None:
        self.bucket, self.comm, self.group = bucket, comm, comm.group(bucket.ranks)
        self.pieces: list[OwnedPiece] = []
        self._give: dict[int, list[tuple[str, Slices]]] = defaultdict(list)  # owner -> parts of my parameters
        self._take: dict[int, list[tuple[int, Slices]]] = defaultdict(list)  # holder -> (piece, part of it)
        offset, me = 0, comm.rank
        for name in bucket.names:
            first = len(self.pieces)
            for box in bucket.owners[name].of(me):
                self.pieces.append(OwnedPiece(name, box, box.slices(boxes[name]), offset))
                offset += box.size
            moves = reduction(bucket.holders[name], bucket.owners[name])
            for piece in moves.sends(me):
                self._give[piece.dst].append((name, piece.box.slices(boxes[name])))
            for piece in moves.receives(me):
                at = next(i for i in range(first, len(self.pieces)) if self.pieces[i].box.contains(piece.box))
                self._take[piece.src].append((at, piece.box.slices(self.pieces[at].box)))
        self.size = offset
        self._give_counts = [0 if r == me else self._give_size(r, boxes) for r in self.group.ranks]
        self._take_counts = [0 if r == me else self._take_size(r) for r in self.group.ranks]
        everything = [(i, Box.whole(p.box.shape).slices()) for i, p in enumerate(self.pieces)]
        self._sends_all = {r for r in self.group.ranks if self._take[r] == everything}
        self._handle: Handle | None = None

    def _give_size(self, owner: int, boxes: Mapping[str, Box]) -> int:
        return sum(_volume(slices) for _, slices in self._give[owner])

    def _take_size(self, holder: int) -> int:
        return sum(_volume(slices) for _, slices in self._take[holder])

    @property
    def given(self) -> int:
        """Elements of gradients that go to other owners, and of parameters that come back."""
        return sum(self._give_counts)

    @property
    def taken(self) -> int:
        """Elements of gradients that other holders send, and of parameters that they get."""
        return sum(self._take_counts)

    @property
    def alone(self) -> bool:
        """This rank holds and owns everything in the bucket: nothing to exchange."""
        return self.group.size == 1

    @property
    def arrived(self) -> bool:
        """Whether :meth:`finish_reduce` would not wait."""
        return self._handle is None or self._handle.done

    def start_reduce(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Pack the parts of my partial gradients that others own and send them off."""
        if self.alone:
            return
        parts = [
            grads[name][slices].reshape(-1)
            for owner in self.group.ranks
            if owner != self.comm.rank
            for name, slices in self._give[owner]
        ]
        send = torch.cat(parts) if parts else next(iter(grads.values())).new_empty(0)
        self._handle = self.group.all_to_all(send, self._give_counts, self._take_counts)

    def finish_reduce(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the owned pieces, partial sums added in rank order."""
        if self.alone:
            return [grads[p.name][p.slices] for p in self.pieces]
        assert self._handle is not None, "finish_reduce without start_reduce"
        received = self._handle.wait()
        assert received is not None
        self._handle = None
        total = received.new_zeros(self.size)
        views = [total[p.offset : p.offset + p.box.size].view(p.box.shape) for p in self.pieces]
        chunks = dict(zip(self.group.ranks, received.split(self._take_counts), strict=True))
        for holder in self.group.ranks:
            if holder == self.comm.rank:
                if self._take[holder]:  # one launch, however many pieces
                    torch._foreach_add_(
                        [views[at][inside] for at, inside in self._take[holder]],
                        [grads[name][slices] for name, slices in self._give[holder]],
                    )
            elif holder in self._sends_all:
                total += chunks[holder]
            else:
                self._add_parts(views, chunks[holder], self._take[holder])
        return views

    @staticmethod
    def _add_parts(views: list[torch.Tensor], chunk: torch.Tensor, parts: list[tuple[int, Slices]]) -> None:
        start = 0
        for at, inside in parts:
            target = views[at][inside]
            target += chunk[start : start + target.numel()].view(target.shape)
            start += target.numel()

    def start_spread(self, masters: list[torch.Tensor], dtype: torch.dtype) -> None:
        """Send the updated owned pieces (in ``dtype``) to the ranks that hold them."""
        if self.alone:
            return
        parts = [
            masters[at][inside].reshape(-1)
            for holder in self.group.ranks
            if holder != self.comm.rank
            for at, inside in self._take[holder]
        ]
        device = self.comm.device  # masters may be in host memory
        send = torch.cat(parts).to(device, dtype) if parts else torch.empty(0, dtype=dtype, device=device)
        self._handle = self.group.all_to_all(send, self._take_counts, self._give_counts)

    def finish_spread(self, params: Mapping[str, torch.Tensor]) -> None:
        """Write what the owners sent into the local parameters."""
        if self.alone:
            return
        assert self._handle is not None, "finish_spread without start_spread"
        received = self._handle.wait()
        assert received is not None
        self._handle = None
        targets = [
            params[name][slices]
            for owner in self.group.ranks
            if owner != self.comm.rank
            for name, slices in self._give[owner]
        ]
        if targets:  # one launch, however many pieces
            parts = received.split([t.numel() for t in targets])
            torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])


def _volume(slices: Slices) -> int:
    size = 1
    for s in slices:
        size *= s.stop - s.start
    return size
