"""Dividing the batch over pipelines so that the slowest one finishes as early as possible (min-max).

:func:`allocate` is exact for a few pipelines with arbitrary time tables. :func:`divisions_below` lists all divisions
faster than a limit, for proofs of optimality. :func:`divide` handles thousands of pipelines whose time is affine in
their micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = tuple[float, int]  # (seconds, index of a column)
Rows = Mapping[int, Sequence[Row]]  # by number of sequences, fastest first
Division = tuple[float, tuple[tuple[int, int], ...]]  # (seconds of the slowest, (sequences, column) per pipeline)
HALVINGS = 24


def allocate(times: Sequence[Floats], batch: int) -> tuple[float, tuple[int, ...]] | None:
    """Exact min-max division of ``batch`` sequences.

    Args:
        times: per pipeline, [batch + 1] seconds for each number of sequences (inf: impossible); each gets at least one.

    Returns:
        (seconds of the slowest, sequences per pipeline); None when no division sums to ``batch``.
    """
    values = np.unique(np.concatenate([t[1:][np.isfinite(t[1:])] for t in times]))
    if not len(values) or any(not np.isfinite(t[1:]).any() for t in times):
        return None
    low, high = 0, len(values) - 1
    if not _reach(times, batch, float(values[high])):
        return None
    while low < high:
        middle = (low + high) // 2
        if sum(_most(t, float(values[middle])) for t in times) >= batch and _reach(times, batch, float(values[middle])):
            high = middle
        else:
            low = middle + 1
    limit = float(values[low])
    return limit, _shares(times, batch, limit)


def _most(times: Floats, limit: float) -> int:
    found = np.flatnonzero(times <= limit)
    return int(found[-1]) if len(found) else -(1 << 40)


def _allowed(times: Floats, limit: float) -> list[int]:
    return [int(q) for q in np.flatnonzero(times <= limit) if q]


def _reach(times: Sequence[Floats], batch: int, limit: float) -> list[int] | None:
    """Per prefix of the pipelines, the totals within ``limit`` seconds as a bit set; None when ``batch`` is not
    reachable."""
    sets, mask = [1], (1 << (batch + 1)) - 1
    for t in times:
        total = 0
        allowed = _allowed(t, limit)
        if len(allowed) > 8 and allowed[-1] - allowed[0] == len(allowed) - 1:
            total = _spread(sets[-1], allowed[0], allowed[-1])
        else:
            for q in allowed:
                total |= sets[-1] << q
        sets.append(total & mask)
    return sets if sets[-1] >> batch & 1 else None


def _spread(bits: int, low: int, high: int) -> int:
    result, width, want = bits, 1, high - low + 1
    while width * 2 <= want:
        result |= result << width
        width *= 2
    if width < want:
        result |= result << (want - width)
    return result << low


def _shares(times: Sequence[Floats], batch: int, limit: float) -> tuple[int, ...]:
    """One division within ``limit``; equal pipelines get nearly equal shares."""
    sets = _reach(times, batch, limit)
    assert sets is not None, "the limit was reachable"
    shares, left = [], batch
    for i in range(len(times) - 1, -1, -1):
        fits = [q for q in _allowed(times[i], limit) if q <= left and sets[i] >> (left - q) & 1]
        q = min(fits, key=lambda q: (abs(left / (i + 1) - q), q)) if i and _equal(times, i) else fits[-1]
        shares.append(q)
        left -= q
    return tuple(shares[::-1])


def _equal(times: Sequence[Floats], i: int) -> bool:
    return all(t is times[i] for t in times[: i + 1])


def divisions_below(
    rows: Sequence[Rows], batch: int, low: float, high: float, most: int
) -> tuple[list[Division], float]:
    """(divisions sorted by the time of their slowest pipeline, limit): all divisions faster than ``limit``, which is
    ``high`` or, if there are more than ``most``, lowered by bisection towards ``low``."""
    limit, least = high, low
    if count_divisions(rows, batch, limit) > most:
        for _ in range(HALVINGS):
            middle = (least + limit) / 2 if limit < float("inf") else _largest(rows)
            if middle >= limit:
                break
            if count_divisions(rows, batch, middle) > most:
                limit = middle
            else:
                least = middle
        limit = least
    return sorted(_divisions(rows, batch, limit)), limit


def _largest(rows: Sequence[Rows]) -> float:
    return 2 * max(row[-1][0] for by_q in rows for row in by_q.values())


def bound_with_dropped(times: Sequence[Floats], cuts: Sequence[Floats], batch: int) -> float:
    """Lower bound (s) on divisions that use a column which was dropped from a pool.

    Args:
        times: per pipeline, [batch + 1] least seconds by number of sequences.
        cuts: the same for dropped columns.
    """
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


def count_divisions(rows: Sequence[Rows], batch: int, limit: float) -> float:
    """Number of divisions in which every pipeline takes less than ``limit`` seconds."""
    total = np.zeros(batch + 1)
    total[0] = 1.0
    for by_q in rows:
        own = np.zeros(batch + 1)
        for q, found in by_q.items():
            if q <= batch:
                own[q] = sum(seconds < limit for seconds, _ in found)
        total = np.convolve(total, own)[: batch + 1]
    return float(total[batch])


def _divisions(rows: Sequence[Rows], batch: int, limit: float) -> Iterator[Division]:
    allowed = [
        {q: few for q, found in by_q.items() if (few := [row for row in found if row[0] < limit])} for by_q in rows
    ]
    last = len(rows) - 1
    reach: list[set[int]] = [{0}]  # possible totals of pipelines i and later
    for by_q in allowed[::-1]:
        reach.insert(0, {q + rest for q in by_q for rest in reach[0] if q + rest <= batch})

    def extend(i: int, left: int, slowest: float, taken: tuple[tuple[int, int], ...]) -> Iterator[Division]:
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


@dataclass(frozen=True)
class AffinePipelines:
    """``copies`` equal pipelines with micro-batches of ``size`` sequences. m micro-batches take ``max_i(before[i] + m x
    seconds[i])`` over the stages i."""

    size: int
    copies: int
    seconds: tuple[float, ...]
    before: tuple[float, ...]

    def most(self, limit: float) -> int:
        """Largest number of micro-batches within ``limit`` seconds."""
        return max(0, int(min((limit - b) / s for b, s in zip(self.before, self.seconds)) + 1e-9))

    def end(self, micro_batches: int) -> float:
        return max(b + micro_batches * s for b, s in zip(self.before, self.seconds))


def divide(kinds: Sequence[AffinePipelines], batch: int) -> list[list[tuple[int, int]]] | None:
    """Divide ``batch`` sequences so that all pipelines finish at about the same time.

    Returns:
        Per kind, [(micro-batches, copies)]; None when no division sums to ``batch``.
    """
    low, high = 0.0, max(kind.end(batch) for kind in kinds) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(kind.most(middle) * kind.size * kind.copies for kind in kinds) >= batch:
            high = middle
        else:
            low = middle
    of = [i for i, kind in enumerate(kinds) for _ in range(kind.copies)]  # each pipeline's kind
    counts = [max(1, kinds[i].most(high)) for i in of]
    surplus = sum(n * kinds[i].size for n, i in zip(counts, of)) - batch
    if surplus < 0 or _drop_surplus(kinds, of, counts, surplus):
        return None
    found: list[dict[int, int]] = [{} for _ in kinds]
    for count, i in zip(counts, of):
        found[i][count] = found[i].get(count, 0) + 1
    return [sorted(row.items(), reverse=True) for row in found]


def _drop_surplus(kinds: Sequence[AffinePipelines], of: Sequence[int], counts: list[int], surplus: int) -> int:
    """Remove micro-batches from the pipelines that finish last until ``surplus`` sequences are gone; returns what is
    left of it."""
    heap = [(-kinds[i].end(counts[p]), p) for p, i in enumerate(of) if counts[p] > 1]
    heapq.heapify(heap)
    while surplus and heap:
        _, p = heapq.heappop(heap)
        kind = kinds[of[p]]
        if kind.size > surplus:
            continue
        counts[p] -= 1
        surplus -= kind.size
        if counts[p] > 1:
            heapq.heappush(heap, (-kind.end(counts[p]), p))
    if surplus:  # exchange one micro-batch of a larger size for some of a smaller size
        for p, size in enumerate(kinds[i].size for i in of):
            for q, other in enumerate(kinds[i].size for i in of):
                if counts[p] > 1 and size > surplus and other < size and (size - surplus) % other == 0:
                    counts[p] -= 1
                    counts[q] += (size - surplus) // other
                    return 0
    return surplus
