"""Boxes, half-open n-dimensional intervals of a logical index space; whether they tile it; and the rules by which
integers are divided: cutting an axis, anywhere or where matrix products like it, and sharing out a total."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The index set ``lo[0] <= i0 < hi[0], lo[1] <= i1 < hi[1], …``; empty where some ``hi <= lo``."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(b - a, 0) for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def size(self) -> int:
        count = 1
        for a, b in zip(self.lo, self.hi):  # asked for very often: no tuple in between
            if b <= a:
                return 0
            count *= b - a
        return count

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def contains(self, other: Box) -> bool:
        return all(a <= b and c <= d for a, b, c, d in zip(self.lo, other.lo, other.hi, self.hi, strict=True))

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Index expression of this box in an array that stores ``origin`` (default: the whole space)."""
        base = origin.lo if origin is not None else (0,) * len(self.lo)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.lo, self.hi, base, strict=True))

    def rows(self, start: int, stop: int) -> Box:
        """The part with ``start <= i0 < stop`` (absolute indices of the first axis)."""
        return Box((start, *self.lo[1:]), (stop, *self.hi[1:]))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


TILES = (128, 64, 8)  # columns: of a block of a matrix product, half of one, and 16 bytes of bf16
ALIGNED = 8
MOST_OFF = 32  # a share may differ from its exact part by one in so many

def cut(units: int, weights: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut ``[0, units)`` into consecutive intervals in proportion to integer ``weights``.

    Boundary k is ``units * cumulative_weight_k / total`` rounded half up, in exact integer arithmetic, so every
    rank computes the same cut. Zero weights give empty intervals.
    """
    total = sum(weights)
    assert total > 0 and min(weights) >= 0, f"weights must be >= 0 with a positive sum, got {list(weights)}"
    bounds, cumulative = [0], 0
    for weight in weights:
        cumulative += weight
        bounds.append((2 * units * cumulative + total) // (2 * total))
    return tuple(zip(bounds[:-1], bounds[1:], strict=True))


def cut_in_groups(
    units: tuple[int, int], group: int, weights: Sequence[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(units, groups of ``group`` units) of each part of the interval ``units``: cut at groups while there are at least
    as many as parts, else at units, and then several parts have a group: query heads and their key heads."""
    begin, end = units
    aligned = begin % group == 0 and end % group == 0
    if aligned and (end - begin) // group >= len(weights):
        groups = [(a + begin // group, b + begin // group) for a, b in cut((end - begin) // group, weights)]
        return [(a * group, b * group) for a, b in groups], groups
    parts = [(a + begin, b + begin) for a, b in cut(end - begin, weights)]
    return parts, [(a // group, -(-b // group)) if b > a else (a // group, a // group) for a, b in parts]


@lru_cache(maxsize=4096)
def cut_in_tiles(units: int, weights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """As :func:`cut`, but inner bounds are multiples of the largest of ``TILES`` by which no share differs from its
    exact part by more than 1 in ``MOST_OFF``: libraries of matrix products leave their fast kernels where a side is no
    multiple of 8 elements, and compute whole blocks. Equal shares of multiples of 8 stay equal; where no tile fits, the
    cut is at single units.
    """
    plain = cut(units, weights)
    if len(set(weights)) == 1 and all(a % ALIGNED == 0 for a, _ in plain):
        return plain
    total = sum(weights)
    for tile in TILES:
        tiles = -(-units // tile)
        intervals = tuple((min(a * tile, units), min(b * tile, units)) for a, b in cut(tiles, weights))
        if all(abs((b - a) * total - units * w) * MOST_OFF <= units * w for (a, b), w in zip(intervals, weights)):
            return intervals
    return plain


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Share ``total`` out in proportion to ``weights``; the rest goes to the largest remainders, first index first."""
    weight_sum = sum(weights)
    assert weight_sum > 0 and min(weights) >= 0, f"weights must be >= 0 with a positive sum, got {list(weights)}"
    exact = [Fraction(total * weight, weight_sum) for weight in weights]
    shares = [int(x) for x in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def tiles(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether the boxes are disjoint and together are ``whole``. Time is linear in their number; empty ones count not.

    A box's corners, taken modulo 2, tell how often (modulo 2) each point is covered. If all corners together are those
    of ``whole``, its points are covered an odd number of times, so at least once, and those outside an even number of
    times; if then the sizes add up to that of ``whole``, it is exactly once, and never.
    """
    corners, size = _corners(whole), whole.size
    for box in boxes:
        if box.size:
            corners ^= _corners(box)
            size -= box.size
    return not corners and not size


def _corners(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*zip(box.lo, box.hi, strict=True))) if box.size else set()
