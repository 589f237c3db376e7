"""All ways to let pipelines of given make-ups compute a batch together, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = tuple[float, int]  # seconds, index of a column
Rows = Mapping[int, Sequence[Row]]  # by number of sequences, fastest first
Way = tuple[float, tuple[tuple[int, int], ...]]  # seconds of the slowest, (sequences, index) of each pipeline
HALVINGS = 24


def ways_together(rows: Sequence[Rows], batch: int, low: float, high: float, most: int) -> tuple[list[Way], float]:
    """(ways sorted by the time of their slowest pipeline, limit): all ways faster than ``limit``, which is ``high`` or,
    where that were more than ``most`` ways, as close to it as a bisection between ``low`` and ``high`` comes."""
    limit, least = high, low
    if count_ways(rows, batch, limit) > most:
        for _ in range(HALVINGS):
            middle = (least + limit) / 2 if limit < float("inf") else _largest(rows)
            if middle >= limit:
                break
            if count_ways(rows, batch, middle) > most:
                limit = middle
            else:
                least = middle
        limit = least
    return sorted(_ways(rows, batch, limit)), limit


def _largest(rows: Sequence[Rows]) -> float:
    """Above all times."""
    return 2 * max(row[-1][0] for by_q in rows for row in by_q.values())


def least_dropped(times: Sequence[Floats], cuts: Sequence[Floats], batch: int) -> float:
    """No way with a pipeline as in ``cuts`` (least seconds by number of sequences, of what is not listed) and the
    others at their best as in ``times`` is faster."""
    worst = np.inf
    for i, cut in enumerate(cuts):
        others = np.full(batch + 1, np.inf)
        others[0] = 0.0
        for j, row in enumerate(times):
            if j != i:
                found = [np.min(np.maximum(others[: q + 1], row[: q + 1][::-1])) for q in range(batch + 1)]
                others = np.array(found)
        worst = min(worst, float(np.min(np.maximum(cut[: batch + 1], others[::-1]))))
    return worst


def count_ways(rows: Sequence[Rows], batch: int, limit: float) -> float:
    """How many ways there are in which every pipeline takes less than ``limit``."""
    total = np.zeros(batch + 1)
    total[0] = 1.0
    for by_q in rows:
        own = np.zeros(batch + 1)
        for q, found in by_q.items():
            if q <= batch:
                own[q] = sum(seconds < limit for seconds, _ in found)
        total = np.convolve(total, own)[: batch + 1]
    return float(total[batch])


def _ways(rows: Sequence[Rows], batch: int, limit: float) -> Iterator[Way]:
    allowed = [
        {q: few for q, found in by_q.items() if (few := [row for row in found if row[0] < limit])} for by_q in rows
    ]
    last = len(rows) - 1
    reach: list[set[int]] = [{0}]  # totals of the pipelines from i on
    for by_q in allowed[::-1]:
        reach.insert(0, {q + rest for q in by_q for rest in reach[0] if q + rest <= batch})

    def extend(i: int, left: int, slowest: float, taken: tuple[tuple[int, int], ...]) -> Iterator[Way]:
        for q, found in allowed[i].items():
            if left - q not in reach[i + 1]:
                continue
            for seconds, index in found:
                now = (*taken, (q, index))
                if i == last:
                    yield max(slowest, seconds), now
                else:
                    yield from extend(i + 1, left - q, max(slowest, seconds), now)

    if batch in reach[0]:
        yield from extend(0, batch, 0.0, ())
