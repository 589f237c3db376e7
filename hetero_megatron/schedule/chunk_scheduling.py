"""List scheduling of stages with several chunks: in order of time, every stage that is free starts what a rule prefers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from hetero_megatron.schedule.chunk_times import ChunkedTimes, ChunkOrders, send


@dataclass(frozen=True)
class ChunkRule:
    """What a free stage prefers: B_INPUT before F, F while memory allows, and W where neither can start.

    Args:
        group: micro-batches that pass chunk after chunk together: of a group, forwards of the first chunks and
            backwards of the last ones come first.
        most_ahead: micro-batches between the oldest that is not done on a stage and the newest that it starts.
        most_deferred: W's of a stage that may be due before one of them goes first.
        forward_first: F before B_INPUT where both can start.
        patience: a W does not start where an F or B_INPUT is known to arrive within this part of its seconds.
    """

    group: int
    most_ahead: float = math.inf
    most_deferred: float = math.inf
    forward_first: bool = False
    patience: float = 0.0


def list_schedule_chunks(
    times: ChunkedTimes, num_micro_batches: int, rule: ChunkRule, limit: float = math.inf
) -> tuple[float, ChunkOrders]:
    """(seconds of the step, orders) of the schedule that ``rule`` makes. It keeps the stages' memory, and never
    deadlocks: a forward starts only where memory is left in which all micro-batches that the stage holds can still be
    done, the oldest first (the banker's algorithm). Given up, with inf for its seconds and orders that are not whole,
    as soon as it is certain to take more than ``limit`` seconds."""
    run = _Run(times, num_micro_batches, rule)
    while run.events and run.least_seconds <= limit:
        clock, stage = heappop(run.events)
        if clock == run.wake[stage]:
            run.start(stage, clock)
    return math.inf if run.events else run.least_seconds, tuple(tuple(row) for row in run.rows)


class _Run:
    """The state of the pipeline at one moment.

    Attributes:
        wake: when a stage decides next: the end of its action, or the next arrival that it knows of.
        left: at least so many seconds take the actions that a stage has not begun.
        least_seconds: of the step; exact once all actions have begun.
    """

    def __init__(self, times: ChunkedTimes, num_micro_batches: int, rule: ChunkRule) -> None:
        count, chunks = len(times.stages), times.chunks
        self.times, self.rule, self.chunks = times, rule, range(chunks)
        self.rows: list[list[str]] = [[] for _ in range(count)]
        self.left = [num_micro_batches * sum(c.forward_seconds + sum(c.least_seconds) for c in x) for x in times.stages]
        self.tails = [x[0].tail_seconds for x in times.stages]
        self.least_seconds = max(self.tails)
        # By stage and chunk: forwards, backwards and W's done.
        self.forwards, self.backwards, self.weights = ([[0] * chunks for _ in range(count)] for _ in range(3))
        self.deferred, self.waiting = [[0] * chunks for _ in range(count)], [0] * count  # W's by chunk; of all chunks
        self.held = [0.0] * count
        # Arrivals by direction, receiving stage and chunk, in order of micro-batches.
        self.there = [[[list[float]() for _ in self.chunks] for _ in range(count)] for _ in range(2)]
        self.there[0][0][0] = [0.0] * num_micro_batches
        self.free = [[0.0] * count for _ in range(2)]
        self.memory = [x[0].memory_bytes for x in times.stages]
        self.kept = [[c.activation_bytes for c in x] for x in times.stages]
        self.least = [sum(chunk_bytes) for chunk_bytes in self.kept]  # of a micro-batch in all chunks
        self.names = {letter: [letter + (str(c) if c else "") for c in self.chunks] for letter in "FBIW"}
        self.idle, self.wake = [True] * count, [math.inf] * count
        self.wake[0] = 0.0
        self.events = [(0.0, 0)]

    def start(self, s: int, clock: float) -> None:
        """Stage ``s`` is free at ``clock``: start an action, or wait."""
        rule, waiting = self.rule, self.waiting[s]
        if waiting > rule.most_deferred:
            self._weight_gradient(s, clock)
            return
        backward = self._next_backward(s, clock)
        if backward[0] <= clock and not rule.forward_first:
            self._start_backward(s, backward[1], clock, waiting)
            return
        forward, lacks_memory = self._next_forward(s, clock)
        if backward[0] <= clock < forward[0]:
            self._start_backward(s, backward[1], clock, waiting)
        elif forward[0] <= clock:
            self._forward(s, forward[1], clock)
        else:
            arrival = min(forward[0], backward[0])
            first = next((c for c in self.chunks if self.deferred[s][c]), 0)
            gap = rule.patience * self.times.stages[s][first].weight_gradient_seconds
            # Where a gradient would find no room, W's come first whatever arrives: waiting gains nothing.
            if waiting and (lacks_memory or arrival - clock >= gap or not self._may_split(s, backward[1])):
                self._weight_gradient(s, clock)
                return
            self.idle[s], self.wake[s] = True, arrival
            if arrival < math.inf:
                heappush(self.events, (arrival, s))

    def _next_forward(self, s: int, clock: float) -> tuple[tuple[float, int], bool]:
        """((arrival, chunk) of the forward that may start and is preferred, or arrives first; whether one that has
        arrived only waits for memory)."""
        best, chunk, group, lacks_memory = math.inf, 0, math.inf, False
        forwards, arrivals, size = self.forwards[s], self.there[0][s], self.rule.group
        last_allowed = min(self.backwards[s]) + self.rule.most_ahead
        for c in self.chunks:
            m = forwards[c]
            if m == len(arrivals[c]) or m > last_allowed:
                continue
            arrival = arrivals[c][m]
            if arrival <= clock and best <= clock:  # both can start: of the first group, then of the first chunk
                if m // size >= group:
                    continue
            elif arrival >= best:
                continue
            if self._fits(s, c):
                best, chunk, group = arrival, c, m // size
            elif arrival <= clock:
                lacks_memory = True
        return (best, chunk), lacks_memory

    def _fits(self, s: int, c: int) -> bool:
        """There is room for a forward in chunk ``c``, and then still for all that is under way, the oldest first."""
        chunk_bytes, forwards, backwards, memory = self.kept[s], self.forwards[s], self.backwards[s], self.memory[s]
        if self.held[s] + chunk_bytes[c] > memory:
            return False
        if (forwards[0] + (c == 0) - min(backwards)) * self.least[s] <= memory:  # all of them in all chunks
            return True
        forwards_then = [n + (i == c) for i, n in enumerate(forwards)]
        room = memory - sum((forwards_then[i] - backwards[i]) * x for i, x in enumerate(chunk_bytes))
        for m in range(min(backwards), forwards_then[0]):
            room -= sum(x for i, x in enumerate(chunk_bytes) if m >= forwards_then[i])
            if room < 0:
                return False
            room += sum(x for i, x in enumerate(chunk_bytes) if m >= backwards[i])
        return True

    def _next_backward(self, s: int, clock: float) -> tuple[float, int]:
        """(arrival, chunk) of the backward that is preferred of those that can start, or arrives first."""
        best, chunk, group = math.inf, 0, math.inf
        backwards, forwards, arrivals, size = self.backwards[s], self.forwards[s], self.there[1][s], self.rule.group
        for c in self.chunks:
            m = backwards[c]
            if m < len(arrivals[c]) and m < forwards[c]:
                arrival = arrivals[c][m]
                if m // size <= group if arrival <= clock and best <= clock else arrival < best:
                    best, chunk, group = arrival, c, m // size
        return best, chunk

    def _start_backward(self, s: int, c: int, clock: float, waiting: int) -> None:
        if self._may_split(s, c):
            self._backward(s, c, clock, "I")
        elif waiting:
            self._weight_gradient(s, clock)
        else:
            self._backward(s, c, clock, "B")

    def _may_split(self, s: int, c: int) -> bool:
        return self.held[s] - self.kept[s][c] + self.times.stages[s][c].deferred_bytes <= self.memory[s]

    def _forward(self, s: int, c: int, clock: float) -> None:
        chunk = self.times.stages[s][c]
        self.forwards[s][c] += 1
        self.held[s] += chunk.activation_bytes
        self._ends(s, c, "F", clock, chunk.forward_seconds)

    def _backward(self, s: int, c: int, clock: float, letter: str) -> None:
        chunk = self.times.stages[s][c]
        self.backwards[s][c] += 1
        self.held[s] -= chunk.activation_bytes
        if letter == "I":
            self.deferred[s][c] += 1
            self.waiting[s] += 1
            self.held[s] += chunk.deferred_bytes
        self._ends(s, c, letter, clock, chunk.input_gradient_seconds if letter == "I" else chunk.backward_seconds)

    def _weight_gradient(self, s: int, clock: float) -> None:
        """The oldest that is due, of the last chunk where several are."""
        c = min((c for c in self.chunks if self.deferred[s][c]), key=lambda c: (self.weights[s][c], -c))
        chunk = self.times.stages[s][c]
        self.deferred[s][c] -= 1
        self.waiting[s] -= 1
        self.weights[s][c] += 1
        self.held[s] -= chunk.deferred_bytes
        self._ends(s, c, "W", clock, chunk.weight_gradient_seconds)

    def _ends(self, s: int, c: int, letter: str, clock: float, seconds: float) -> None:
        end = clock + seconds
        self.rows[s].append(self.names[letter][c])
        self.idle[s], self.wake[s] = False, end
        self.left[s] -= seconds
        self.least_seconds = max(self.least_seconds, end + max(self.left[s], 0.0) + self.tails[s])
        heappush(self.events, (end, s))
        if letter == "W":
            return
        to = send(self.times, self.free, self.there, s, c, letter != "F", end)
        if to is not None and to != s and self.idle[to]:
            # Whether it may start, and what then comes first, is decided when it is there.
            arrival = max(self._last_arrival(to, s, c, letter != "F"), end)
            if arrival < self.wake[to]:
                self.wake[to] = arrival
                heappush(self.events, (arrival, to))

    def _last_arrival(self, to: int, s: int, c: int, back: bool) -> float:
        last = len(self.times.stages) - 1
        chunk = c - (s == 0) if back else c + (s == last)
        return self.there[back][to][chunk][-1]
