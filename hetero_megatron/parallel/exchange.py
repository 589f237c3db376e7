"""One bucket on one rank: packing, exchanging and adding gradients; sending updated parameters back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero_megatron.comm import Comm, Group, Handle
from hetero_megatron.layout import Box, Layout, reduction
from hetero_megatron.plan.buckets import Bucket, Hop

Slices = tuple[slice, ...]
Parts = list[tuple[int, Slices]]  # (which array, where in it)


class FlatTensors:
    """Tensors of given shapes one after the other in one piece of memory, uninitialised.

    Attributes:
        memory: [elements]; views: every tensor, by name, in order.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = zip(shapes.items(), self.memory.split(sizes), strict=True)
        self.views = {name: part.view(*shape) for (name, shape), part in parts}


@dataclass(frozen=True)
class OwnedPiece:
    """A box of one tensor that this rank sums up. ``slices`` index it inside the local parameter."""

    name: str
    box: Box
    slices: Slices
    offset: int  # of its first element in the bucket's flat gradient


class HopExchange:
    """One hop on one rank: arrays of ``sources`` are summed into arrays of ``targets``; back, values go from targets
    into sources.

    Messages between two ranks list the common boxes in (tensor, position) order on both sides, so no index
    travels with the data.

    Attributes:
        runs: by rank, in group order, where in the memory of my sources lies what that rank sums up, when they are kept
            one after the other and the bucket is dense; None: there is no such order, parts are packed and unpacked.
    """

    def __init__(
        self, hop: Hop, group: Group, sources: Sequence[OwnedPiece], targets: Sequence[OwnedPiece], dense: bool = False
    ) -> None:
        self.group, self.me = group, group.comm.rank
        self.sources, self.targets = sources, targets
        self._give: dict[int, Parts] = defaultdict(list)  # by receiver: parts of my sources
        self._take: dict[int, Parts] = defaultdict(list)  # by sender: parts of my targets
        for name, layout in hop.sources.items():
            # Only what goes from or to this rank: all that move between all members would be their number squared.
            held, wanted = layout.only(group.ranks), hop.targets[name].only(group.ranks)
            mine = [(i, s.box) for i, s in enumerate(sources) if s.name == name]
            summed = [(i, t.box) for i, t in enumerate(targets) if t.name == name]
            for piece in reduction(held.only((self.me,)), wanted).pieces:
                self._give[piece.dst].append(_inside(piece.box, mine))
            for piece in reduction(held, wanted.only((self.me,))).pieces:
                self._take[piece.src].append(_inside(piece.box, summed))
        self.size = sum(t.box.size for t in targets)
        self._give_counts = [0 if r == self.me else _volume(self._give[r]) for r in group.ranks]
        self._take_counts = [0 if r == self.me else _volume(self._take[r]) for r in group.ranks]
        everything = [(i, Box.whole(t.box.shape).slices()) for i, t in enumerate(targets)]
        self._sends_all = {r for r in group.ranks if self._take[r] == everything}
        # By operator what could be by member: one for all parts that lie one after the other on both sides.
        self._given = _joined([part for r in group.ranks if r != self.me for part in self._give[r]])
        self._wanted = _alike(self._take[r] for r in group.ranks if r != self.me)
        self.kept = {i for i, _ in self._give[self.me]}  # sources that are still needed once they are packed
        self.runs = self._find_runs() if dense else None
        self._handle: Handle | None = None

    def _find_runs(self) -> list[slice]:
        """What :attr:`Bucket.dense` promises: my sources from first to last are owner after owner's."""
        runs, at = [], 0
        for rank in self.group.ranks:
            size = _volume(self._give[rank])
            runs.append(slice(at, at + size))
            for i, part in self._give[rank]:
                source = self.sources[i]
                rows = source.box.size // source.box.shape[0]
                whole = all(s == slice(0, n) for s, n in zip(part[1:], source.box.shape[1:], strict=True))
                assert whole and source.offset + part[0].start * rows == at, f"{source.name} is out of its run"
                at += (part[0].stop - part[0].start) * rows
        assert at == sum(s.box.size for s in self.sources)
        return runs

    @property
    def given(self) -> int:
        """Elements of partial sums that others add up, and of parameters that come back."""
        return sum(self._give_counts)

    @property
    def taken(self) -> int:
        """Elements of partial sums that come from others, and of parameters that they get."""
        return sum(self._take_counts)

    @property
    def arrived(self) -> bool:
        """Whether what was started would end without waiting."""
        return self._handle is None or self._handle.done

    @property
    def packed(self) -> tuple[int, int, int]:
        """Elements copied into a message on the way to the owners, into one on the way back, and out of that."""
        if self.runs is None:
            return self.given, self.taken, self.given
        return 0, 0 if self.group.size == 2 else self.taken, 0

    def _counts(self, own: int, others: int) -> list[int]:
        return [own if r == self.me else others for r in self.group.ranks]

    def start(
        self, arrays: Sequence[torch.Tensor], empty: torch.Tensor, memory: torch.Tensor | None = None
    ) -> None:
        """Send off the parts of my partial sums that others are to add: out of ``memory``, where they lie in ``runs``,
        or packed; ``empty``: of their dtype."""
        if self.group.size == 1:
            return
        if self.runs is None:
            parts = [arrays[i][at].reshape(-1) for i, at in self._given]
            send = torch.cat(parts) if parts else empty
            self._handle = self.group.all_to_all(send, self._give_counts, self._take_counts)
            return
        assert memory is not None
        if self.group.size == 2:
            send, own = memory[self.runs[1 - self.group.index]], 0
        else:  # with my own part, so that it is one piece
            send, own = memory, self.size
        counts = [x.stop - x.start for x in self.runs]
        counts[self.group.index] = own
        self._handle = self.group.all_to_all(send, counts, self._counts(own, self.size))

    def finish(
        self, arrays: Sequence[torch.Tensor | None], memory: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The sums, one array per target, partial sums added in rank order; ``arrays`` not in ``kept`` may be None.

        With ``runs`` the sums lie in ``memory``, where my own part was.
        """
        if self.group.size == 1:
            return [_part(arrays, i, at) for i, at in self._give[self.me]]
        received = self._wait()
        if self.runs is not None:
            assert memory is not None
            own = memory[self.runs[self.group.index]]
            if self.group.size == 2:  # which of two is added to the other does not matter
                own += received
            else:
                torch.sum(received.view(self.group.size, self.size), 0, out=own)
            return [own[t.offset : t.offset + t.box.size].view(t.box.shape) for t in self.targets]
        chunks = dict(zip(self.group.ranks, received.split(self._take_counts), strict=True))
        others = [r for r in self.group.ranks if r != self.me]
        first = others[0]
        if first in self._sends_all:  # its part becomes the sum; of the first two it does not matter which is added
            total = chunks[first] if len(others) == 1 else chunks[first].clone()
            order = [r for r in self.group.ranks if r != first]
        else:
            total, order = received.new_zeros(self.size), list(self.group.ranks)
        views = [total[t.offset : t.offset + t.box.size].view(t.box.shape) for t in self.targets]
        for rank in order:
            if rank == self.me:
                if self._take[rank]:  # one launch, however many pieces
                    mine = [_part(arrays, i, at) for i, at in self._give[rank]]
                    torch._foreach_add_([views[to][inside] for to, inside in self._take[rank]], mine)
            elif rank in self._sends_all:
                total += chunks[rank]
            else:
                self._add(views, chunks[rank], self._take[rank])
        return views

    @staticmethod
    def _add(views: list[torch.Tensor], chunk: torch.Tensor, parts: list[tuple[int, Slices]]) -> None:
        start = 0
        for to, inside in parts:
            target = views[to][inside]
            target += chunk[start : start + target.numel()].view(target.shape)
            start += target.numel()

    def start_back(
        self, arrays: Sequence[torch.Tensor], dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        """Send my targets' values (in ``dtype``) to the ranks that have them among their sources; with ``runs`` they
        are in ``memory`` already, and there what comes is written."""
        if self.group.size == 1:
            return
        if self.runs is None:
            device = self.group.comm.device  # masters may be in host memory
            parts: list[torch.Tensor] = []
            for ranks, wanted in self._wanted:
                parts += [arrays[i][at].reshape(-1) for i, at in wanted] * ranks
            send = torch.cat(parts).to(device, dtype) if parts else torch.empty(0, dtype=dtype, device=device)
            self._handle = self.group.all_to_all(send, self._take_counts, self._give_counts)
            return
        assert memory is not None
        send, counts = memory[self.runs[self.group.index]], [x.stop - x.start for x in self.runs]
        if self.group.size == 2:
            into, own = memory[self.runs[1 - self.group.index]], 0
            counts[self.group.index] = 0
        else:
            send, into, own = send.repeat(self.group.size), memory, self.size
        self._handle = self.group.all_to_all(send, self._counts(own, self.size), counts, into)

    def finish_back(self, arrays: Sequence[torch.Tensor]) -> None:
        """Write what came into my sources; the parts that are my own targets are there already."""
        if self.group.size == 1:
            return
        received = self._wait()
        if self.runs is not None:
            return
        targets = [arrays[i][at] for i, at in self._given]
        if targets:  # one launch, however many pieces
            parts = received.split([t.numel() for t in targets])
            torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])

    def _wait(self) -> torch.Tensor:
        assert self._handle is not None, "finish without start"
        received, self._handle = self._handle.wait(), None
        assert received is not None
        return received


class BucketExchange:
    """Gradients to owners, parameters to holders, for one bucket, in one hop or two.

    What lies between two hops are boxes of this rank's own parameters, so new values need no memory on their way back.
    """

    def __init__(self, bucket: Bucket, comm: Comm, boxes: Mapping[str, Box]) -> None:
        self.bucket = bucket
        layers = [_pieces(bucket.hops[0].sources, comm.rank, boxes)]
        layers += [_pieces(hop.targets, comm.rank, boxes) for hop in bucket.hops]
        self.pieces = layers[-1]
        self.hops = [
            HopExchange(hop, comm.group(hop.group(comm.rank), lane=-1), sources, targets, bucket.dense)
            for hop, sources, targets in zip(bucket.hops, layers[:-1], layers[1:], strict=True)
        ]
        self._arrays: list[torch.Tensor | None] = []
        self._memory = torch.empty(0)

    def arrived(self, hop: int) -> bool:
        """Whether finishing a hop that was started would not wait."""
        return self.hops[hop].arrived

    def start_reduce(self, hop: int, grads: FlatTensors | None = None) -> None:
        """Send partial sums a hop towards their owners; ``grads``: the bucket's, for the first hop, kept as needed."""
        exchange = self.hops[hop]
        if hop == 0:
            assert grads is not None
            self._arrays = [grads.views[s.name] for s in exchange.sources]
            self._memory = grads.memory
        arrays: list[torch.Tensor] = self._arrays  # type: ignore[assignment]  # all are there until they are packed
        exchange.start(arrays, self._memory[:0], self._memory)
        self._arrays = [x if i in exchange.kept else None for i, x in enumerate(self._arrays)]

    def finish_reduce(self, hop: int) -> list[torch.Tensor]:
        """The sums of the hop's targets: after the last hop, of the owned pieces."""
        sums = self.hops[hop].finish(self._arrays, self._memory)
        self._arrays = list(sums) if hop + 1 < len(self.hops) else []
        return sums

    def forget(self) -> None:
        """Hold on to no gradients."""
        self._arrays, self._memory = [], torch.empty(0)

    def start_spread(
        self, hop: int, masters: Sequence[torch.Tensor], params: Mapping[str, torch.Tensor], flat: FlatTensors | None
    ) -> None:
        """Send the updated owned pieces (or, of an earlier hop, what came of them) a hop towards their holders.

        ``flat``: where the parameters lie one after the other, with all owned ones up to date; for dense buckets.
        """
        exchange, dtype = self.hops[hop], params[self.bucket.names[0]].dtype
        last = hop + 1 == len(self.hops)
        memory = flat.memory if flat is not None else None
        exchange.start_back(masters if last else _views(exchange.targets, params), dtype, memory)

    def finish_spread(self, hop: int, params: Mapping[str, torch.Tensor]) -> None:
        """Write what came into the local parameters."""
        exchange = self.hops[hop]
        exchange.finish_back(_views(exchange.sources, params))


def _pieces(layouts: Mapping[str, Layout], rank: int, boxes: Mapping[str, Box]) -> list[OwnedPiece]:
    """A rank's boxes of every tensor, and where they lie in its parameters and in a flat buffer."""
    pieces, offset = [], 0
    for name, layout in layouts.items():
        for box in layout.of(rank):
            pieces.append(OwnedPiece(name, box, box.slices(boxes[name]), offset))
            offset += box.size
    return pieces


def _views(pieces: Sequence[OwnedPiece], params: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [params[p.name][p.slices] for p in pieces]


def _inside(box: Box, among: Sequence[tuple[int, Box]]) -> tuple[int, Slices]:
    """(index of the box that contains ``box``, where it is in there)."""
    return next((i, box.slices(origin)) for i, origin in among if origin.contains(box))


def _alike(by_rank: Iterable[Parts]) -> list[tuple[int, Parts]]:
    """(how many ranks one after the other have the same parts, which); those who have none are left out."""
    found: list[tuple[int, Parts]] = []
    for parts in by_rank:
        if parts and found and found[-1][1] == parts:
            found[-1] = (found[-1][0] + 1, parts)
        elif parts:
            found.append((1, parts))
    return found


def _joined(parts: Parts) -> Parts:
    """The same elements in the same order: rows of one tensor that follow each other are one part."""
    out: Parts = []
    for i, at in parts:
        if out and out[-1][0] == i and out[-1][1][1:] == at[1:] and out[-1][1][0].stop == at[0].start:
            out[-1] = (i, (slice(out[-1][1][0].start, at[0].stop), *at[1:]))
        else:
            out.append((i, at))
    return out


def _part(arrays: Sequence[torch.Tensor | None], index: int, at: Slices) -> torch.Tensor:
    array = arrays[index]
    assert array is not None, "given up before it was summed"
    return array[at]


def _volume(parts: Sequence[tuple[int, Slices]]) -> int:
    total = 0
    for _, slices in parts:
        size = 1
        for s in slices:
            size *= s.stop - s.start
        total += size
    return total
