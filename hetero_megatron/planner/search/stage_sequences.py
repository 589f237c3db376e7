"""Pipelines of the complete enumeration: every sequence of stages with every split of the layers that could matter.

For every sequence of stages (group, TP, inner DP) and number of micro-batches, the splits of the layers that could be
part of a plan better than the best one. Bounds on many splits at once rule most of them out; templates are only made of
those that are evaluated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetero_megatron.planner.estimate.layer_partition import LISTED, Floats, best_split, count_splits, listed
from hetero_megatron.planner.estimate.lower_bounds import AffineBound, SyncBounds, affine_lower_bound, split_lower_bound
from hetero_megatron.planner.estimate.pipeline_time import Link, many
from hetero_megatron.planner.estimate.stage_table import MANY_REPLICAS, StageKind, StageTable
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, StageTemplate, in_flight
from hetero_megatron.planner.template.search_space import SearchSpace, batch_sizes, options
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.cached_method import cached_method

Usage = tuple[int, ...]  # chips per group
Stages = tuple[StageTemplate, ...]
Column = tuple["StageSequence", Usage, Usage]  # (stages, layers of each, micro-batches in flight at each)
Row = tuple[float, int]  # (seconds, index of a column)
MOST_SEQUENCES = 6000
MOST_SIMULATED = 4_000_000  # splits x micro-batches timed exactly
MOST_SPLITS = 400  # kept per sequence of stages
ALONE, SEVERAL = 400, 24  # columns kept per usage and number of sequences, for plans of one and of several pipelines
STEP = 1.125  # between numbers of micro-batches above 16


def sequences(
    pool: DevicePool, model: ModelSpec, space: SearchSpace, size: int, most: int
) -> dict[Usage, list[Stages]] | None:
    """All sequences of stages by the chips they use, for micro-batches of ``size``; None when there are more than
    ``most``."""
    by_group = [list(options(pool, g, model, space, size)) for g in range(len(pool.groups))]
    found: dict[Usage, list[Stages]] = defaultdict(list)
    count = 0

    def extend(prefix: Stages, left: list[int]) -> bool:
        nonlocal count
        for g, choices in enumerate(by_group):
            for option in choices:
                if option.chips > left[g] or len(prefix) >= model.num_layers + 2:
                    continue
                left[g] -= option.chips
                row = (*prefix, option)
                found[tuple(n - x for n, x in zip(pool.counts, left))].append(row)
                count += 1
                good = count <= most and extend(row, left)
                left[g] += option.chips
                if not good:
                    return False
        return True

    return found if extend((), list(pool.counts)) else None


@dataclass(frozen=True, eq=False)
class StageSequence:
    """A sequence of stages without layers, for micro-batches of ``size`` sequences; ``tables``: of each stage."""

    stages: Stages
    tables: list[StageTable]
    links: list[Link]
    size: int
    schedule: str

    @cached_property
    def forward(self) -> list[Floats]:
        return [t.forward for t in self.tables]

    def seconds(self, alive: Usage) -> list[Floats]:
        return [t.seconds[t.row(k)] for t, k in zip(self.tables, alive)]

    def runs_under(self, schedule: str) -> bool:
        """Single stages run alike under all schedules."""
        return schedule == self.schedule or len(self.stages) == 1


class ColumnPool:
    """Columns (as in column generation): pipelines on the same chips, with their time for each share of the batch.

    Attributes:
        best: by number of sequences, (least seconds, column) of the ``keep`` fastest.
        times: [batch + 1] seconds of the fastest; cut: [batch + 1] least seconds of what was left out.
    """

    def __init__(self, batch: int, keep: int) -> None:
        self.batch, self.keep = batch, keep
        self.columns: list[Column] = []
        self.times, self.cut = np.full(batch + 1, np.inf), np.full(batch + 1, np.inf)
        self.best: list[list[Row]] = [[] for _ in range(batch + 1)]

    def insert(self, q: int, seconds: float, column: Column) -> bool:
        """Whether the column is among the fastest for ``q`` sequences; recorded in ``cut`` if not."""
        row = self.best[q]
        if len(row) >= self.keep and seconds >= row[-1][0]:
            self.cut[q] = min(self.cut[q], seconds)
            return False
        self.columns.append(column)
        row.append((seconds, len(self.columns) - 1))
        row.sort()
        if len(row) > self.keep:
            self.cut[q] = min(self.cut[q], row.pop()[0])
        self.times[q] = row[0][0]
        return True

    def skip_counts(self) -> None:
        """Count numbers of micro-batches between those that were tried as left out: no faster than with fewer."""
        least = np.minimum(self.times, self.cut)
        for q in range(17, self.batch + 1):
            self.cut[q] = min(self.cut[q], least[math.floor(q / STEP) + 1 : q].min(initial=math.inf))

    def rows(self, schedule: str, limit: float) -> dict[int, list[Row]]:
        """By number of sequences, the columns of a schedule that take less than ``limit`` seconds."""
        found = {}
        for q, row in enumerate(self.best):
            few = [(t, i) for t, i in row if t < limit and self.columns[i][0].runs_under(schedule)]
            if few:
                found[q] = few
        return found


class StageSequences:
    """Makes the columns of the enumeration. ``skipped``: least seconds of what was left out to limit the effort."""

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.scorer, self.tables, self.pool = scorer, scorer.tables, scorer.pool
        self.model, self.batch, self.space = problem.model, problem.global_batch_size, problem.space
        self.several, self.unequal, self.best = False, False, math.inf
        self.skipped = math.inf
        self.simulated = 0
        self._sync = SyncBounds(scorer.bounds, problem.model.num_layers)

    def columns(
        self, several: bool, unequal: bool, best: float, should_stop: Callable[[], bool]
    ) -> dict[Usage, ColumnPool] | None:
        """Columns by usage, for plans of one or of ``several`` pipelines that are faster than ``best`` seconds;
        ``unequal``: other pipelines may own all optimizer states. None: stopped early."""
        self.several, self.unequal, self.best = several, unequal, best
        pools: dict[Usage, ColumnPool] = {}
        most = self.batch - several
        for size in batch_sizes(self.space, most):
            if not several and self.batch % size:
                continue
            found = sequences(self.pool, self.model, self.space, size, MOST_SEQUENCES)
            assert found is not None
            for usage, rows in found.items():
                if several and usage == self.pool.counts:  # no chips are left for others
                    continue
                pool = pools.setdefault(usage, ColumnPool(self.batch, SEVERAL if several else ALONE))
                for row in sorted(rows, key=len):  # the best usually have few stages
                    if should_stop():
                        return None
                    for schedule in self.space.schedules if len(row) > 1 else self.space.schedules[:1]:
                        self._add_columns(pool, row, size, most // size, schedule)
        for pool in pools.values() if several else ():
            pool.skip_counts()
        return {usage: pool for usage, pool in pools.items() if pool.columns}

    def template(self, column: Column) -> PipelineTemplate:
        """The pipeline of a column, with the recompute that fits by its tables."""
        sequence, layers, alive = column
        made = []
        for stage, table, n, k in zip(sequence.stages, sequence.tables, layers, alive):
            recompute, first = (self.space.recompute, 0) if self.space.recompute else table.choice(k, n)
            made.append(replace(stage, layers=n, recompute=recompute, first=first))
        return PipelineTemplate(sequence.size, tuple(made))

    def _add_columns(self, pool: ColumnPool, stages: Stages, size: int, most: int, schedule: str) -> None:
        """Add the best layers of one sequence of stages for every number of micro-batches."""
        tables = [self._table(stages, s, size) for s in range(len(stages))]
        pairs = zip(stages, stages[1:])
        links = [self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b)) for a, b in pairs]
        sequence = StageSequence(stages, [t for t, _ in tables], links, size, schedule)
        least, layers = self._least_sync_tail(stages), self.model.num_layers
        for m in micro_batch_counts(most) if self.several else [most]:
            alive = in_flight(schedule, len(stages), m)
            if max(alive) > self.tables.depth:
                break
            slopes = [lines[t.row(k)] for (t, lines), k in zip(tables, alive)]
            if split_lower_bound(slopes, layers, links, m) + least >= self.best:
                break  # more micro-batches take longer
            if count_splits(layers, len(stages)) <= LISTED:
                for split, seconds in self._promising(sequence, m, alive):
                    if not pool.insert(m * size, seconds, (sequence, split, alive)):
                        break  # the others are slower
                continue
            found = best_split(sequence.seconds(alive), links, m, schedule, sequence.forward)
            if found is not None and found[0] + least < self.best:
                pool.insert(m * size, found[0] + least, (sequence, found[1], alive))
                self.skipped = min(self.skipped, found[0] + least)

    def _least_sync_tail(self, stages: Stages) -> float:
        """Lower bound (s) on the sync tail, whatever the layers of the stages."""
        last = len(stages) - 1
        most = max(self._most_saved(x.group, x.tp, s == 0, s == last) for s, x in enumerate(stages))
        return (self.scorer.bounds.update_seconds if self.several else 0.0) - most

    @cached_method
    def _most_saved(self, group: int, tp: int, embed: bool, head: bool) -> float:
        """Seconds that the first backward saves with all layers."""
        return self.scorer.saved_seconds(StageTemplate(group, tp, 1, self.model.num_layers), embed, head)

    def _table(self, stages: Stages, s: int, size: int) -> tuple[StageTable, list[AffineBound]]:
        """(table of stage ``s``, affine lower bounds of its rows). For lower bounds, buckets take no memory, no
        gradients are reduced, and the other pipelines own as many of the stage's states as they could."""
        stage, replicas = stages[s], 1.0
        if self.several:
            others = self.pool.chips - sum(x.chips for x in stages)
            replicas = MANY_REPLICAS if self.unequal else 1 + others / stage.chips
        kind = StageKind(
            stage.group, stage.tp, stage.dp, size, s == 0, s == len(stages) - 1, replicas, self.space.recompute,
            buckets=False, beside=self.tables.communicators.counted(stages, s, ()),
        )  # fmt: skip
        return self._bounded(kind)

    @cached_method
    def _bounded(self, kind: StageKind) -> tuple[StageTable, list[AffineBound]]:
        table = self.tables.table(kind)
        return table, [affine_lower_bound(seconds) for seconds in table.seconds]

    def _promising(self, sequence: StageSequence, m: int, alive: Usage) -> Iterator[tuple[Usage, float]]:
        """(layers, exact seconds with the least sync tail) of the splits that are below the best plan, fastest first.
        """
        ways, closed, seconds = listed(sequence.seconds(alive), sequence.links, m, sequence.schedule, sequence.forward)
        good = np.flatnonzero(closed < np.inf)
        ways, closed, seconds = ways[good], closed[good], seconds[good]
        first = np.stack([sequence.forward[i][ways[:, i]] for i in range(len(sequence.stages))], axis=1)
        after = self._sync.sync_tail(sequence.stages, ways, seconds - first, sequence.links, 1 + self.several)
        good = np.flatnonzero(closed + after < self.best)
        if not len(good):
            return
        if self.simulated > MOST_SIMULATED:
            self.skipped = min(self.skipped, float((closed + after).min()))
            good = np.array([np.argmin(closed + after)])
        self.simulated += len(good) * m
        exact = many(first[good], (seconds - first)[good], sequence.links, m, sequence.schedule) + after[good]
        order = np.argsort(exact, kind="stable")
        order = order[: int(np.searchsorted(exact[order], self.best))]
        for i in order[:MOST_SPLITS]:
            yield tuple(ways[good[i]].tolist()), float(exact[i])
        if len(order) > MOST_SPLITS:
            self.skipped = min(self.skipped, float(exact[order[MOST_SPLITS]]))


def micro_batch_counts(most: int) -> list[int]:
    """All counts up to 16, then in steps of about one eighth, up to ``most``."""
    found, m = [], 1
    while m < most:
        found.append(m)
        m = max(m + 1, math.ceil(m * STEP)) if m >= 16 else m + 1
    return [*found, most]
