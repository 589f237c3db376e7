"""The rules by which integers are divided: cutting an axis, anywhere or where matrix products like it, and sharing out
a total."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

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
        found = tuple((min(a * tile, units), min(b * tile, units)) for a, b in cut(tiles, weights))
        if all(abs((b - a) * total - units * w) * MOST_OFF <= units * w for (a, b), w in zip(found, weights)):
            return found
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
