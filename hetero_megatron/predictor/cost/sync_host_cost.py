"""Host time of a rank in gradient sync: packing, summing and unpacking its buckets in order, few of them in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plan.buckets import IN_FLIGHT

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Elements = TypeVar("Elements", float, NDArray[np.int64])


@dataclass
class RankHost:
    """One rank, whose buckets travel in one hop.

    Attributes:
        delay: seconds of packing and summing so far; last: time (s) of the last send.
        under_way: (arrival, seconds to sum or unpack) of buckets that were sent and not yet completed.
    """

    delay: float = 0.0
    last: float = 0.0
    under_way: deque[tuple[float, float]] = field(default_factory=deque)

    def send(self, ready: float, pack: float) -> float:
        """Time (s) when the next bucket is packed; ``ready``: when its content is complete, without the delay."""
        at = max(ready + self.delay, self.last)
        if len(self.under_way) == IN_FLIGHT:
            arrived, after = self.under_way.popleft()
            at = max(at, arrived) + after
            self.delay += after
        self.delay += pack
        self.last = at + pack
        return self.last

    def finish(self, at: float) -> float:
        """Time (s) when all buckets are reduced. ``at``: when the rank is done with all else (s)."""
        end = max(at + self.delay, self.last)
        for arrived, after in self.under_way:
            end = max(end, arrived) + after
        return end


class RankHosts:
    """:class:`RankHost` of all ranks at once, as arrays, for buckets with any number of hops. ``slots``: most buckets
    that a rank may have under way; :data:`IN_FLIGHT` with single hops."""

    def __init__(self, ranks: int, slots: int = IN_FLIGHT) -> None:
        self.slots = slots
        self.delay, self.last = np.zeros(ranks), np.zeros(ranks)
        self.first, self.sent = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        self.newest = np.full(ranks, -1)
        self.arrived, self.after = np.zeros((ranks, slots)), np.zeros((ranks, slots))

    def start(self, at: Ints, bucket: int, ready: Floats, pack: Floats | float, limited: bool = True) -> Floats:
        """Time (s) when a hop of a bucket is packed. The bucket's previous hop ends first; with ``limited`` also the
        oldest buckets, so that fewer than IN_FLIGHT are under way."""
        begin = np.maximum(ready + self.delay[at], self.last[at])
        while True:
            count = self.sent[at] - self.first[at]
            must = (count > 0) & (self.newest[at] == bucket)
            if limited:
                must |= count >= IN_FLIGHT
            if not must.any():
                break
            after = self._end_oldest(at[must], begin, must)
            self.delay[at[must]] += after
        self.delay[at] += pack
        self.last[at] = begin = begin + pack
        return begin

    def travel(self, at: Ints, bucket: int, end: float, after: Floats | float) -> None:
        slot = self.sent[at] % self.slots
        self.arrived[at, slot], self.after[at, slot] = end, after
        self.sent[at] += 1
        self.newest[at] = bucket

    def finish(self, idle: Floats) -> Floats:
        end = np.maximum(idle + self.delay, self.last)
        while (left := self.sent > self.first).any():
            self._end_oldest(np.flatnonzero(left), end, left)
        return end

    def _end_oldest(self, rows: Ints, now: Floats, where: NDArray[np.bool_]) -> Floats:
        """Advance ``now[where]`` to when the oldest bucket of each of ``rows`` is summed; returns the seconds of
        summing."""
        slot = self.first[rows] % self.slots
        after = self.after[rows, slot]
        now[where] = np.maximum(now[where], self.arrived[rows, slot]) + after
        self.first[rows] += 1
        return np.asarray(after)


def back_copies(given: Elements, taken: Elements, dense: bool, ranks: int) -> tuple[Elements, Elements]:
    """Elements (packed by owners, unpacked by holders) when parameters are spread. In a dense bucket they arrive in
    place, and only several receivers need packed copies."""
    if not dense:
        return taken, given
    return (taken if ranks > 2 else 0 * taken), 0 * given
