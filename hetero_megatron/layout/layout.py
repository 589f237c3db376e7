"""Layouts: which boxes of a logical tensor each rank holds; where they differ; and how data moves from one layout to
another, by intersecting the two."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hetero_megatron.layout.box import Box

IntArray = np.ndarray


@dataclass(frozen=True)
class Layout:
    """Boxes of an index space of ``shape``, by rank.

    The boxes of one rank are disjoint; different ranks may hold the same or overlapping boxes (replicas) and
    need not cover the space. Empty boxes are dropped, ranks without boxes remain listed.
    """

    shape: tuple[int, ...]
    boxes: Mapping[int, tuple[Box, ...]]
    _cache: dict[str, tuple[IntArray, ...]] = field(default_factory=dict, repr=False, compare=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole_box = Box.whole(self.shape)
        checked_boxes, counts = {}, {}
        by_tuple: dict[int, tuple[tuple[Box, ...], int]] = {}  # ranks that share one tuple of boxes are checked once
        for rank in sorted(self.boxes):
            boxes = self.boxes[rank]
            checked = by_tuple.get(id(boxes))
            if checked is None:
                sizes = [b.size for b in boxes]
                non_empty = tuple(sorted(b for b, size in zip(boxes, sizes) if size))
                assert all(map(whole_box.contains, non_empty)), f"rank {rank}: {non_empty} outside {self.shape}"
                assert _disjoint(non_empty), f"rank {rank}: boxes overlap: {non_empty}"
                checked = by_tuple[id(boxes)] = non_empty, sum(sizes)
            checked_boxes[rank], counts[rank] = checked
        object.__setattr__(self, "boxes", checked_boxes)
        object.__setattr__(self, "_counts", counts)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.boxes)

    def of(self, rank: int) -> tuple[Box, ...]:
        return self.boxes.get(rank, ())

    def items(self) -> Iterable[tuple[int, Box]]:
        """All (rank, box) pairs, ranks ascending."""
        return ((rank, box) for rank, boxes in self.boxes.items() for box in boxes)

    def only(self, ranks: Iterable[int]) -> Layout:
        """What some of the ranks hold; itself where these are all."""
        boxes = {r: self.boxes[r] for r in ranks if r in self.boxes}
        return self if len(boxes) == len(self.boxes) else Layout(self.shape, boxes)

    def on_ranks(self, ranks: Sequence[int]) -> Layout:
        """This layout on other ranks: on the i-th of ``ranks`` (ascending) those of the i-th rank here."""
        assert len(ranks) == len(self.boxes), f"{len(ranks)} ranks for {len(self.boxes)}"
        moved = object.__new__(Layout)  # the boxes were checked
        for name, value in (
            ("shape", self.shape), ("boxes", dict(zip(ranks, self.boxes.values(), strict=True))), ("_cache", {}),
            ("_counts", dict(zip(ranks, self._counts.values(), strict=True))),
        ):  # fmt: skip
            object.__setattr__(moved, name, value)
        return moved

    def arrays(self) -> tuple[IntArray, IntArray, IntArray]:
        """(ranks [n], lo [n, d], hi [n, d]) of :meth:`items`, cached."""
        if "all" not in self._cache:
            pairs = list(self.items())
            lo, hi = box_arrays([b for _, b in pairs], len(self.shape))
            self._cache["all"] = (np.array([r for r, _ in pairs], dtype=np.int64), lo, hi)
        ranks, lo, hi = self._cache["all"]
        return ranks, lo, hi

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks hold the same boxes."""
        return len(set(self.boxes.values())) == 1

    @cached_property
    def most(self) -> int:
        """Elements of the rank that has most."""
        return max(self._counts.values(), default=0)

    def elements(self, rank: int) -> int:
        return self._counts.get(rank, 0)

    def counts(self) -> IntArray:
        """Elements of each of its ranks, ascending, as int64; cached."""
        if "counts" not in self._cache:
            self._cache["counts"] = (np.fromiter(self._counts.values(), np.int64, len(self._counts)),)
        return self._cache["counts"][0]


def _disjoint(boxes: Sequence[Box]) -> bool:
    if len(boxes) <= 4:  # as nearly all ranks have: arrays would take longer
        return not any(a.intersect(b) for a, b in combinations(boxes, 2))
    lo, hi = box_arrays(boxes)
    return len(overlapping_pairs(lo, hi, lo, hi)[0]) == len(boxes)


def box_arrays(boxes: Iterable[Box], ndim: int | None = None) -> tuple[IntArray, IntArray]:
    """(lo [n, d], hi [n, d]) as int64."""
    boxes = list(boxes)
    d = len(boxes[0].lo) if boxes else (ndim or 1)
    lo = np.array([b.lo for b in boxes], dtype=np.int64).reshape(len(boxes), d)
    hi = np.array([b.hi for b in boxes], dtype=np.int64).reshape(len(boxes), d)
    return lo, hi


