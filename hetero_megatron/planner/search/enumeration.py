"""Complete enumeration, for small clusters.

Enumerates every sequence of stages (group, TP, inner DP) on every number of chips, with the exact best layers and
recompute; every multiset of such pipelines that the cluster has chips for; and every division of the batch.
Combinations are evaluated in the order of their lower bounds until no bound is below the best value. Lower bounds
assume the most ranks that could share a stage's optimizer states; evaluated templates take the recompute that fits with
states where the runtime will place them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hetero_megatron.planner.estimate.layer_partition import LISTED, count_splits
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.batch_partition import allocate, bound_with_dropped, divisions_below
from hetero_megatron.planner.search.columns import ColumnPool, PipelineColumn
from hetero_megatron.planner.search.incumbent import Incumbent, judge
from hetero_megatron.planner.search.memory_fit import MemoryFit
from hetero_megatron.planner.search.stage_sequences import (
    MOST_SEQUENCES,
    StageSequences,
    Usage,
    micro_batch_counts,
    sequences,
)
from hetero_megatron.planner.template.placement import PlacedTemplate, place
from hetero_megatron.planner.template.plan_template import PipelineReplicas, PipelineTemplate, PlanTemplate
from hetero_megatron.planner.template.search_space import batch_sizes

MOST_CHIPS = 24  # above, enumeration is not considered
MOST_COMBINATIONS = 20_000
MOST_WORK = 8_000_000  # sequences x splits of layers x numbers of micro-batches
MOST_WAYS = 4000  # batch divisions listed per combination
MOST_LISTED = 200_000  # batch divisions listed in all
MOST_FITTED = 300  # placements whose memory is computed exactly


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
        if judge(incumbent.seeds[:1], problem, incumbent.scorer, incumbent.budget):
            run.best = incumbent.seeds[0][0]
        complete = run.run()
        self.bound = run.bound
        return complete


def most_pipelines(problem: PlanningProblem, scorer: TemplateScorer) -> int:
    chips = scorer.pool.chips
    return min(problem.global_batch_size, chips, problem.space.max_pipelines or chips)


class _Enumerator:
    """One enumeration. ``best``: step seconds of the best template so far; ``bound``: seconds that no plan beats."""

    def __init__(self, problem: PlanningProblem, incumbent: Incumbent) -> None:
        self.problem, self.incumbent, self.scorer = problem, incumbent, incumbent.scorer
        self.tables, self.pool, self.should_stop = self.scorer.tables, self.scorer.pool, incumbent.should_stop
        self.batch, self.space = problem.global_batch_size, problem.space
        self.bound = 0.0
        self.best = math.inf
        self.exact = False
        self.listed = self.fitted = 0
        self.fit = MemoryFit(self.scorer, problem.space.recompute, problem.space.shares)
        self.sequences = StageSequences(problem, self.scorer)

    def run(self) -> bool:
        """Two passes: the best layers by closed form, which gives a good plan quickly; then everything that could beat
        it.

        Returns:
            True when the whole space was searched; False when stopped early.
        """
        counts = range(1, most_pipelines(self.problem, self.scorer) + 1)
        if not all(self._pass([d]) for d in counts):
            return False
        self.exact, self.fitted = True, self.fit.computed
        return self._pass(counts)

    def _pass(self, counts: Sequence[int]) -> bool:
        """Enumerate all plans with these numbers of pipelines; False when stopped early."""
        if self.should_stop():
            return False
        column_pools = {d: self.sequences.columns(d, self.best, self.exact) for d in counts}
        rows: list[tuple[float, tuple[Usage, ...], tuple[int, ...]]] = []
        usages = sorted({u for s in column_pools.values() for u in s})
        for combination in multisets(usages, self.pool.counts, max(counts)):
            column_pool = column_pools.get(len(combination), {})
            if any(u not in column_pool for u in combination):
                continue
            found = allocate([column_pool[u].times for u in combination], self.batch)
            if found is not None:
                rows.append((found[0], combination, found[1]))
        rows.sort()
        left = math.inf  # lower bound on what is left out
        for bound, combination, shares in rows:
            if bound >= self.best:
                break
            if self.should_stop():
                return False
            column_pool = column_pools[len(combination)]
            rest: float | None
            if self.exact and len(combination) > 1:
                rest = self._try_all_divisions(combination, column_pool, bound)
            else:
                rest = self._try_best_columns(combination, shares, column_pool, bound)
            if rest is None:
                return False
            left = min(left, rest)
        if self.exact:
            # Combinations after the break have bounds of at least the best time.
            self.bound = min(self.best, self.sequences.skipped, left)
        return True

    def _try_best_columns(
        self,
        combination: tuple[Usage, ...],
        shares: tuple[int, ...],
        column_pool: dict[Usage, ColumnPool],
        bound: float,
    ) -> float | None:
        """Evaluate the best columns for one division of the batch.

        Returns:
            Lower bound (s) on what was left out; None to stop.
        """
        # For a single pipeline all kept columns are evaluated; only the dropped ones are left out.
        rest = float(column_pool[combination[0]].cut[self.batch]) if len(combination) == 1 else bound
        for least, template in self._templates(combination, shares, column_pool):
            placed = place(template, self.pool)
            if placed is None:
                self.incumbent.rejected["packing"] += 1
                rest = min(rest, least)  # it might pack in another placement
            elif not self._evaluate(placed)[1]:
                return None
        return rest

    def _try_all_divisions(
        self, combination: tuple[Usage, ...], column_pool: dict[Usage, ColumnPool], bound: float
    ) -> float | None:
        """Evaluate all columns and all divisions of the batch for several pipelines; returns as
        :meth:`_try_best_columns`."""
        column_pools = [column_pool[u] for u in combination]
        rest = max(
            bound, bound_with_dropped([s.times for s in column_pools], [s.cut for s in column_pools], self.batch)
        )
        for schedule in self.space.schedules:
            rows = [self._rows(s, schedule) for s in column_pools]
            if not all(rows) or (schedule != self.space.schedules[0] and not self._several_stages(rows, column_pools)):
                continue
            if self.listed >= MOST_LISTED or self.fit.computed - self.fitted >= MOST_FITTED:
                return bound
            ways, limit = divisions_below(rows, self.batch, bound, self.best, MOST_WAYS)
            self.listed += len(ways)
            rest = min(rest, limit)
            for least, way in ways:
                if least >= self.best:
                    break
                if self.should_stop():
                    return None
                if self.fit.computed - self.fitted >= MOST_FITTED:
                    rest = min(rest, least)
                    break
                columns = [s.column(index) for s, (_, index) in zip(column_pools, way)]
                parts = tuple(
                    PipelineReplicas(c.shape, 1, q // c.shape.micro_batch_size) for c, (q, _) in zip(columns, way)
                )
                tried = None
                for order in ("stage", "pipeline"):
                    placed = place(PlanTemplate(parts, schedule, order), self.pool)
                    if placed is None:
                        rest = min(rest, least)
                    elif tried is None or placed.pipelines != tried.pipelines:
                        fitted, go_on = self._evaluate(placed)
                        rest = min(rest, max(least, fitted))
                        if not go_on:
                            return None
                        tried = placed
        return rest

    def _rows(self, column_pool: ColumnPool, schedule: str) -> dict[int, list[tuple[float, int]]]:
        """By number of sequences, the columns of a schedule that are faster than the best plan."""
        found = {}
        for q, row in enumerate(column_pool.best):
            few = [
                (seconds, i) for seconds, i in row
                if seconds < self.best and self._has_schedule(column_pool.column(i), schedule)
            ]  # fmt: skip
            if few:
                found[q] = few
        return found

    @staticmethod
    def _has_schedule(column: PipelineColumn, schedule: str) -> bool:
        """Whether the column runs under the schedule; single stages run alike under all."""
        return column.schedule == schedule or len(column.shape.stages) == 1

    def _several_stages(self, rows: list[dict[int, list[tuple[float, int]]]], column_pools: list[ColumnPool]) -> bool:
        return any(
            len(column_pool.column(i).shape.stages) > 1
            for by_q, column_pool in zip(rows, column_pools) for row in by_q.values() for _, i in row
        )  # fmt: skip

    def _evaluate(self, placed: PlacedTemplate) -> tuple[float, bool]:
        """(lower bound (s) on ways to fit the template that were not evaluated, inf if none; whether to continue)."""
        fits, other = self.fit.fits(placed)
        least = math.inf if other is None else self._lower_bound(other)
        for found in fits:
            if self._lower_bound(found) >= self.best:
                continue
            score = self.scorer.score(found)
            assert score is not None, "it was placed a moment ago"
            self.best = min(self.best, score.step_seconds)
            self.incumbent.take(found.joined(), score.step_seconds)
            if self.should_stop():
                return least, False
        self.incumbent.rejected["memory"] += not fits
        return least, True

    def _lower_bound(self, template: PlanTemplate) -> float:
        """Lower bound (s) on the step time, with the best links that the stages could have."""
        worst = 0.0
        for part in template.parts:
            shape, m = part.shape, part.num_micro_batches
            links = self.scorer.links(shape)
            after = self.scorer.bounds.sync_tail(shape.stages, shape.micro_batch_size, links, template.pipelines)
            worst = max(worst, after + self.scorer.pipeline_seconds(shape, m, template.schedule))
        return worst

    def _templates(
        self, combination: tuple[Usage, ...], shares: tuple[int, ...], column_pools: dict[Usage, ColumnPool]
    ) -> Iterator[tuple[float, PlanTemplate]]:
        """(lower bound in seconds, template) of one combination: all columns of a single pipeline, the best two each of
        several."""
        for schedule in self.space.schedules:
            choices = []
            for usage, q in zip(combination, shares):
                found = self._shapes(column_pools[usage], q, schedule, len(combination))
                choices.append(found if len(combination) == 1 else found[:2])
            for row in itertools.islice(itertools.product(*choices), 400 if len(choices) == 1 else 8):
                if row[0][0] >= self.best:
                    continue
                parts = tuple(PipelineReplicas(shape, 1, m) for _, shape, m in row)
                for order in ("stage", "pipeline") if len(parts) > 1 else ("stage",):
                    yield max(seconds for seconds, _, _ in row), PlanTemplate(parts, schedule, order)

    def _shapes(
        self, column_pool: ColumnPool, q: int, schedule: str, pipelines: int
    ) -> list[tuple[float, PipelineTemplate, int]]:
        """(seconds, shape, micro-batches) of the columns for ``q`` sequences, fastest first."""
        found = []
        for _, index in column_pool.best[q]:
            column = column_pool.column(index)
            shape: PipelineTemplate | None = column.shape
            m = q // column.shape.micro_batch_size
            if self.space.recompute is None and not self.exact:
                shape = best_recompute(self.tables, column.shape, schedule, m, pipelines)
            if shape is not None:
                found.append((self.scorer.pipeline_seconds(shape, m, schedule) + column.after, shape, m))
        return sorted(found, key=lambda row: row[0])
