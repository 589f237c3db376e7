"""Min-max division of integers (tokens, heads) by cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def min_max_shares(
    total: int, cost: Sequence[float] | Floats, caps: Sequence[int] | Integers | None = None
) -> Integers:
    """Integers n_i >= 0 with sum ``total`` and n_i <= caps_i that minimise max n_i cost_i (exact).

    Args:
        cost: seconds per unit, > 0.
        caps: None: no limits.

    Raises:
        ValueError: the caps sum to less than ``total``.
    """
    price = np.asarray(cost, dtype=np.float64)
    limit = (
        np.full(len(price), total, dtype=np.int64) if caps is None else np.minimum(np.asarray(caps, np.int64), total)
    )
    if int(limit.sum()) < total:
        raise ValueError("caps sum to less than the total")
    level = water_level(total, 1.0 / price, limit.astype(np.float64))
    shares = np.minimum(np.floor(level / price * (1 - 1e-12)).astype(np.int64), limit)
    rest = total - int(shares.sum())
    heap = [((shares[i] + 1) * price[i], i) for i in range(len(price)) if shares[i] < limit[i]] if rest else []
    heapq.heapify(heap)
    for _ in range(rest):
        _, i = heapq.heappop(heap)
        shares[i] += 1
        if shares[i] < limit[i]:
            heapq.heappush(heap, ((shares[i] + 1) * price[i], i))
    return shares


def water_level(total: float, rate: Floats, caps: Floats, delay: Floats | None = None) -> float:
    """The level t with sum_i min(caps_i, rate_i max(0, t - delay_i)) = total; the caps must suffice. Piecewise linear
    in t: exact, by sorting the points where a share starts to grow or reaches its cap."""
    start = np.zeros(len(rate)) if delay is None else delay
    end = start + caps / rate
    points = np.concatenate([start, end])
    change = np.concatenate([rate, -rate])
    order = np.argsort(points, kind="stable")
    points, slopes = points[order], np.cumsum(change[order])
    filled = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(points))])
    at = int(np.searchsorted(filled, total, side="left"))
    if at == 0:
        return float(points[0])
    if at == len(points):
        return float(points[-1])
    slope = slopes[at - 1]
    return float(points[at - 1] + (total - filled[at - 1]) / slope) if slope > 0 else float(points[at])