def overlapping_pairs(
    lo_a: IntArray, hi_a: IntArray, lo_b: IntArray, hi_b: IntArray, chunk: int = 1 << 22
) -> tuple[IntArray, IntArray]:
    """Indices (i, j) of all pairs of boxes a[i], b[j] that have a common point, ordered by (i, j)."""
    if not len(lo_a) or not len(lo_b):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = max(1, chunk // len(lo_b))
    found_i, found_j = [], []
    for start in range(0, len(lo_a), rows):
        la, ha = lo_a[start : start + rows, None], hi_a[start : start + rows, None]
        hit = np.ones((la.shape[0], len(lo_b)), dtype=bool)
        for axis in range(lo_a.shape[1]):
            hit &= (la[..., axis] < hi_b[None, :, axis]) & (lo_b[None, :, axis] < ha[..., axis])
        i, j = np.nonzero(hit)
        found_i.append(i + start)
        found_j.append(j)
    return np.concatenate(found_i), np.concatenate(found_j)


@dataclass(frozen=True, order=True)
class Cell:
    box: Box
    holders: tuple[int, ...]  # ranks, ascending


def refine(*layouts: Layout) -> tuple[Cell, ...]:
    """Cut the space held by any rank into disjoint cells with one holder set each, ordered by position.

    Several layouts of one space are refined together: a rank holds a point if any layout gives it that point.
    Neighbouring cells with equal holders are merged along the last possible axis, so plain cases stay plain
    (replicas of a whole tensor give one cell).
    """
    pairs = [pair for layout in layouts for pair in layout.items()]
    if not pairs:
        return ()
    assert len({layout.shape for layout in layouts}) == 1, "layouts of different spaces"
    if len({box for _, box in pairs}) == 1:
        return (Cell(pairs[0][1], tuple(sorted({rank for rank, _ in pairs}))),)
    cells = _grid_cells(pairs)
    for axis in reversed(range(len(layouts[0].shape))):
        cells = _merge(cells, axis)
    return tuple(sorted(cells))


def _grid_cells(pairs: list[tuple[int, Box]]) -> list[Cell]:
    """Cells of the grid spanned by all box faces."""
    ndim = len(pairs[0][1].lo)
    by_box: dict[Box, list[int]] = {}
    for rank, box in pairs:
        by_box.setdefault(box, []).append(rank)
    faces = [sorted({c for b in by_box for c in (b.lo[a], b.hi[a])}) for a in range(ndim)]
    index = [{c: i for i, c in enumerate(axis)} for axis in faces]
    holders: dict[tuple[int, ...], set[int]] = {}
    for box, ranks in by_box.items():
        spans = [range(index[a][box.lo[a]], index[a][box.hi[a]]) for a in range(ndim)]
        for cell in itertools.product(*spans):
            holders.setdefault(cell, set()).update(ranks)
    return [
        Cell(
            Box(tuple(faces[a][i] for a, i in enumerate(w)), tuple(faces[a][i + 1] for a, i in enumerate(w))),
            tuple(sorted(ranks)),
        )
        for w, ranks in holders.items()
    ]


def _merge(cells: Iterable[Cell], axis: int) -> list[Cell]:
    """Join cells that touch along ``axis`` and agree in everything else."""

    def key(cell: Cell) -> tuple[tuple[int, ...], ...]:
        lo, hi = cell.box.lo, cell.box.hi
        return (lo[:axis] + lo[axis + 1 :], hi[:axis] + hi[axis + 1 :], cell.holders, (lo[axis],))

    merged: list[Cell] = []
    line: tuple[tuple[int, ...], ...] = ()  # all of a cell but where it is along the axis
    for place, cell in sorted(((key(cell), cell) for cell in cells), key=itemgetter(0)):
        if place[:3] == line and (last := merged[-1]).box.hi[axis] == cell.box.lo[axis]:
            hi = last.box.hi[:axis] + (cell.box.hi[axis],) + last.box.hi[axis + 1 :]
            merged[-1] = Cell(Box(last.box.lo, hi), last.holders)
        else:
            line = place[:3]
            merged.append(cell)
    return merged


LinkCost = Callable[[int, int], float]  # seconds or any monotone cost of moving one element src -> dst


class Piece(NamedTuple):
    src: int
    dst: int
    box: Box


@dataclass(frozen=True)
class Transfer:
    """Pieces ordered by (dst, position); a piece with src == dst is a local copy."""

    pieces: tuple[Piece, ...]

    @cached_property
    def _by_src(self) -> dict[int, list[Piece]]:
        return _group((p.src, p) for p in self.pieces)

    @cached_property
    def _by_dst(self) -> dict[int, list[Piece]]:
        return _group((p.dst, p) for p in self.pieces)

    def sends(self, rank: int) -> list[Piece]:
        return self._by_src.get(rank, [])

    def receives(self, rank: int) -> list[Piece]:
        return self._by_dst.get(rank, [])

    def adjoint(self) -> Transfer:
        return Transfer(tuple(Piece(p.dst, p.src, p.box) for p in self.pieces))

    def elements(self, src: int, dst: int) -> int:
        return sum(p.box.size for p in self.sends(src) if p.dst == dst)


def _group(keyed: Iterable[tuple[int, Piece]]) -> dict[int, list[Piece]]:
    out: dict[int, list[Piece]] = defaultdict(list)
    for rank, piece in keyed:
        out[rank].append(piece)
    return dict(out)


def reduction(holders: Layout, owners: Layout) -> Transfer:
    """Every holder of a point sends it to every owner of that point; the owner adds in source-rank order."""
    src, dst, lo, hi = _overlaps(holders, owners)
    boxes = map(Box, map(tuple, lo.tolist()), map(tuple, hi.tolist()))
    return Transfer(tuple(map(Piece, src.tolist(), dst.tolist(), boxes)))


def reduction_elements(holders: Layout, owners: Layout) -> tuple[IntArray, IntArray, IntArray]:
    """(source, destination, elements) of every piece of :func:`reduction`, as int64."""
    src, dst, lo, hi = _overlaps(holders, owners)
    return src, dst, np.prod(hi - lo, axis=1)


def reduction_blocks(holders: Layout, owners: Layout, block: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """The same and, last, in how many blocks the pieces lie: every row of the tensor (along its last axis) is cut into
    runs of ``block`` elements, from its beginning."""
    src, dst, lo, hi = _overlaps(holders, owners)
    rows = np.prod(hi[:, :-1] - lo[:, :-1], axis=1)
    return src, dst, np.prod(hi - lo, axis=1), rows * (-(-hi[:, -1] // block) - lo[:, -1] // block)


def _overlaps(holders: Layout, owners: Layout) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(source [n], destination [n], lo [n, d], hi [n, d]) of all common boxes, ordered by (destination, position)."""
    src_rank, src_lo, src_hi = holders.arrays()
    dst_rank, dst_lo, dst_hi = owners.arrays()
    i, j = overlapping_pairs(dst_lo, dst_hi, src_lo, src_hi)
    lo, hi = np.maximum(dst_lo[i], src_lo[j]), np.minimum(dst_hi[i], src_hi[j])
    return src_rank[j], dst_rank[i], lo, hi


def transfer(src: Layout, dst: Layout, cost: LinkCost | None = None) -> Transfer:
    """Fill every box of ``dst`` from ``src``, each element exactly once.

    Among replicas the source is the destination itself, else the cheapest by ``cost``, else the one that has
    sent least so far, else the lowest rank.

    Raises:
        AssertionError: some element of ``dst`` is held by no rank of ``src``.
    """
    cells = _disjoint_sources(src)
    lo_c, hi_c = box_arrays((c.box for c in cells), len(src.shape))
    dst_rank, dst_lo, dst_hi = dst.arrays()
    i, j = overlapping_pairs(dst_lo, dst_hi, lo_c, hi_c)
    lo, hi = np.maximum(dst_lo[i], lo_c[j]), np.minimum(dst_hi[i], hi_c[j])
    sizes = np.prod(hi - lo, axis=1)
    covered = np.zeros(len(dst_rank), np.int64)
    np.add.at(covered, i, sizes)
    missing = np.nonzero(covered != np.prod(dst_hi - dst_lo, axis=1))[0]
    if len(missing):
        k = int(missing[0])
        box = Box(tuple(dst_lo[k].tolist()), tuple(dst_hi[k].tolist()))
        raise AssertionError(f"rank {int(dst_rank[k])} needs {box}, which the source layout does not hold in full")
    sent: dict[int, int] = defaultdict(int)
    pieces = []
    for rank, c, size, box_lo, box_hi in zip(
        dst_rank[i].tolist(), j.tolist(), sizes.tolist(), lo.tolist(), hi.tolist(), strict=True
    ):
        source = _choose(cells[c].holders, rank, cost, sent)
        if source != rank:
            sent[source] += size
        pieces.append(Piece(source, rank, Box(tuple(box_lo), tuple(box_hi))))
    return Transfer(tuple(pieces))


def _disjoint_sources(src: Layout) -> list[Cell]:
    """The source as disjoint boxes with their holders; refined only where replicas overlap partly."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in src.items():
        holders[box].append(rank)
    boxes = list(holders)
    lo, hi = box_arrays(boxes, len(src.shape))
    if len(overlapping_pairs(lo, hi, lo, hi)[0]) == len(boxes):  # each box meets only itself
        return [Cell(box, tuple(ranks)) for box, ranks in holders.items()]
    return list(refine(src))


def _choose(holders: tuple[int, ...], rank: int, cost: LinkCost | None, sent: dict[int, int]) -> int:
    if len(holders) == 1 or rank in holders:
        return rank if rank in holders else holders[0]
    return min(holders, key=lambda h: (cost(h, rank) if cost else 0.0, sent[h], h))
