"""Dividing the batch over pipelines so that the slowest ends as early as possible.

Three sizes of the same question. :func:`allocate` is exact for a few pipelines whose time is any table over numbers of
sequences; :func:`ways_together` lists all ways below a time, for proofs of optimality; :func:`divide` serves thousands
of pipelines whose time is affine in their micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = tuple[float, int]  # seconds, index of a column
Rows = Mapping[int, Sequence[Row]]  # by number of sequences, fastest first
Way = tuple[float, tuple[tuple[int, int], ...]]  # seconds of the slowest, (sequences, index) of each pipeline
HALVINGS = 24


def allocate(times: Sequence[Floats], batch: int) -> tuple[float, tuple[int, ...]] | None:
    """Share ``batch`` sequences so that the pipelines end as early as possible: exact min-max over tables of time by
    number of sequences (at least one each); None when no division comes out."""
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
    """Per pipeline, the bit set of totals that it and those before can reach; None when ``batch`` is not among them."""
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
    """OR of ``bits << q`` for all q in [low, high], by doubling."""
    result, width, want = bits, 1, high - low + 1
    while width * 2 <= want:
        result |= result << width
        width *= 2
    if width < want:
        result |= result << (want - width)
    return result << low


def _shares(times: Sequence[Floats], batch: int, limit: float) -> tuple[int, ...]:
    """One division within ``limit``; larger shares go to the pipelines that would be done earliest."""
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


@dataclass(frozen=True)
class AffinePipelines:
    """``copies`` equal pipelines with micro-batches of ``size`` sequences. For m micro-batches one takes
    ``before[i] + m x seconds[i]`` for every stage i, and as long as the longest of these."""

    size: int
    copies: int
    seconds: tuple[float, ...]
    before: tuple[float, ...]

    def most(self, limit: float) -> int:
        """Micro-batches within ``limit`` seconds."""
        return max(0, int(min((limit - b) / s for b, s in zip(self.before, self.seconds)) + 1e-9))

    def end(self, micro_batches: int) -> float:
        return max(b + micro_batches * s for b, s in zip(self.before, self.seconds))


def divide(kinds: Sequence[AffinePipelines], batch: int) -> list[list[tuple[int, int]]] | None:
    """Per kind of pipelines [(micro-batches, copies)], such that all end about together and the sizes sum to ``batch``;
    None when no division comes out."""
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
    if surplus < 0 or _take_off(kinds, of, counts, surplus):
        return None
    found: list[dict[int, int]] = [{} for _ in kinds]
    for count, i in zip(counts, of):
        found[i][count] = found[i].get(count, 0) + 1
    return [sorted(row.items(), reverse=True) for row in found]


def _take_off(kinds: Sequence[AffinePipelines], of: Sequence[int], counts: list[int], surplus: int) -> int:
    """Give up micro-batches of the pipelines that end last until nothing is too much; returns what is left over."""
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
    if surplus:  # one micro-batch fewer of a larger size, some more of a smaller one
        for p, size in enumerate(kinds[i].size for i in of):
            for q, other in enumerate(kinds[i].size for i in of):
                if counts[p] > 1 and size > surplus and other < size and (size - surplus) % other == 0:
                    counts[p] -= 1
                    counts[q] += (size - surplus) // other
                    return 0
    return surplus
