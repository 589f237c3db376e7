"""Complete enumeration, for small clusters: what beats the best plan so far, and the proof that nothing else does.

Enumerates every sequence of stages (group, TP, inner DP) on every number of chips, with every split of the layers and
recompute; every multiset of such pipelines that the cluster has chips for; and every division of the batch.
Combinations are evaluated in the order of their lower bounds until no bound is below the best value. Lower bounds
assume the most ranks that could share a stage's optimizer states; evaluated templates take the recompute that fits with
states where the runtime will place them. That is costly, so it is done last for templates whose estimate with the
fastest recompute is not below the best.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hetero_megatron.planner.estimate.layer_partition import LISTED, Floats, count_splits
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, simulate_best
from hetero_megatron.planner.search.memory_fit import MemoryFit
from hetero_megatron.planner.search.stage_sequences import (
    MOST_SEQUENCES,
    ColumnPool,
    Row,
    StageSequences,
    Usage,
    micro_batch_counts,
    sequences,
)
from hetero_megatron.planner.template.placement import PlacedTemplate, place
from hetero_megatron.planner.template.plan_template import PipelineReplicas, PlanTemplate
from hetero_megatron.planner.template.search_space import batch_sizes

Combination = tuple[float, tuple[Usage, ...], list[ColumnPool]]  # (least seconds, chips of each pipeline, its columns)
MOST_CHIPS = 24  # above, enumeration is not considered
MOST_COMBINATIONS = 20_000
MOST_WORK = 8_000_000  # sequences x splits of layers x numbers of micro-batches
MOST_WAYS = 4000  # batch divisions tried per combination
MOST_LISTED = 200_000  # batch divisions tried in all
MOST_FITTED = 300  # placements whose memory is computed exactly
MOST_LATE = 4 * MOST_FITTED  # templates that are put off until all others are evaluated


class Enumeration:
    """Proposes every plan of the space that a lower bound does not rule out. ``bound``: seconds that no plan of the
    space beats; valid when :meth:`propose` returned True."""

    def __init__(self) -> None:
        self.bound = 0.0

    @staticmethod
    def possible(problem: PlanningProblem, scorer: TemplateScorer) -> bool:
        """Whether the space is small enough to enumerate."""
        pool, model, space, batch = scorer.pool, problem.model, problem.space, problem.global_batch_size
        if pool.chips > MOST_CHIPS:
            return False
        total = work = 0
        for size in batch_sizes(space, batch):
            found = sequences(pool, model, space, size, MOST_SEQUENCES)
            if found is None:
                return False
            total += sum(map(len, found.values()))
            shares = len(micro_batch_counts(max(1, batch // size)))
            for rows in found.values():
                work += shares * sum(min(LISTED, count_splits(model.num_layers, len(row))) for row in rows)
        if work > MOST_WORK or total > MOST_SEQUENCES * (3 if model.num_layers <= 16 else 1):
            return False
        usages = [u for u in itertools.product(*(range(n + 1) for n in pool.counts)) if any(u)]
        combinations = multisets(usages, pool.counts, most_pipelines(problem, scorer))
        return all(i < MOST_COMBINATIONS for i, _ in enumerate(combinations))

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        run = _Enumerator(problem, incumbent)
        # The scorer's memory is a mean: what it lets pass, and the simulator does not, would hide what fits.
        scorer, budget = incumbent.scorer, incumbent.budget
        best = next((row for row in incumbent.ranked() if simulate_best([row], problem, scorer, budget)), None)
        incumbent.rows[:] = [] if best is None else [best]
        run.best = incumbent.seconds
        complete = run.run()
        self.bound = run.bound
        return complete


def multisets(usages: Sequence[Usage], counts: Usage, most: int) -> Iterator[tuple[Usage, ...]]:
    """All non-empty multisets of at most ``most`` usages (chips per group) whose sum is within ``counts``."""

    def extend(prefix: tuple[Usage, ...], start: int, left: Usage) -> Iterator[tuple[Usage, ...]]:
        if prefix:
            yield prefix
        if len(prefix) == most:
            return
        for i in range(start, len(usages)):
            rest = tuple(a - b for a, b in zip(left, usages[i]))
            if min(rest) >= 0:
                yield from extend((*prefix, usages[i]), i, rest)

    yield from extend((), 0, counts)


def most_pipelines(problem: PlanningProblem, scorer: TemplateScorer) -> int:
    chips = scorer.pool.chips
    return min(problem.global_batch_size, chips, problem.space.max_pipelines or chips)


def min_max(a: Floats, b: Floats) -> Floats:
    """[n] least max(a[i], b[j]) over i + j = k for every k below n: two (sets of) pipelines that share k sequences."""
    n = len(a)
    padded = np.concatenate([np.full(n, np.inf), b])
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    return np.asarray(np.maximum(a[None, :], padded[n + k - i]).min(axis=1))


def divisions(
    rows: Sequence[dict[int, list[Row]]], batch: int, alike: Sequence[bool]
) -> Iterator[tuple[float, tuple[tuple[int, int], ...]]]:
    """(seconds of the slowest, (sequences, column) per pipeline) of all divisions of the batch, fastest first.

    Args:
        rows: per pipeline, by number of sequences, (seconds, column).
        alike: per pipeline, whether it has the columns of the one before; their divisions are given in one order only.
    """
    fastest = [np.full(batch + 1, np.inf) for _ in rows]
    for times, by_q in zip(fastest, rows):
        for q, row in by_q.items():
            times[q] = row[0][0]
    none = np.full(batch + 1, np.inf)
    none[0] = 0.0
    # least[i][q]: of pipelines i and later for q sequences
    least = list(itertools.accumulate(fastest[::-1], min_max, initial=none))[::-1]
    # (bound, -pipelines done, number, slowest so far, sequences left, what they take)
    heap: list[tuple[float, int, int, float, int, tuple[tuple[int, int], ...]]] = [
        (float(least[0][batch]), 0, 0, 0.0, batch, ())
    ]
    number = itertools.count(1)
    while heap and heap[0][0] < math.inf:
        bound, done, _, slowest, left, taken = heapq.heappop(heap)
        if -done == len(rows):
            yield bound, taken
            continue
        rest = least[1 - done].tolist()
        for q, row in rows[-done].items():
            if q <= left and rest[left - q] < math.inf:
                for seconds, column in row:
                    if taken and alike[-done] and (q, column) > taken[-1]:
                        continue
                    now = max(slowest, seconds)
                    state = (now, left - q, (*taken, (q, column)))
                    heapq.heappush(heap, (max(now, rest[left - q]), done - 1, next(number), *state))


class _Enumerator:
    """One enumeration. ``best``: step seconds of the best template so far; ``bound``: seconds that no plan beats."""

    def __init__(self, problem: PlanningProblem, incumbent: Incumbent) -> None:
        self.problem, self.incumbent, self.scorer = problem, incumbent, incumbent.scorer
        self.pool, self.should_stop = self.scorer.pool, incumbent.should_stop
        self.batch, self.space = problem.global_batch_size, problem.space
        self.bound, self.best = 0.0, math.inf
        self.listed = 0
        self.late: list[tuple[float, int, PlacedTemplate]] = []  # heap of (-lower bound (s), number, to be fitted last)
        self.seen: set[PlanTemplate] = set()  # with the fastest recompute
        self._number = itertools.count()
        self.fit = MemoryFit(self.scorer, problem.space.recompute, problem.space.shares)
        self.sequences = StageSequences(problem, self.scorer)

    def run(self) -> bool:
        """First with equal shares of the optimizer states, whose bounds are tighter, then with unequal ones.

        Returns:
            True when the whole space was searched; False when stopped early.
        """
        most = most_pipelines(self.problem, self.scorer)
        pools = self.sequences.columns(False, False, self.best, self.should_stop)
        if pools is None:
            return False
        alone = self._try_all((float(pool.times[self.batch]), (usage,), [pool]) for usage, pool in pools.items())
        left: float | None = math.inf
        for unequal in (False, True)[: 1 + self.space.shares] if most > 1 and alone is not None else ():
            pools = self.sequences.columns(True, unequal, self.best, self.should_stop)
            left = None if pools is None else self._try_all(self._combinations(pools, most))
            if left is None:
                break
        late = None if alone is None or left is None else self._fit_late()
        if alone is None or left is None or late is None:
            return False
        self.bound = min(self.best, self.sequences.skipped, alone, left, late)
        return True

    def _fit_late(self) -> float | None:
        """Fit and evaluate the templates that were put off; returns as :meth:`_try`."""
        left = math.inf
        for bound, _, placed in sorted((-bound, number, placed) for bound, number, placed in self.late):
            if bound >= self.best:
                break
            if self.fit.computed >= MOST_FITTED:
                return min(left, bound)
            rest = self._fit(placed)
            if rest is None:
                return None
            left = min(left, rest)
        return left

    def _try_all(self, combinations: Iterable[Combination]) -> float | None:
        """Evaluate combinations of pipelines; returns as :meth:`_try`."""
        left = math.inf
        for bound, _, pools in sorted(combinations, key=lambda row: row[:2]):
            if bound >= self.best:  # as have those after it
                break
            if self.should_stop():
                return None
            rest = self._try(pools, bound)
            if rest is None:
                return None
            left = min(left, rest)
        return left

    def _combinations(
        self, pools: dict[Usage, ColumnPool], most: int
    ) -> Iterator[Combination]:
        """Those of several pipelines that could be faster than the best plan."""
        least = {usage: np.minimum(pool.times, pool.cut) for usage, pool in pools.items()}
        bounds: dict[tuple[Usage, ...], Floats] = {}
        for combination in multisets(sorted(pools), self.pool.counts, most):
            before = bounds.get(combination[:-1])
            last = least[combination[-1]]
            together = bounds[combination] = last if before is None else min_max(before, last)
            if len(combination) > 1 and together[self.batch] < self.best:
                yield float(together[self.batch]), combination, [pools[usage] for usage in combination]

    def _try(self, pools: list[ColumnPool], bound: float) -> float | None:
        """Evaluate all columns and all divisions of the batch.

        Returns:
            Lower bound (s) on what was left out; None to stop.
        """
        rest = max(bound, self._with_dropped(pools))
        alike = [False, *(a is b for a, b in itertools.pairwise(pools))]
        for schedule in self.space.schedules:
            rows = [pool.rows(schedule, self.best) for pool in pools]
            if not all(rows) or (schedule != self.space.schedules[0] and not self._several_stages(rows, pools)):
                continue
            for count, (least, way) in enumerate(divisions(rows, self.batch, alike)):
                if least >= self.best:
                    break
                if self.should_stop():
                    return None
                if count >= MOST_WAYS or self.listed >= MOST_LISTED:
                    rest = min(rest, least)
                    break
                self.listed += 1
                found = self._try_division(pools, way, schedule, least)
                if found is None:
                    return None
                rest = min(rest, found)
        return rest

    def _with_dropped(self, pools: list[ColumnPool]) -> float:
        """Lower bound (s) on divisions that use a column which was dropped from a pool."""
        least = [np.minimum(pool.times, pool.cut) for pool in pools]
        rows = ([pool.cut, *least[:i], *least[i + 1 :]] for i, pool in enumerate(pools))
        return min(float(functools.reduce(min_max, row)[self.batch]) for row in rows)

    @staticmethod
    def _several_stages(rows: list[dict[int, list[Row]]], pools: list[ColumnPool]) -> bool:
        of_pool = zip(rows, pools)
        return any(len(p.columns[i][0].stages) > 1 for by_q, p in of_pool for row in by_q.values() for _, i in row)

    def _try_division(
        self, pools: list[ColumnPool], way: tuple[tuple[int, int], ...], schedule: str, least: float
    ) -> float | None:
        """Evaluate a division in both placement orders; returns as :meth:`_try`."""
        shapes = [self.sequences.template(pool.columns[i]) for pool, (_, i) in zip(pools, way)]
        parts = tuple(PipelineReplicas(shape, 1, q // shape.micro_batch_size) for shape, (q, _) in zip(shapes, way))
        tried, rest = None, math.inf
        for order in ("stage", "pipeline") if len(parts) > 1 else ("stage",):
            placed = place(PlanTemplate(parts, schedule, order), self.pool)
            if placed is None:
                self.incumbent.rejected["packing"] += 1
                rest = min(rest, least)  # it might pack in another placement
            elif tried is None or placed.pipelines != tried.pipelines:
                left = self._evaluate(placed)
                if left is None:
                    return None
                rest = min(rest, max(least, left))
                tried = placed
        return rest

    def _evaluate(self, placed: PlacedTemplate) -> float | None:
        """Fit and evaluate a placed template, or put it off.

        Returns:
            Lower bound (s) on what was neither evaluated nor put off, inf if nothing; None to stop.
        """
        likely, sure = self.fit.best_case(placed)
        if likely is None:
            self.incumbent.rejected["memory"] += 1
            return math.inf
        bound = self.scorer.bounds.lower_bound(likely)
        if bound >= self.best or likely in self.seen:
            return math.inf
        self.seen.add(likely)
        if not sure:
            score = self.scorer.score(likely, self.best)
            assert score is not None, "it was placed a moment ago"
            if score.step_seconds >= self.best or self.fit.computed >= MOST_FITTED:
                return self._put_off(bound, placed)
        return self._fit(placed)

    def _put_off(self, bound: float, placed: PlacedTemplate) -> float:
        """Keep a template to be fitted last; returns the lower bound (s) of one that is not kept for it, inf if none.
        """
        heapq.heappush(self.late, (-bound, next(self._number), placed))
        return -heapq.heappop(self.late)[0] if len(self.late) > MOST_LATE else math.inf

    def _fit(self, placed: PlacedTemplate) -> float | None:
        """Evaluate the ways to fit a placed template; returns as :meth:`_evaluate`."""
        fits, other = self.fit.fits(placed)
        least = math.inf if other is None else self.scorer.bounds.lower_bound(other)
        for found in fits:
            if self.scorer.bounds.lower_bound(found) >= self.best:
                continue
            score = self.scorer.score(found)
            assert score is not None, "it was placed before"
            seconds, made = score.step_seconds, found.joined()
            if seconds < self.best:
                # Islands have communicators of their own, so less may fit. That other levels then do is not tried.
                if not simulate_best([(seconds, 0, made)], self.problem, self.scorer):
                    least = min(least, self.scorer.bounds.lower_bound(found))
                    continue
                self.best = seconds
            self.incumbent.take(made, seconds)
            if self.should_stop():
                return None
        self.incumbent.rejected["memory"] += not fits
        return least
