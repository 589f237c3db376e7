"""Sequences of stages with their best layers, for the complete enumeration.

For every sequence of stages (group, TP, inner DP) and number of micro-batches, the splits of the layers that could be
part of a plan better than the best one. Bounds on many splits at once rule most of them out; only those that a column
pool keeps are made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from hetero_megatron.planner.estimate.layer_partition import LISTED, Floats, best_split, count_splits, listed
from hetero_megatron.planner.estimate.lower_bounds import AffineBound, SyncBounds, affine_lower_bound, split_lower_bound
from hetero_megatron.planner.estimate.pipeline_time import Link, many
from hetero_megatron.planner.estimate.stage_table import MANY_REPLICAS, StageKind, StageTable
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.columns import ColumnPool, PipelineColumn
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, StageTemplate, in_flight
from hetero_megatron.planner.template.search_space import SearchSpace, StageOption, batch_sizes, options, tp_degrees
from hetero_megatron.spec import ModelSpec

Usage = tuple[int, ...]  # chips per group
StageOptions = tuple[StageOption, ...]
MOST_SEQUENCES = 6000
MOST_SIMULATED = 4_000_000  # splits x micro-batches timed exactly
MOST_SPLITS = 400  # kept per sequence of stages
MOST_KEPT = 24  # columns per usage and number of sequences, for plans of several pipelines


def sequences(
    pool: DevicePool, model: ModelSpec, space: SearchSpace, size: int, most: int
) -> dict[Usage, list[StageOptions]] | None:
    """All sequences of stages by the chips they use, for micro-batches of ``size``; None when there are more than
    ``most``."""
    by_group = [list(options(pool, g, model, space, size)) for g in range(len(pool.groups))]
    found: dict[Usage, list[StageOptions]] = defaultdict(list)
    count = 0

    def extend(prefix: StageOptions, left: list[int]) -> bool:
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
class _StageSequence:
    """A sequence of stages without layers, for micro-batches of ``size`` sequences. ``made``: column index by (layers,
    micro-batches in flight)."""

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
    """Makes the columns of the enumeration. ``skipped``: least seconds of what was left out to limit the effort."""

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.scorer, self.tables, self.pool = scorer, scorer.tables, scorer.pool
        self.model, self.batch, self.space = problem.model, problem.global_batch_size, problem.space
        self.exact, self.best = False, math.inf
        self.skipped = math.inf
        self.simulated = 0
        self._sync = SyncBounds(scorer.bounds, problem.model.num_layers)
        self._tables: dict[tuple[object, ...], tuple[StageTable, list[AffineBound]]] = {}
        self._saved: dict[tuple[int, int, bool, bool], float] = {}

    def columns(self, pipelines: int, best: float, exact: bool) -> dict[Usage, ColumnPool]:
        """Columns by usage for plans of ``pipelines`` pipelines faster than ``best`` seconds: a few by closed form, or
        with ``exact`` all that plans of several pipelines may need."""
        self.best, self.exact = best, exact
        column_pools: dict[Usage, ColumnPool] = {}
        most = self.batch - pipelines + 1
        for size in batch_sizes(self.space, most):
            if pipelines == 1 and self.batch % size:
                continue
            found = sequences(self.pool, self.model, self.space, size, MOST_SEQUENCES)
            assert found is not None
            for usage, rows in found.items():
                if self._too_few_chips_left(usage, pipelines):
                    continue
                for row in sorted(rows, key=len):  # the best usually have few stages
                    for schedule in self.space.schedules:
                        if schedule == "gpipe" and not self._worth_gpipe(row, size):
                            continue
                        if usage not in column_pools:
                            keep = (400 if pipelines == 1 else MOST_KEPT) if self.exact else 6
                            column_pools[usage] = ColumnPool(self.batch, self.exact, keep)
                        self._add_columns(column_pools[usage], row, size, pipelines, most // size, schedule)
        return {usage: column_pool for usage, column_pool in column_pools.items() if column_pool.makers}

    def _too_few_chips_left(self, usage: Usage, pipelines: int) -> bool:
        return sum(self.pool.counts) - sum(usage) < pipelines - 1

    def _worth_gpipe(self, row: StageOptions, size: int) -> bool:
        """Whether transfers take long enough that more micro-batches in flight could pay off; always in the exact pass.
        """
        if self.exact:
            return len(row) > 1
        stages = [StageTemplate(o.group, o.tp, o.dp, 1) for o in row]
        for a, b in zip(stages, stages[1:]):
            link = self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b))
            table = self.tables.table(StageKind(a.group, a.tp, a.dp, size, False, False, 1))
            if max(link) > 0.02 * float(table.forward[1]):
                return True
        return False

    def _add_columns(
        self, column_pool: ColumnPool, row: StageOptions, size: int, pipelines: int, most: int, schedule: str
    ) -> None:
        """Add the best layers of one sequence of stages for every number of micro-batches."""
        stages = [StageTemplate(o.group, o.tp, o.dp) for o in row]
        tables = [self._table(o, s == 0, s == len(row) - 1, size, pipelines, row) for s, o in enumerate(row)]
        links = [
            self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b)) for a, b in zip(stages, stages[1:])
        ]
        counts = [most] if pipelines == 1 else micro_batch_counts(most)
        every = len(counts) == most or pipelines == 1
        sequence = _StageSequence(stages, [t for t, _ in tables], links, size, schedule, pipelines)
        least = self._min_sync_tail(stages, pipelines)
        few = count_splits(self.model.num_layers, len(stages)) <= LISTED
        by_split: dict[tuple[Usage, Usage], list[int]] = defaultdict(list)
        for m in counts:
            alive = in_flight(schedule, len(stages), m)
            if max(alive) > self.tables.depth:
                continue
            slopes = [lines[t.row(k)] for (t, lines), k in zip(tables, alive)]
            low = split_lower_bound(slopes, self.model.num_layers, links, m) + least
            if low >= self.best or not (self.exact or column_pool.takes(m * size, low)):
                continue
            if self.exact and few:
                self._add_exact_columns(column_pool, sequence, m, alive)
                continue
            found = best_split(sequence.seconds(alive), links, m, schedule, sequence.forward)
            if found is None or not (self.exact or column_pool.takes(m * size, found[0] + least)):
                continue
            if found[0] + least < self.best:
                by_split[found[1], alive].append(m)
                if self.exact:
                    self.skipped = min(self.skipped, found[0] + least)
        for (layers, alive), found_at in by_split.items():
            column_pool.add_at(
                self._column(sequence, layers, alive), found_at if every else list(range(1, max(found_at) + 1))
            )

    def _add_exact_columns(self, column_pool: ColumnPool, sequence: _StageSequence, m: int, alive: Usage) -> None:
        """Add all splits of the layers that could beat the best plan, by their exact times."""
        q = m * sequence.size
        for layers, seconds in self._promising(sequence, m, alive):
            if not column_pool.takes(q, seconds):
                break  # the others are slower
            index = sequence.made.get((layers, alive))
            if index is None:
                index = sequence.made[layers, alive] = column_pool.add_lazily(
                    partial(self._column, sequence, layers, alive)
                )
            column_pool.insert(q, seconds, index)

    def _min_sync_tail(self, stages: list[StageTemplate], pipelines: int) -> float:
        last, found = len(stages) - 1, []
        for s, x in enumerate(stages):
            key = (x.group, x.tp, s == 0, s == last)
            if key not in self._saved:
                whole = replace(x, dp=1, layers=self.model.num_layers)
                self._saved[key] = self.scorer.saved_seconds(whole, s == 0, s == last)
            found.append(self._saved[key])
        return (self.scorer.bounds.update_seconds if pipelines > 1 else 0.0) - max(found)

    def _table(
        self, o: StageOption, embed: bool, head: bool, size: int, pipelines: int, row: StageOptions
    ) -> tuple[StageTable, list[AffineBound]]:
        """(table of a stage, affine lower bounds of its rows). For lower bounds, buckets take no memory and the other
        pipelines own as many of the stage's states as they could."""
        replicas = float(pipelines)
        if self.exact and pipelines > 1:
            others = min(self.pool.chips - sum(x.chips for x in row), (pipelines - 1) * self._largest_stage_chips)
            replicas = MANY_REPLICAS if self.space.shares else 1 + others / o.chips
        key = (o, embed, head, size, replicas, self.exact)
        if key not in self._tables:
            kind = StageKind(
                o.group, o.tp, o.dp, size, embed, head, replicas, self.space.recompute, buckets=not self.exact,
            )  # fmt: skip
            table = self.tables.table(kind)
            self._tables[key] = table, [affine_lower_bound(seconds) for seconds in table.seconds]
        return self._tables[key]

    @cached_property
    def _largest_stage_chips(self) -> int:
        most = max(batch_sizes(self.space, self.batch)) if self.space.inner_dp else 1
        sizes = [tp_degrees(self.pool, g, self.model, self.space, True) for g in range(len(self.pool.groups))]
        return max(min(g.chips, max(tps, default=0) * most) for g, tps in zip(self.pool.groups, sizes))

    def _promising(self, sequence: _StageSequence, m: int, alive: Usage) -> Iterator[tuple[Usage, float]]:
        """(layers, exact seconds with the least sync tail) of the splits that are below the best plan, fastest first.
        """
        ways, closed, seconds = listed(sequence.seconds(alive), sequence.links, m, sequence.schedule, sequence.forward)
        good = np.flatnonzero(closed < np.inf)
        ways, closed, seconds = ways[good], closed[good], seconds[good]
        first = np.stack([sequence.forward[i][ways[:, i]] for i in range(len(sequence.stages))], axis=1)
        after = self._sync.sync_tail(sequence.stages, ways, seconds - first, sequence.links, sequence.pipelines)
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

    def _column(self, sequence: _StageSequence, layers: Usage, alive: Usage) -> PipelineColumn:
        made, forward, backward = [], [], []
        for s, (stage, table) in enumerate(zip(sequence.stages, sequence.tables)):
            recompute, first = table.choice(alive[s], layers[s])
            if self.space.recompute is not None:
                recompute, first = self.space.recompute, 0
            made.append(StageTemplate(stage.group, stage.tp, stage.dp, layers[s], recompute, first))
            forward.append(float(table.forward[layers[s]]))
            backward.append(float(table.seconds[table.row(alive[s]), layers[s]]) - forward[-1])
        after = self.scorer.bounds.sync_tail(made, sequence.size, sequence.links, sequence.pipelines)
        shape = PipelineTemplate(sequence.size, tuple(made))
        return PipelineColumn(shape, tuple(forward), tuple(backward), tuple(sequence.links), sequence.schedule, after)


def micro_batch_counts(most: int) -> list[int]:
    """All counts up to 16, then in steps of about one eighth, up to ``most``."""
    found, m = [], 1
    while m < most:
        found.append(m)
        m = max(m + 1, math.ceil(m * 1.125)) if m >= 16 else m + 1
    return [*found, most]
