"""The two rules by which integers are divided: cutting an axis, and sharing out a total."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


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
