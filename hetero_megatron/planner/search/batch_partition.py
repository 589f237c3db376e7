"""Dividing a batch over thousands of pipelines such that the slowest is as fast as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


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
