"""Division of equal whole units (tokens, heads, layers, sequences) such that the part that ends last ends soonest."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def min_max_shares(
    total: int,
    cost: Sequence[float] | Floats,
    caps: Sequence[int] | Integers | None = None,
    fixed: Sequence[float] | Floats | None = None,
    least: int = 0,
) -> Integers:
    """Integers n_i with sum ``total`` and ``least`` <= n_i <= caps_i that minimise the largest fixed_i + n_i cost_i of
    those with n_i > ``least`` (exact).

    Args:
        cost: seconds per unit, > 0.
        caps: None: no limits.
        fixed: seconds besides; None: none.

    Raises:
        ValueError: the caps sum to less than ``total``, or the least shares to more.
    """
    price = np.asarray(cost, dtype=np.float64)
    start = np.zeros(len(price)) if fixed is None else np.asarray(fixed, dtype=np.float64)
    start = start + least * price
    to_share = total - least * len(price)
    limit = np.full(len(price), to_share) if caps is None else np.minimum(np.asarray(caps, np.int64) - least, to_share)
    if to_share < 0 or (limit < 0).any() or int(limit.sum()) < to_share:
        raise ValueError("caps sum to less than the total, or least shares to more")
    level = water_level(to_share, 1.0 / price, limit.astype(np.float64), start)
    shares = np.clip(np.floor((level - start) / price * (1 - 1e-12)).astype(np.int64), 0, limit)
    remainder = to_share - int(shares.sum())
    heap = [(start[i] + (shares[i] + 1) * price[i], i) for i in np.flatnonzero(shares < limit)] if remainder else []
    heapq.heapify(heap)
    for _ in range(remainder):
        _, i = heapq.heappop(heap)
        shares[i] += 1
        if shares[i] < limit[i]:
            heapq.heappush(heap, (start[i] + (shares[i] + 1) * price[i], i))
    return shares + least


def min_max_tokens(
    total: int, unit: int, cost: Floats, room: Floats, fixed: Floats | None = None
) -> tuple[int, ...] | None:
    """The same of tokens in whole units; the remainder below one unit goes to the part with room that ends first.

    Args:
        cost: seconds per token; room: most tokens.

    Returns:
        None where they do not fit.
    """
    units, remainder = divmod(total, unit)
    try:
        shares = min_max_shares(units, cost * unit, np.floor(room / unit).astype(np.int64), fixed) * unit
    except ValueError:
        return None
    if remainder:
        ends = np.where(
            shares + remainder <= room, (shares + remainder) * cost + (0.0 if fixed is None else fixed), np.inf
        )
        first = int(ends.argmin())
        if ends[first] == np.inf:
            return None
        shares[first] += remainder
    return tuple(shares.tolist())


def min_max_counts(seconds: Sequence[Sequence[float]], total: int) -> list[int] | None:
    """Numbers n_i >= 1 with sum ``total`` that minimise the largest ``seconds[i][n_i]``, which rises with n_i; None if
    there are more parts than units."""
    counts = [1] * len(seconds)
    if total < len(seconds):
        return None
    for _ in range(total - len(seconds)):
        best = min(range(len(seconds)), key=lambda i: (seconds[i][counts[i] + 1], i))
        counts[best] += 1
    return counts


def water_level(total: float, rate: Floats, caps: Floats, delay: Floats) -> float:
    """The level t with sum_i min(caps_i, rate_i max(0, t - delay_i)) = total; the caps must suffice. Piecewise linear
    in t: exact, by sorting the points where a share starts to grow or reaches its cap."""
    points = np.concatenate([delay, delay + caps / rate])
    change = np.concatenate([rate, -rate])
    order = np.argsort(points, kind="stable")
    points, slopes = points[order], np.cumsum(change[order])
    filled = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(points))])
    segment = int(np.searchsorted(filled, total, side="left"))
    if segment == 0:
        return float(points[0])
    if segment == len(points):
        return float(points[-1])
    slope = slopes[segment - 1]
    return float(points[segment - 1] + (total - filled[segment - 1]) / slope) if slope > 0 else float(points[segment])
