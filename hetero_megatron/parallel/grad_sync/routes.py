"""Which parts of a rank's arrays go to whom in one hop of a bucket. No tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetero_megatron.layout import Box, Layout, reduction
from hetero_megatron.plans.buckets import Hop

Slices = tuple[slice, ...]
Parts = list[tuple[int, Slices]]  # (which array, where in it)
T = TypeVar("T")


@dataclass(frozen=True)
class OwnedPiece:
    """A box of one tensor that this rank sums up.

    Attributes:
        slices: of what the rank itself holds of it, inside the local parameter: all of it, but of a matrix that it owns
            whole perhaps only a part; inside: of the same, in the box.
        offset: of its first element in the bucket's flat gradient.
        key: of the array that it is in: the tensor's name, or of a tensor of which the rank keeps several boxes, and
            this is not in the first one, name and number.
    """

    name: str
    box: Box
    slices: Slices
    offset: int
    inside: Slices = ()
    key: str = ""

    @property
    def held(self) -> bool:
        """Whether the local parameter has all of it."""
        return not self.inside


def local_pieces(
    layouts: Mapping[str, Layout], rank: int, boxes: Mapping[str, Box], kept: Mapping[str, Sequence[Box]] | None = None
) -> list[OwnedPiece]:
    """A rank's boxes of every tensor, and where they lie in its parameters, or in what it keeps of these between uses,
    and in a flat buffer."""
    pieces, offset = [], 0
    for name, layout in layouts.items():
        places = (boxes[name],) if kept is None else kept.get(name, ())
        for box in layout.of(rank):
            number, place = next(((i, b) for i, b in enumerate(places) if b.contains(box)), (0, places[0]))
            local_box = box if place.contains(box) else box.intersect(place) or Box(box.lo, box.lo)
            box_index = () if local_box is box else local_box.slices(box)
            local_index = local_box.slices(place) if local_box.size else (slice(0, 0),) * len(local_box.lo)
            pieces.append(OwnedPiece(name, box, local_index, offset, box_index, array_key(name, number)))
            offset += box.size
    return pieces


def array_key(name: str, number: int) -> str:
    """Of the array of a tensor's box with this number among those that a rank keeps."""
    return f"{name}[{number}]" if number else name


def by_key(pieces: Iterable[OwnedPiece], values: Iterable[T]) -> dict[str, T]:
    """The values of pieces by their keys as arrays of their own: those of a tensor are numbered."""
    counts: dict[str, int] = defaultdict(int)
    keyed: dict[str, T] = {}
    for piece, value in zip(pieces, values, strict=True):
        keyed[array_key(piece.name, counts[piece.name])] = value
        counts[piece.name] += 1
    return keyed


class HopRoutes:
    """One hop as one rank sees it: the same for all buckets of equal layouts, so equal layers share it.

    Messages between two ranks list the common boxes in (tensor, position) order on both sides, so no index
    travels with the data.

    Args:
        ranks: the members of this rank's group, ascending; me: this rank.
        sources, targets: its pieces on both sides of the hop.
        dense: the bucket is (:attr:`Bucket.dense`).

    Attributes:
        give: by receiver, parts of my sources; take: by sender, parts of my targets. Ranks without parts are left out.
        give_counts, take_counts: elements to and from each member, in group order; 0 for myself.
        given: what others get, parts joined where they lie one after the other.
        wanted: (how many members one after the other, of those that take part, have the same parts; which).
        sends_all: members that send all that I sum up.
        kept: sources that are still needed once they are packed.
        size: elements of my targets.
        runs: by member, in group order, where in the memory of my sources lies what that rank sums up, when they are
            kept one after the other and the bucket is dense; None: there is no such order, parts are packed and
            unpacked.
    """

    def __init__(
        self, hop: Hop, ranks: tuple[int, ...], me: int, sources: Sequence[OwnedPiece], targets: Sequence[OwnedPiece],
        dense: bool,
    ) -> None:  # fmt: skip
        give: dict[int, Parts] = defaultdict(list)
        take: dict[int, Parts] = defaultdict(list)
        for name, layout in hop.sources.items():
            # Only what goes from or to this rank: all that move between all members would be their number squared.
            held_layout, wanted_layout = layout.only(ranks), hop.targets[name].only(ranks)
            own_sources = [(i, s.box) for i, s in enumerate(sources) if s.name == name]
            summed = [(i, t.box) for i, t in enumerate(targets) if t.name == name]
            for piece in reduction(held_layout.only((me,)), wanted_layout).pieces:
                give[piece.dst].append(_inside(piece.box, own_sources))
            for piece in reduction(held_layout, wanted_layout.only((me,))).pieces:
                take[piece.src].append(_inside(piece.box, summed))
        self.give, self.take = dict(give), dict(take)
        self.size = sum(t.box.size for t in targets)
        self.give_counts = [0 if r == me else _volume(give.get(r, ())) for r in ranks]
        self.take_counts = [0 if r == me else _volume(take.get(r, ())) for r in ranks]
        whole_targets = [(i, Box.whole(t.box.shape).slices()) for i, t in enumerate(targets)]
        self.sends_all = frozenset(r for r, parts in take.items() if parts == whole_targets)
        # By operator what could be by member: one for all parts that lie one after the other on both sides.
        self.given = _joined([part for r in ranks if r != me for part in give.get(r, ())])
        self.wanted = _alike(take.get(r, []) for r in ranks if r != me)
        self.kept = frozenset(i for i, _ in give.get(me, ()))
        self.runs = self._find_runs(ranks, sources) if dense else None

    def _find_runs(self, ranks: Sequence[int], sources: Sequence[OwnedPiece]) -> list[slice]:
        """What :attr:`Bucket.dense` promises: my sources from first to last are owner after owner's."""
        runs, offset = [], 0
        for rank in ranks:
            parts = self.give.get(rank, [])
            size = _volume(parts)
            runs.append(slice(offset, offset + size))
            for i, part in parts:
                source = sources[i]
                rows = source.box.size // source.box.shape[0]
                is_whole = all(s == slice(0, n) for s, n in zip(part[1:], source.box.shape[1:], strict=True))
                assert is_whole and source.offset + part[0].start * rows == offset, f"{source.name} is out of its run"
                offset += (part[0].stop - part[0].start) * rows
        assert offset == sum(s.box.size for s in sources)
        return runs


def _inside(box: Box, among: Sequence[tuple[int, Box]]) -> tuple[int, Slices]:
    """(index of the box that contains ``box``, where it is in there)."""
    return next((i, box.slices(origin)) for i, origin in among if origin.contains(box))


def _alike(by_rank: Iterable[Parts]) -> list[tuple[int, Parts]]:
    """(how many ranks one after the other have the same parts, which); those who have none are left out."""
    groups: list[tuple[int, Parts]] = []
    for parts in by_rank:
        if parts and groups and groups[-1][1] == parts:
            groups[-1] = (groups[-1][0] + 1, parts)
        elif parts:
            groups.append((1, parts))
    return groups


def _joined(parts: Parts) -> Parts:
    """The same elements in the same order: rows of one tensor that follow each other are one part."""
    out: Parts = []
    for i, index in parts:
        if out and out[-1][0] == i and out[-1][1][1:] == index[1:] and out[-1][1][0].stop == index[0].start:
            out[-1] = (i, (slice(out[-1][1][0].start, index[0].stop), *index[1:]))
        else:
            out.append((i, index))
    return out


def _volume(parts: Iterable[tuple[int, Slices]]) -> int:
    total = 0
    for _, slices in parts:
        size = 1
        for s in slices:
            size *= s.stop - s.start
        total += size
    return total
