"""Who owns which element: every element of every tensor gets exactly one owner among its holders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_megatron.layout.box import Box
from hetero_megatron.layout.layout import Layout
from hetero_megatron.layout.refine import Cell, refine

AGAIN = 5  # times that cells are poured again


def assign_owners(
    holders: Mapping[str, Layout], weights: Mapping[int, float] | None = None, whole_below: int = 0
) -> dict[str, Layout]:
    """Spread ownership of a set of tensors over their holders, in proportion to ``weights`` (default: equal).

    Owners hold row intervals of cells of the common refinement; cells under ``whole_below`` elements are not
    split. Cells with the fewest possible owners are placed first, larger before smaller, each filled like
    water: the least loaded holders get rows until their loads meet. Where cells have some of their holders in common
    (replicas of unlike TP degrees), each is poured again a few times, as the first ones did not know of what the others
    would bring. Deterministic, so all ranks agree without talking.
    """
    load: dict[int, float] = {}
    weight = dict(weights or {})
    owned: dict[str, dict[int, list[Box]]] = {name: {r: [] for r in layout.ranks} for name, layout in holders.items()}
    cells = [(name, cell) for name, layout in holders.items() for cell in refine(layout)]
    for _, cell in cells:
        for rank in cell.holders:
            load.setdefault(rank, 0.0)
            # Never quite zero: what only zero-weight ranks hold must still find an owner among them.
            weight[rank] = max(weight.get(rank, 1.0), 1e-9)
    cells.sort(key=lambda item: (len(item[1].holders), -item[1].box.size, item[0], item[1].box))
    placed: list[list[tuple[int, Box]]] = [[] for _ in cells]
    for again in range(AGAIN + 1 if _interleaved([cell for _, cell in cells], whole_below) else 1):
        before = list(placed)
        for i, (_, cell) in enumerate(cells):
            if again and cell.box.size < whole_below:
                continue
            for rank, box in placed[i]:
                load[rank] -= box.size / weight[rank]
            placed[i] = _place(cell, load, weight, whole_below)
            for rank, box in placed[i]:
                load[rank] += box.size / weight[rank]
        if placed == before:
            break
    for (name, _), boxes_of in zip(cells, placed, strict=True):
        for rank, box in boxes_of:
            owned[name][rank].append(box)
    return {
        name: Layout(holders[name].shape, {r: tuple(_join(boxes)) for r, boxes in by_rank.items()})
        for name, by_rank in owned.items()
    }


def _interleaved(cells: Sequence[Cell], whole_below: int) -> bool:
    """Whether cells that may be split have different holders, and some of these in common."""
    sets = {cell.holders for cell in cells if len(cell.holders) > 1 and cell.box.size >= whole_below}
    return sum(map(len, sets)) > len({rank for holders in sets for rank in holders})


def representatives(
    holders: Mapping[str, Layout], owners: Mapping[str, Layout], islands: Sequence[Sequence[int]], whole_below: int = 0
) -> dict[str, Layout]:
    """The layout between holders and owners when sums go in two hops: in every island exactly one rank per element that
    is held there. It is the element's owner in the owner's own island; in the others the elements are spread over
    their holders as :func:`assign_owners` does.

    Args:
        islands: disjoint groups of ranks that together are all holders.
    """
    found: dict[str, dict[int, tuple[Box, ...]]] = {name: {} for name in holders}
    for island in islands:
        inside = set(island)
        rest = {}
        for name, layout in holders.items():
            far = [box for rank, box in owners[name].items() if rank not in inside]
            rest[name] = Layout(
                layout.shape,
                {r: tuple(x for b in layout.of(r) for o in far if (x := b.intersect(o))) for r in island},
            )
        for name, layout in assign_owners(rest, whole_below=whole_below).items():
            for rank in island:
                found[name][rank] = (*owners[name].of(rank), *layout.of(rank))
    return {name: Layout(holders[name].shape, boxes) for name, boxes in found.items()}


def _place(
    cell: Cell, load: Mapping[int, float], weight: Mapping[int, float], whole_below: int
) -> list[tuple[int, Box]]:
    order = sorted(cell.holders, key=lambda r: (load[r], r))
    if len(order) == 1 or cell.box.size < whole_below:
        return [(order[0], cell.box)]
    level = _water_level(cell.box.size, order, load, weight)
    filled = [r for r in order if load[r] < level]
    share = [max(level - load[r], 0.0) * weight[r] for r in filled]
    row, start, total = cell.box.size // cell.box.shape[0], 0, 0.0
    out = []
    for rank, amount in sorted(zip(filled, share, strict=True)):
        total += amount
        stop = min(round(total / row), cell.box.shape[0])
        if rank == max(filled):
            stop = cell.box.shape[0]
        if stop > start:
            out.append((rank, cell.box.rows(cell.box.lo[0] + start, cell.box.lo[0] + stop)))
            start = stop
    return out


def _water_level(size: int, order: list[int], load: Mapping[int, float], weight: Mapping[int, float]) -> float:
    """The load at which ``size`` more elements, given to the least loaded ranks first, are used up."""
    capacity, filled = 0.0, 0.0
    for k, rank in enumerate(order):
        capacity += weight[rank]
        filled += weight[rank] * load[rank]
        level = (size + filled) / capacity
        if k + 1 == len(order) or level <= load[order[k + 1]]:
            return level
    raise AssertionError("unreachable: the last rank always closes the loop")


def _join(boxes: list[Box]) -> list[Box]:
    """Merge row intervals of one rank that touch (equal columns)."""
    out: list[Box] = []
    for box in sorted(boxes, key=lambda b: (b.lo[1:], b.hi[1:], b.lo[0])):
        last = out[-1] if out else None
        if last and last.lo[1:] == box.lo[1:] and last.hi[1:] == box.hi[1:] and last.hi[0] == box.lo[0]:
            out[-1] = Box(last.lo, box.hi)
        else:
            out.append(box)
    return out
