"""Replicated experts: a local search over intervals of experts that may overlap, from a division without replicas.

A plan says which experts each rank holds, and with that which replica takes whose tokens
(:func:`~hetero_megatron.plans.experts.destinations`), so a division's price follows from the intervals alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
NONE = (0, 0)
MOST_PRICED = 500  # divisions of a stage
RANKED = 6  # that are simulated
STEPS = (-2, -1, 1, 2)  # by which an end of an interval moves at once


@dataclass(frozen=True)
class Price:
    """``seconds``: what is minimised, of a micro-batch with its part of what the step ends with; ``end``: that part;
    ``ranks``: what each rank's experts take."""

    seconds: float
    end: float
    ranks: tuple[float, ...]

    @property
    def key(self) -> tuple[float, float]:
        """Of equally long ones, the one whose ranks are more alike is nearer to a shorter one."""
        return self.seconds, sum(s * s for s in self.ranks)


def best_divisions(
    popular: Sequence[float], caps: Sequence[int], price: Callable[[Intervals], Price], start: Intervals
) -> list[Intervals]:
    """Some divisions that may be the best: those with the lowest prices that the search met.

    Args:
        popular: share of routed tokens of each expert.
        caps: by rank, the most experts.
        price: of intervals that together hold all experts.
        start: without replicas, as good as these can be.
    """
    search = ReplicaSearch(popular, caps, price, MOST_PRICED)
    search.best(start)
    return search.ranked(RANKED)


