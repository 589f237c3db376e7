"""Who owns which element: every element of every tensor gets exactly one owner among its holders.

Layouts of holders come in, layouts of owners go out; gradients are then reduced to the owners, and new parameters sent
back to the holders, by the transfers between the two (``layout/layout.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hetero_megatron.layout.box import Box
from hetero_megatron.layout.layout import Layout, refine

AGAIN = 5  # times that runs are poured again

Ranks = tuple[int, ...]
Shares = list[tuple[int, float]]  # (rank, elements)


def assign_owners(
    holders: Mapping[str, Layout], weights: Mapping[int, float] | None = None, whole_below: int = 0
) -> dict[str, Layout]:
    """Spread ownership of a set of tensors over their holders, in proportion to ``weights`` (default: equal).

    Cells of the common refinement that the same ranks hold are strung together, in the order of the tensors, and each
    of these ranks owns one run of them, ranks ascending: so what a rank sends to an owner lies in one piece where it
    keeps its tensors in that order. Runs are cut between rows of a cell; cells under ``whole_below`` elements are not
    cut. Sets with the fewest possible owners come first, each filled like water: the least loaded holders get elements
    until their loads meet. Where sets have some ranks in common (replicas of unlike TP degrees), each is poured again
    a few times, as the first ones did not know of what the others would bring. Deterministic, so all ranks agree
    without talking.
    """
    weight = dict(weights or {})
    owned_boxes: dict[str, dict[int, list[Box]]] = {
        name: {r: [] for r in layout.ranks} for name, layout in holders.items()
    }
    runs: dict[tuple[int, ...], list[tuple[str, Box]]] = {}
    cells_of = {id(layout): refine(layout) for layout in holders.values()}  # tensors of equal layers share theirs
    for name, layout in holders.items():
        for cell in cells_of[id(layout)]:
            runs.setdefault(cell.holders, []).append((name, cell.box))
            for rank in cell.holders:
                # Never quite zero: what only zero-weight ranks hold must still find an owner among them.
                weight[rank] = max(weight.get(rank, 1.0), 1e-9)
    for ranks, shares in _pour({r: sum(box.size for _, box in cells) for r, cells in runs.items()}, weight):
        for name, rank, box in _cut(runs[ranks], shares, whole_below):
            owned_boxes[name][rank].append(box)
    shared = SharedLayouts()
    return {
        name: shared(holders[name].shape, {r: tuple(_join(x, holders[name].of(r))) for r, x in by_rank.items()})
        for name, by_rank in owned_boxes.items()
    }


class SharedLayouts:
    """Makes layouts, one for equal ones: of a bucket of hundreds of small tensors nearly all are, and are checked and
    compared with others once."""

    def __init__(self) -> None:
        self._layout_of: dict[object, Layout] = {}

    def __call__(self, shape: tuple[int, ...], boxes: Mapping[int, tuple[Box, ...]]) -> Layout:
        key = shape, tuple(boxes.items())
        if key not in self._layout_of:
            self._layout_of[key] = Layout(shape, boxes)
        return self._layout_of[key]


def _pour(sizes: Mapping[Ranks, int], weight: Mapping[int, float]) -> Iterator[tuple[Ranks, Shares]]:
    """Each set of holders of so many elements, and what its members get of them."""
    order = sorted(sizes, key=lambda ranks: (len(ranks), -sizes[ranks], ranks))
    load = dict.fromkeys((rank for ranks in order for rank in ranks), 0.0)
    shared = sum(len(ranks) for ranks in order if len(ranks) > 1) > len({r for s in order if len(s) > 1 for r in s})
    poured: dict[Ranks, Shares] = {}
    for _ in range(AGAIN + 1 if shared else 1):
        poured_before = dict(poured)
        for ranks in order:
            for rank, amount in poured.get(ranks, ()):
                load[rank] -= amount / weight[rank]
            poured[ranks] = _shares(sizes[ranks], ranks, load, weight)
            for rank, amount in poured[ranks]:
                load[rank] += amount / weight[rank]
        if poured == poured_before:
            break
    return iter(poured.items())


def representatives(
    holders: Mapping[str, Layout], owners: Mapping[str, Layout], islands: Sequence[Sequence[int]], whole_below: int = 0
) -> dict[str, Layout]:
    """The layout between holders and owners when sums go in two hops: in every island exactly one rank per element that
    is held there. It is the element's owner in the owner's own island; in the others the elements are spread over
    their holders as :func:`assign_owners` does.

    Args:
        islands: disjoint groups of ranks that together are all holders.
    """
    boxes_of: dict[str, dict[int, tuple[Box, ...]]] = {name: {} for name in holders}
    shared = SharedLayouts()
    for island in islands:
        unowned, by_layouts = {}, dict[tuple[int, int], Layout]()
        for name, layout in holders.items():
            key = id(layout), id(owners[name])
            if key not in by_layouts:
                # Ranks that hold the same lack the same: found once for all of them, of hundreds.
                owned_boxes = _join([box for rank in island for box in owners[name].of(rank)])
                kinds = {layout.of(r) for r in island}
                unowned_boxes = {
                    boxes: tuple(x for box in boxes for x in _without(box, owned_boxes)) for boxes in kinds
                }
                by_layouts[key] = Layout(layout.shape, {r: unowned_boxes[layout.of(r)] for r in island})
            unowned[name] = by_layouts[key]
        for name, layout in assign_owners(unowned, whole_below=whole_below).items():
            for rank in island:
                boxes_of[name][rank] = (*owners[name].of(rank), *layout.of(rank))
    return {name: shared(holders[name].shape, boxes) for name, boxes in boxes_of.items()}


def crossing_elements(
    holders: Mapping[str, Layout], owners: Mapping[str, Layout], islands: Sequence[Sequence[int]]
) -> int:
    """Elements that go from holders in one island to owners in another, one for each holder; the owners are holders."""
    pairs = [(layout, owners[name]) for name, layout in holders.items()]
    equal = Counter((id(layout), id(owned_by)) for layout, owned_by in pairs)
    different = {(id(layout), id(owned_by)): (layout, owned_by) for layout, owned_by in pairs}
    total = 0
    for island in islands:
        for key, (layout, owned_by) in different.items():
            owned_boxes = _join([box for rank in island for box in owned_by.of(rank)])
            for boxes, count in Counter(map(layout.of, island)).items():
                inside = (x.size for box in boxes for o in owned_boxes if (x := box.intersect(o)))
                total += equal[key] * count * (sum(box.size for box in boxes) - sum(inside))
    return total


def _without(box: Box, taken: Sequence[Box]) -> list[Box]:
    """What is left of a box without others, which are disjoint."""
    common = tuple(x for o in taken if (x := box.intersect(o)))
    if not common:
        return [box]
    return [cell.box for cell in refine(Layout(box.hi, {0: (box,), 1: common})) if cell.holders == (0,)]


def _shares(
    size: int, ranks: Sequence[int], load: Mapping[int, float], weight: Mapping[int, float]
) -> list[tuple[int, float]]:
    """(rank, elements) of those that get some of ``size`` elements, ranks ascending."""
    order = sorted(ranks, key=lambda r: (load[r], r))
    level = _water_level(size, order, load, weight)
    return [(r, (level - load[r]) * weight[r]) for r in sorted(ranks) if load[r] < level] or [(order[0], float(size))]


def _cut(
    cells: Sequence[tuple[str, Box]], shares: Sequence[tuple[int, float]], whole_below: int
) -> Iterator[tuple[str, int, Box]]:
    """(tensor, rank, box) of every rank's run of the cells."""
    passed, turn, stop = 0, 0, shares[0][1]  # elements passed; whose run it is, and where it should end
    for name, box in cells:
        size, count, first = box.size, box.hi[0] - box.lo[0], 0
        row = size // count
        while first < count:
            last = turn + 1 == len(shares)
            rows = count if last else min(max(round((stop - passed) / row), first), count)
            if size < whole_below and not last:
                rows = count if 2 * (stop - passed) >= size else 0
            if rows > first:
                yield name, shares[turn][0], box.rows(box.lo[0] + first, box.lo[0] + rows)
                first = rows
            if first < count:
                turn += 1
                stop += shares[turn][1]
        passed += size


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


def _join(boxes: list[Box], inside: Sequence[Box] = ()) -> list[Box]:
    """Merge row intervals of one rank that touch (equal columns); where they are ``inside`` several boxes, only those
    in the same one."""
    if len(boxes) < 2:
        return boxes
    out: list[Box] = []
    for box in sorted(boxes, key=lambda b: (b.lo[1:], b.hi[1:], b.lo[0])):
        last = out[-1] if out else None
        if last and last.lo[1:] == box.lo[1:] and last.hi[1:] == box.hi[1:] and last.hi[0] == box.lo[0]:
            joined = Box(last.lo, box.hi)
            if len(inside) < 2 or any(held.contains(joined) for held in inside):
                out[-1] = joined
                continue
        out.append(box)
    return out
