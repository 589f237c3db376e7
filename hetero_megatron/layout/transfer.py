"""Transfers between layouts: which rank sends which box to whom.

``transfer`` moves a logical tensor (every needed element arrives exactly once); ``reduction`` sums partial
copies (every holder of an element sends it to the element's owner). The adjoint of a transfer is the same list
of pieces with source and destination exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hetero_megatron.layout.box import Box
from hetero_megatron.layout.layout import Cell, IntArray, Layout, box_arrays, overlapping_pairs, refine

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