class ReplicaSearch:
    """Descent to a division that no single move shortens, from several starts; arguments as for
    :func:`best_divisions`, and ``most``: divisions to be priced."""

    def __init__(
        self, popular: Sequence[float], caps: Sequence[int], price: Callable[[Intervals], Price], most: int
    ) -> None:
        self.popular, self.caps, self.price, self.most = popular, caps, price, most
        self.prices: dict[Intervals, Price] = {}

    def best(self, start: Intervals) -> Intervals:
        """The best division found; ``start`` itself where nothing shortens it.

        Descents begin at ``start``, at the same with its ranks in another order, at as many experts as memory allows on
        one rank or all, and then at what was found, with an expert of its slowest rank on one more.
        """
        best = start
        for first in dict.fromkeys((start, *self._filled(start), *self._reordered(start))):
            best = min(best, self._descend(first), key=self._key)
        tried_divisions = set[Intervals]()
        while best not in tried_divisions and not self._spent:
            tried_divisions.add(best)
            for replicated in self._replicated(best):
                descended = self._descend(replicated)
                if self._key(descended) < self._key(best):
                    best = descended
                    break
        return best

    def ranked(self, count: int) -> list[Intervals]:
        """The best divisions that were priced: ``count`` by all, and half as many by their micro-batches alone."""
        steady = sorted(self.prices, key=lambda state: self.prices[state].seconds - self.prices[state].end)
        return list(dict.fromkeys((*sorted(self.prices, key=self._key)[:count], *steady[: count // 2])))

    @property
    def _spent(self) -> bool:
        return len(self.prices) >= self.most

    def _key(self, state: Intervals) -> tuple[float, float]:
        if state not in self.prices:
            self.prices[state] = self.price(state)
        return self.prices[state].key

    def _descend(self, state: Intervals) -> Intervals:
        key = self._key(state)
        while not self._spent:
            neighbour = min(self._near(state), key=self._key, default=state)
            if self._key(neighbour) >= key:
                break
            state, key = neighbour, self._key(neighbour)
        return state

    def _slowest(self, state: Intervals) -> int:
        self._key(state)
        ranks = self.prices[state].ranks
        return max(range(len(ranks)), key=ranks.__getitem__)

    def _filled(self, state: Intervals) -> Iterator[Intervals]:
        """With as many experts as memory allows on all ranks, or on one of them."""
        full = {
            rank: self._grown(experts, cap) for rank, (experts, cap) in enumerate(zip(state, self.caps, strict=True))
        }
        yield from self._valid(_with(state, full))
        for rank, experts in full.items():
            yield from self._valid(_with(state, {rank: experts}))

    def _reordered(self, state: Intervals) -> Iterator[Intervals]:
        """With as many experts on each rank, but its ranks the other way round, or another one of them first."""
        order = [r for r in sorted(range(len(state)), key=state.__getitem__) if state[r] != NONE]
        for reordered in (order[::-1], *([r, *(x for x in order if x != r)] for r in order)):
            sizes = [state[r][1] - state[r][0] for r in reordered]
            ends = list(itertools.accumulate(sizes))
            yield from self._valid(
                _with(state, {r: (b - n, b) for r, n, b in zip(reordered, sizes, ends, strict=True)})
            )

    def _grown(self, held: Interval, cap: int) -> Interval:
        a = max(0, min(held[0], len(self.popular) - cap))
        return a, max(held[1], min(a + cap, len(self.popular)))

    def _replicated(self, state: Intervals) -> Iterator[Intervals]:
        """An expert of the slowest rank on one more rank, the most popular one first."""
        slowest = self._slowest(state)
        for expert in sorted(range(*state[slowest]), key=lambda e: -self.popular[e]):
            for rank, experts in enumerate(state):
                if not experts[0] <= expert < experts[1]:
                    yield from self._valid(_with(state, {rank: _hull(experts, expert)}))

    def _near(self, state: Intervals) -> Iterator[Intervals]:
        """Divisions one move away: a rank's interval ends elsewhere, or it takes something from the slowest rank."""
        slowest, count = self._slowest(state), len(self.popular)
        a, b = state[slowest]
        hot = max(range(a, b), key=self.popular.__getitem__, default=0)
        for rank, (c, d) in enumerate(state):
            changes = [{rank: NONE}, {rank: (hot, hot + 1)}]
            if d > c:
                changes += [{rank: (c + step, d + step)} for step in STEPS]
                changes += [{rank: (end, d)} for end in {0, *(c + step for step in STEPS)} if end != c]
                changes += [{rank: (c, end)} for end in {count, *(d + step for step in STEPS)} if end != d]
            if rank != slowest and b > a:
                for expert, remainder in ((a, (a + 1, b)), (b - 1, (a, b - 1))):
                    changes += [{rank: _hull((c, d), expert)}, {rank: _hull((c, d), expert), slowest: remainder}]
                changes += [{rank: (a, b)}, {rank: (a, b), slowest: (c, d)}, *_shifts(state, slowest, rank)]
            for change in changes:
                yield from self._valid(_with(state, change))

    def _valid(self, state: Intervals) -> Iterator[Intervals]:
        """The division, if it holds all experts and no rank too many."""
        count = len(self.popular)
        if any(a < 0 or b > count or b - a > cap for (a, b), cap in zip(state, self.caps, strict=True)):
            return
        end = 0
        for a, b in sorted(experts for experts in state if experts != NONE):
            if a > end:
                return
            end = max(end, b)
        if end == count:
            yield state


def _shifts(state: Intervals, giver: int, taker: int) -> Iterator[dict[int, Interval]]:
    """One expert less for a rank and one more for another; those between them move on by one."""
    order = [r for r in sorted(range(len(state)), key=state.__getitem__) if state[r] != NONE]
    if taker not in order:
        return
    i, j = order.index(giver), order.index(taker)
    step = -1 if i < j else 1
    change = {r: (state[r][0] + step, state[r][1] + step) for r in order[min(i, j) + 1 : max(i, j)]}
    (a, b), (c, d) = state[giver], state[taker]
    yield change | ({giver: (a, b - 1), taker: (c - 1, d)} if i < j else {giver: (a + 1, b), taker: (c, d + 1)})


def _with(state: Intervals, change: dict[int, Interval]) -> Intervals:
    changed = [change.get(rank, experts) for rank, experts in enumerate(state)]
    return tuple((a, b) if a < b else NONE for a, b in changed)


def _hull(held: Interval, expert: int) -> Interval:
    return (expert, expert + 1) if held == NONE else (min(held[0], expert), max(held[1], expert + 1))
