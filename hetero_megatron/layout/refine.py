"""The common refinement of boxes: cells on which the set of holders is constant."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from hetero_megatron.layout.box import Box
from hetero_megatron.layout.layout import Layout


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
    for box, same in by_box.items():
        spans = [range(index[a][box.lo[a]], index[a][box.hi[a]]) for a in range(ndim)]
        for where in itertools.product(*spans):
            holders.setdefault(where, set()).update(same)
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
    for found, cell in sorted(((key(cell), cell) for cell in cells), key=itemgetter(0)):
        if found[:3] == line and (last := merged[-1]).box.hi[axis] == cell.box.lo[axis]:
            hi = last.box.hi[:axis] + (cell.box.hi[axis],) + last.box.hi[axis + 1 :]
            merged[-1] = Cell(Box(last.box.lo, hi), last.holders)
        else:
            line = found[:3]
            merged.append(cell)
    return merged
