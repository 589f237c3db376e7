"""Sequences of stages with their best layers, for the complete enumeration.

Every sequence of stages (group, TP, inner DP) over every number of chips; for each number of micro-batches the splits
of the layers that could be part of a plan that is better than the best one. Most are ruled out by bounds of many at
once (``lower_bounds``); only those that a column pool keeps are made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from hetero_megatron.planner.estimate.layer_partition import LISTED, Floats, best_split, count_splits, listed
from hetero_megatron.planner.estimate.lower_bounds import LineUnder, SyncBounds, floor, line_under
from hetero_megatron.planner.estimate.pipeline_time import Link, many
from hetero_megatron.planner.estimate.stage_table import NEARLY_NONE, StageKind, StageTable
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.columns import ColumnPool, PipelineColumn
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, StageTemplate, in_flight
from hetero_megatron.planner.template.search_space import SearchSpace, StageOption, batch_sizes, options, tp_degrees
from hetero_megatron.spec import ModelSpec

Usage = tuple[int, ...]
Sequence_ = tuple[StageOption, ...]
MOST_SEQUENCES = 6000
MOST_SIMULATED = 4_000_000  # splits x micro-batches that are timed exactly
MOST_SPLITS = 400  # of one sequence of stages that are kept
MOST_KEPT = 24  # columns per usage and number of sequences, where several pipelines are combined


def sequences(
    pool: DevicePool, model: ModelSpec, space: SearchSpace, size: int, most: int
) -> dict[Usage, list[Sequence_]] | None:
    """All sequences of stages by the chips they use, for micro-batches of ``size``; None when more than ``most``."""
    by_group = [list(options(pool, g, model, space, size)) for g in range(len(pool.groups))]
    found: dict[Usage, list[Sequence_]] = defaultdict(list)
    count = 0

    def extend(prefix: Sequence_, left: list[int]) -> bool:
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


@dataclass
class _Sequence:
    """A sequence of stages without layers, for micro-batches of one size. ``made``: columns of it, by layers and
    micro-batches in flight."""

    stages: list[StageTemplate]
    tables: list[StageTable]
    links: list[Link]
    size: int
    schedule: str
    pipelines: int
    made: dict[tuple[Usage, Usage], int] = field(default_factory=dict)

    @cached_property
    def forward(self) -> list[Floats]:
        return [t.forward for t in self.tables]

    def seconds(self, alive: Usage) -> list[Floats]:
        return [t.seconds[t.row(k)] for t, k in zip(self.tables, alive)]


class StageSequences:
    """``skipped``: the least time of what was not looked into, for want of effort."""

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.scorer, self.tables, self.pool = scorer, scorer.tables, scorer.pool
        self.model, self.batch, self.space = problem.model, problem.global_batch_size, problem.space
        self.exact, self.best = False, math.inf
        self.skipped = math.inf
        self.simulated = 0
        self._sync = SyncBounds(scorer.bounds, problem.model.num_layers)
        self._tables: dict[tuple[object, ...], tuple[StageTable, list[LineUnder]]] = {}
        self._saved: dict[tuple[int, int, bool, bool], float] = {}

    def columns(self, pipelines: int, best: float, exact: bool) -> dict[Usage, ColumnPool]:
        """Columns by usage, for plans of ``pipelines`` pipelines that are faster than ``best``: a few by closed form,
        or by ``exact`` times all that several pipelines have use for."""
        self.best, self.exact = best, exact
        column_pools: dict[Usage, ColumnPool] = {}
        most = self.batch - pipelines + 1
        for size in batch_sizes(self.space, most):
            if pipelines == 1 and self.batch % size:
                continue
            found = sequences(self.pool, self.model, self.space, size, MOST_SEQUENCES)
            assert found is not None
            for usage, rows in found.items():
                if self._others_have_none(usage, pipelines):
                    continue
                for row in sorted(rows, key=len):  # most of the best have few stages
                    for schedule in self.space.schedules:
                        if schedule == "gpipe" and not self._slow_links(row, size):
                            continue
                        if usage not in column_pools:
                            keep = (400 if pipelines == 1 else MOST_KEPT) if self.exact else 6
                            column_pools[usage] = ColumnPool(self.batch, self.exact, keep)
                        self._fill(column_pools[usage], row, size, pipelines, most // size, schedule)
        return {usage: column_pool for usage, column_pool in column_pools.items() if column_pool.makers}

    def _others_have_none(self, usage: Usage, pipelines: int) -> bool:
        return sum(self.pool.counts) - sum(usage) < pipelines - 1

    def _slow_links(self, row: Sequence_, size: int) -> bool:
        """Whether transfers take long enough that more micro-batches in flight could pay; in the last pass any."""
        if self.exact:
            return len(row) > 1
        stages = [StageTemplate(o.group, o.tp, o.dp, 1) for o in row]
        for a, b in zip(stages, stages[1:]):
            link = self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b))
            table = self.tables.table(StageKind(a.group, a.tp, a.dp, size, False, False, 1))
            if max(link) > 0.02 * float(table.forward[1]):
                return True
        return False

    def _fill(
        self, column_pool: ColumnPool, row: Sequence_, size: int, pipelines: int, most: int, schedule: str
    ) -> None:
        """Put the best layers of one sequence of stages into the pool, for every number of micro-batches that can be
        asked for."""
        stages = [StageTemplate(o.group, o.tp, o.dp) for o in row]
        tables = [self._table(o, s == 0, s == len(row) - 1, size, pipelines, row) for s, o in enumerate(row)]
        links = [
            self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b)) for a, b in zip(stages, stages[1:])
        ]
        counts = [most] if pipelines == 1 else anchors(most)
        every = len(counts) == most or pipelines == 1
        line = _Sequence(stages, [t for t, _ in tables], links, size, schedule, pipelines)
        least = self._least_after_any(stages, pipelines)
        few = count_splits(self.model.num_layers, len(stages)) <= LISTED
        by_split: dict[tuple[Usage, Usage], list[int]] = defaultdict(list)
        for m in counts:
            alive = in_flight(schedule, len(stages), m)
            if max(alive) > self.tables.depth:
                continue
            slopes = [lines[t.row(k)] for (t, lines), k in zip(tables, alive)]
            low = floor(slopes, self.model.num_layers, links, m) + least
            if low >= self.best or not (self.exact or column_pool.takes(m * size, low)):
                continue
            if self.exact and few:
                self._fill_exactly(column_pool, line, m, alive)
                continue
            found = best_split(line.seconds(alive), links, m, schedule, line.forward)
            if found is None or not (self.exact or column_pool.takes(m * size, found[0] + least)):
                continue
            if found[0] + least < self.best:
                by_split[found[1], alive].append(m)
                if self.exact:
                    self.skipped = min(self.skipped, found[0] + least)
        for (layers, alive), found_at in by_split.items():
            column_pool.add_at(
                self._column(line, layers, alive), found_at if every else list(range(1, max(found_at) + 1))
            )

    def _fill_exactly(self, column_pool: ColumnPool, line: _Sequence, m: int, alive: Usage) -> None:
        """All splits of the layers that could be better than the best plan, by their exact times."""
        q = m * line.size
        for layers, seconds in self._promising(line, m, alive):
            if not column_pool.takes(q, seconds):
                break  # the others are slower
            index = line.made.get((layers, alive))
            if index is None:
                index = line.made[layers, alive] = column_pool.promise(partial(self._column, line, layers, alive))
            column_pool.insert(q, seconds, index)

    def _least_after_any(self, stages: list[StageTemplate], pipelines: int) -> float:
        """All that is known of what follows a pipeline before its layers are."""
        last, found = len(stages) - 1, []
        for s, x in enumerate(stages):
            key = (x.group, x.tp, s == 0, s == last)
            if key not in self._saved:
                whole = replace(x, dp=1, layers=self.model.num_layers)
                self._saved[key] = self.scorer.saved_seconds(whole, s == 0, s == last)
            found.append(self._saved[key])
        return (self.scorer.bounds.update if pipelines > 1 else 0.0) - max(found)

    def _table(
        self, o: StageOption, embed: bool, head: bool, size: int, pipelines: int, row: Sequence_
    ) -> tuple[StageTable, list[LineUnder]]:
        """(of a stage; the lines under its rows). For lower bounds buckets take no memory, and of several pipelines the
        others may own its states, or as many of them as there can be."""
        replicas = float(pipelines)
        if self.exact and pipelines > 1:
            others = min(self.pool.chips - sum(x.chips for x in row), (pipelines - 1) * self._widest)
            replicas = NEARLY_NONE if self.space.shares else 1 + others / o.chips
        key = (o, embed, head, size, replicas, self.exact)
        if key not in self._tables:
            kind = StageKind(
                o.group, o.tp, o.dp, size, embed, head, replicas, self.space.recompute, buckets=not self.exact,
            )  # fmt: skip
            table = self.tables.table(kind)
            self._tables[key] = table, [line_under(seconds) for seconds in table.seconds]
        return self._tables[key]

    @cached_property
    def _widest(self) -> int:
        """Chips of the largest stage that there can be."""
        most = max(batch_sizes(self.space, self.batch)) if self.space.inner_dp else 1
        sizes = [tp_degrees(self.pool, g, self.model, self.space, True) for g in range(len(self.pool.groups))]
        return max(min(g.chips, max(tps, default=0) * most) for g, tps in zip(self.pool.groups, sizes))

    def _promising(self, line: _Sequence, m: int, alive: Usage) -> Iterator[tuple[Usage, float]]:
        """The splits whose exact time is below the best, and that time, with the least that follows; fastest first."""
        ways, closed, seconds = listed(line.seconds(alive), line.links, m, line.schedule, line.forward)
        good = np.flatnonzero(closed < np.inf)
        ways, closed, seconds = ways[good], closed[good], seconds[good]
        first = np.stack([line.forward[i][ways[:, i]] for i in range(len(line.stages))], axis=1)
        after = self._sync.after(line.stages, ways, seconds - first, line.links, line.pipelines)
        good = np.flatnonzero(closed + after < self.best)
        if not len(good):
            return
        if self.simulated > MOST_SIMULATED:
            self.skipped = min(self.skipped, float((closed + after).min()))
            good = np.array([np.argmin(closed + after)])
        self.simulated += len(good) * m
        exact = many(first[good], (seconds - first)[good], line.links, m, line.schedule) + after[good]
        order = np.argsort(exact, kind="stable")
        order = order[: int(np.searchsorted(exact[order], self.best))]
        for i in order[:MOST_SPLITS]:
            yield tuple(ways[good[i]].tolist()), float(exact[i])
        if len(order) > MOST_SPLITS:
            self.skipped = min(self.skipped, float(exact[order[MOST_SPLITS]]))

    def _column(self, line: _Sequence, layers: Usage, alive: Usage) -> PipelineColumn:
        made, forward, backward = [], [], []
        for s, (stage, table) in enumerate(zip(line.stages, line.tables)):
            recompute, first = table.choice(alive[s], layers[s])
            if self.space.recompute is not None:
                recompute, first = self.space.recompute, 0
            made.append(StageTemplate(stage.group, stage.tp, stage.dp, layers[s], recompute, first))
            forward.append(float(table.forward[layers[s]]))
            backward.append(float(table.seconds[table.row(alive[s]), layers[s]]) - forward[-1])
        after = self.scorer.bounds.after(made, line.size, line.links, line.pipelines)
        shape = PipelineTemplate(line.size, tuple(made))
        return PipelineColumn(shape, tuple(forward), tuple(backward), tuple(line.links), line.schedule, after)


def anchors(most: int) -> list[int]:
    """All counts up to 16, then about every eighth part."""
    found, m = [], 1
    while m < most:
        found.append(m)
        m = max(m + 1, math.ceil(m * 1.125)) if m >= 16 else m + 1
    return [*found, most]
