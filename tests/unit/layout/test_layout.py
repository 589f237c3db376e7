"""Layouts against brute-force NumPy masks."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from hetero_megatron.layout import (
    Box,
    Layout,
    assign_owners,
    cut,
    cut_in_tiles,
    largest_remainder,
    reduction,
    refine,
    transfer,
)
from tests.support.selection import each

CASES = 400  # per law; four laws


def random_partition(rng: random.Random, shape: tuple[int, ...], ranks: list[int]) -> Layout:
    """Disjoint boxes that tile the space, dealt to the ranks at random (several per rank, some ranks empty)."""
    boxes = [Box.whole(shape)]
    for _ in range(rng.randint(0, 6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape))
        at = rng.randint(box.lo[axis], box.hi[axis])
        left = Box(box.lo, (*box.hi[:axis], at, *box.hi[axis + 1 :]))
        right = Box((*box.lo[:axis], at, *box.lo[axis + 1 :]), box.hi)
        boxes += [left, right]
    dealt: dict[int, list[Box]] = {r: [] for r in ranks}
    for box in boxes:
        dealt[rng.choice(ranks)].append(box)
    return Layout(shape, {r: tuple(b) for r, b in dealt.items()})


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def random_layout(rng: random.Random, shape: tuple[int, ...], ranks: list[int], covering: bool) -> Layout:
    """Arbitrary, partly overlapping holders; with ``covering`` one rank more makes them cover the space."""
    boxes = {r: (random_box(rng, shape),) for r in ranks}
    if covering:
        boxes = {**boxes, **{r + 100: b for r, b in random_partition(rng, shape, ranks).boxes.items()}}
    return Layout(shape, boxes)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))


def mask(layout: Layout, rank: int) -> np.ndarray:
    out = np.zeros(layout.shape, dtype=np.int64)
    for box in layout.of(rank):
        out[box.slices()] += 1
    return out


@each("seed", range(CASES))
def test_transfer_moves_every_needed_element_once_from_a_holder(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    src = random_layout(rng, shape, [0, 1, 2], covering=True)
    dst = random_layout(rng, shape, [1, 2, 3, 4], covering=False)
    got = {r: np.zeros(shape, dtype=np.int64) for r in dst.ranks}
    for piece in transfer(src, dst, cost=lambda a, b: (a * 7 + b) % 3).pieces:
        assert (mask(src, piece.src)[piece.box.slices()] == 1).all()
        got[piece.dst][piece.box.slices()] += 1
    for rank in dst.ranks:
        np.testing.assert_array_equal(got[rank], mask(dst, rank))


@each("seed", range(CASES))
def test_transfer_prefers_itself_then_the_cheapest_replica(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    src = random_layout(rng, shape, [0, 1, 2], covering=True)
    dst = random_layout(rng, shape, [1, 2, 3], covering=False)
    price = {(a, b): rng.randint(0, 5) for a in src.ranks for b in dst.ranks}
    for piece in transfer(src, dst, cost=lambda a, b: price[a, b]).pieces:
        point = tuple(slice(i, i + 1) for i in piece.box.lo)
        holders = [r for r in src.ranks if mask(src, r)[point].all()]
        if piece.dst in holders:
            assert piece.src == piece.dst
        else:
            assert price[piece.src, piece.dst] == min(price[h, piece.dst] for h in holders)


@each("seed", range(CASES))
def test_refine_gives_disjoint_cells_with_exact_holders(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    layout = random_layout(rng, shape, [0, 1, 2, 3], covering=rng.random() < 0.5)
    seen = np.zeros(shape, dtype=np.int64)
    for cell in refine(layout):
        seen[cell.box.slices()] += 1
        for rank in layout.ranks:
            inside = mask(layout, rank)[cell.box.slices()]
            assert (inside == (rank in cell.holders)).all()
    np.testing.assert_array_equal(seen, sum(mask(layout, r) for r in layout.ranks) > 0)


@each("seed", range(CASES))
def test_owners_sum_every_holders_part_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    holders = random_layout(rng, shape, [0, 1, 2], covering=True)
    weights = {r: rng.choice([0.0, 1.0, 2.5]) for r in holders.ranks}
    owners = assign_owners({"w": holders}, weights, whole_below=rng.choice([0, 4]))["w"]
    np.testing.assert_array_equal(sum(mask(owners, r) for r in owners.ranks), np.ones(shape, dtype=np.int64))
    for rank in owners.ranks:
        assert (mask(owners, rank) <= mask(holders, rank)).all()
    values = {r: np.random.default_rng(seed + r).integers(0, 99, shape) * mask(holders, r) for r in holders.ranks}
    total = np.zeros(shape, dtype=np.int64)
    moves = reduction(holders, owners)
    for piece in moves.pieces:
        total[piece.box.slices()] += values[piece.src][piece.box.slices()]
    np.testing.assert_array_equal(total, sum(values.values()))
    back = np.zeros(shape, dtype=np.int64)
    for piece in moves.adjoint().receives(holders.ranks[0]):
        back[piece.box.slices()] += 1
    np.testing.assert_array_equal(back, mask(holders, holders.ranks[0]))


def test_equal_replicas_own_equal_parts() -> None:
    holders = {f"w{i}": Layout((48, 5), {r: (Box.whole((48, 5)),) for r in range(4)}) for i in range(3)}
    owners = assign_owners(holders)
    assert [sum(o.elements(r) for o in owners.values()) for r in range(4)] == [180] * 4
    uneven = assign_owners(holders, {0: 3.0, 1: 1.0, 2: 1.0, 3: 1.0})
    assert [sum(o.elements(r) for o in uneven.values()) for r in range(4)] == [360, 120, 120, 120]


def test_missing_source_is_an_error() -> None:
    half = Layout((4,), {0: (Box((0,), (2,)),)})
    with pytest.raises(AssertionError, match=r"rank 1 needs \[0:4\]"):
        transfer(half, Layout((4,), {1: (Box((0,), (4,)),)}))


@each("seed", range(CASES))
def test_cut_and_remainder(seed: int) -> None:
    rng = random.Random(seed)
    units, weights = rng.randint(0, 50), [rng.randint(0, 9) for _ in range(rng.randint(1, 6))] + [1]
    parts = cut(units, weights)
    assert parts[0][0] == 0 and parts[-1][1] == units
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in zip(parts, parts[1:], strict=False))
    for k, (_, stop) in enumerate(parts):
        exact = Fraction(units * sum(weights[: k + 1]), sum(weights))
        assert abs(stop - exact) <= Fraction(1, 2)
    shares = largest_remainder(units, weights)
    assert sum(shares) == units
    assert all(abs(s - Fraction(units * w, sum(weights))) < 1 for s, w in zip(shares, weights, strict=True))


@pytest.mark.parametrize("units", [14336, 128256, 32000, 50257, 11008, 8192])
@pytest.mark.parametrize("weights", [(3, 2), (1, 2), (5, 3, 2), (7, 1), (1, 1, 1), (4, 3, 3, 2)])
def test_large_axes_are_cut_where_matrix_products_are_fast(units: int, weights: tuple[int, ...]) -> None:
    """Inner bounds are multiples of 128, or of 64 where that would be too unfair; shares stay fair; nothing is lost."""
    found = cut_in_tiles(units, weights)
    assert found[0][0] == 0 and found[-1][1] == units
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(a % 64 == 0 for a, _ in found)
    for (a, b), weight in zip(found, weights, strict=True):
        exact = units * weight / sum(weights)
        assert abs(b - a - exact) <= exact / 32 + 1e-9


def test_equal_shares_stay_equal_and_small_axes_are_cut_anywhere() -> None:
    assert [b - a for a, b in cut_in_tiles(128256, (1,) * 8)] == [16032] * 8  # multiples of 8
    assert cut_in_tiles(61, (3, 1)) == cut(61, (3, 1))
    assert cut_in_tiles(48, (1, 1, 0)) == cut(48, (1, 1, 0))
