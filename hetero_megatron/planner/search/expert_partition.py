"""Which rank gets how many experts: the division of consecutive experts over ranks whose slowest one is fastest.

Ranks of one kind are alike, so the order in which they take their experts matters only by kind. For a time T let
reach(n) be the most experts, from the first on, that ``n`` ranks of each kind can take if none needs more than T: the
best over which kind takes the last ones. Starting later never ends earlier, so this is exact; T is found by bisection.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

ROUNDS = 60  # of the bisection: to the last digit
Interval = tuple[int, int]


def divide_experts(
    costs: Sequence[Sequence[float]], kinds: Sequence[int], caps: Sequence[int]
) -> tuple[list[Interval], float] | None:
    """(experts of each rank, seconds of the slowest), or None if the ranks cannot hold all.

    Args:
        costs: by kind of rank, seconds of each expert there.
        kinds: of each rank; caps: by kind, the most experts of a rank.
    """
    sums = [list(itertools.accumulate(row, initial=0.0)) for row in costs]
    counts = [kinds.count(kind) for kind in range(len(costs))]
    experts = len(costs[0])
    if sum(n * cap for n, cap in zip(counts, caps, strict=True)) < experts:
        return None
    low, high = 0.0, max(row[-1] for row in sums)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if _reach(sums, counts, caps, middle)[0] >= experts:
            high = middle
        else:
            low = middle
    assigned = _walk(sums, counts, caps, high)
    waiting = {kind: [r for r, k in enumerate(kinds) if k == kind] for kind in range(len(costs))}
    intervals: list[Interval] = [(0, 0)] * len(kinds)
    slowest = 0.0
    for kind, (a, b) in assigned:
        rank = waiting[kind].pop(0)
        intervals[rank] = (a, b) if b > a else (0, 0)
        slowest = max(slowest, sums[kind][b] - sums[kind][a])
    return intervals, slowest


def least_seconds(costs: Sequence[Sequence[float]], kinds: Sequence[int]) -> float:
    """A lower bound for any division, replicas included: of ranks that are as fast as on their best expert, and take
    any part of an expert."""
    kind0 = costs[0]
    ratios = [min((c / c0 for c, c0 in zip(row, kind0, strict=True) if c0 > 0.0), default=0.0) for row in costs]
    speed = sum(1.0 / ratios[kind] if ratios[kind] > 0.0 else 0.0 for kind in kinds)
    return sum(kind0) / speed if speed else 0.0


_Counts = tuple[int, ...]


def _reach(
    sums: Sequence[Sequence[float]], counts: Sequence[int], caps: Sequence[int], most: float
) -> tuple[int, dict[_Counts, tuple[int, int]]]:
    """(experts that all ranks can take in ``most`` seconds; by ranks of each kind, (how many they can take, the kind of
    the last))."""
    reached: dict[_Counts, tuple[int, int]] = {(0,) * len(counts): (0, -1)}
    for state in itertools.product(*(range(n + 1) for n in counts)):
        for kind, n in enumerate(state):
            if n:
                start = reached[(*state[:kind], n - 1, *state[kind + 1 :])][0]
                end = bisect_right(sums[kind], sums[kind][start] + most) - 1
                end = max(start, min(end, start + caps[kind], len(sums[kind]) - 1))
                if state not in reached or end > reached[state][0]:
                    reached[state] = (end, kind)
    return reached[tuple(counts)][0], reached


def _walk(
    sums: Sequence[Sequence[float]], counts: Sequence[int], caps: Sequence[int], most: float
) -> list[tuple[int, Interval]]:
    """(kind, its experts) of each rank, by experts."""
    _, reached = _reach(sums, counts, caps, most)
    state, assigned = tuple(counts), list[tuple[int, Interval]]()
    while any(state):
        end, kind = reached[state]
        state = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
        assigned.append((kind, (reached[state][0], end)))
    return assigned[::-1]
