"""Search by complete enumeration, for clusters where that is possible.

Every sequence of stages (group, TP, inner DP) over every number of chips, with the exact best layers and recompute;
every multiset of such pipelines that the cluster has chips for; every division of the batch. Combinations are
evaluated exactly in the order of their lower bounds until no bound is below the best value. Lower bounds count with the
most ranks that could share a stage's optimizer states; what is evaluated has the recompute that fits with states where
the runtime will place them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hetero_megatron.planner.columns import Column, Shelf, allocate
from hetero_megatron.planner.evaluate import Evaluator, best_recompute
from hetero_megatron.planner.fitting import Fitting
from hetero_megatron.planner.place import Placed, place
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import Candidate, Part, PipelineShape, StageShape, in_flight
from hetero_megatron.planner.space import Option, Space, batch_sizes, options, tp_degrees
from hetero_megatron.planner.split import LISTED, Floats, best_split, count_splits, listed
from hetero_megatron.planner.tables import NEARLY_NONE, Kind, StageTable
from hetero_megatron.planner.timing import many
from hetero_megatron.planner.together import least_dropped, ways_together
from hetero_megatron.spec import ModelSpec

Usage = tuple[int, ...]
Sequence_ = tuple[Option, ...]
MOST_CHIPS = 24  # above, not even worth counting
MOST_SEQUENCES = 6000
MOST_COMBINATIONS = 20_000
MOST_WORK = 8_000_000  # sequences x splits of layers x numbers of micro-batches
MOST_SIMULATED = 4_000_000  # splits x micro-batches that are timed exactly
MOST_SPLITS = 400  # of one sequence of stages that are kept
MOST_KEPT = 24  # columns per usage and number of sequences, where several pipelines are combined
MOST_WAYS = 4000  # of one combination that are listed
MOST_LISTED = 200_000  # of all combinations
MOST_FITTED = 300  # placements whose states are counted exactly


def sequences(pool: Pool, model: ModelSpec, space: Space, size: int, most: int) -> dict[Usage, list[Sequence_]] | None:
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


def multisets(usages: Sequence[Usage], counts: Usage, most: int) -> Iterator[tuple[Usage, ...]]:
    """All non-empty multisets of usages whose sum is within ``counts``, of at most ``most`` pipelines."""

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


class SmallSearch:
    """See the module docstring. ``best``/``value``: the best candidate so far and its step seconds."""

    def __init__(
        self,
        evaluator: Evaluator,
        model: ModelSpec,
        batch: int,
        space: Space,
        improve: Callable[[Candidate, float], bool],
    ) -> None:
        self.evaluator, self.tables, self.pool = evaluator, evaluator.tables, evaluator.pool
        self.model, self.batch, self.space, self.improve = model, batch, space, improve
        self.bound = 0.0  # no plan of the space is faster
        self.best = math.inf
        self.exact = False
        self.skipped = math.inf  # least closed form that was not looked into, for want of effort
        self.simulated = self.listed = 0
        self.fitting = Fitting(evaluator, space.recompute, space.shares)
        self.rejected: dict[str, int] = defaultdict(int)

    def possible(self) -> bool:
        if self.pool.chips > MOST_CHIPS:
            return False
        total = work = 0
        for size in batch_sizes(self.space, self.batch):
            found = sequences(self.pool, self.model, self.space, size, MOST_SEQUENCES)
            if found is None:
                return False
            total += sum(map(len, found.values()))
            shares = len(_anchors(max(1, self.batch // size)))
            for rows in found.values():
                work += shares * sum(min(LISTED, count_splits(self.model.num_layers, len(row))) for row in rows)
        if work > MOST_WORK:
            return False
        limit = MOST_SEQUENCES * (3 if self.model.num_layers <= 16 else 1)
        if total > limit:
            return False
        combinations = multisets(self._usages(), self.pool.counts, self._most_pipelines())
        return all(i < MOST_COMBINATIONS for i, _ in enumerate(combinations))

    def _usages(self) -> list[Usage]:
        found: list[Usage] = [()]
        for n in self.pool.counts:
            found = [(*u, i) for u in found for i in range(n + 1)]
        return [u for u in found if any(u)]

    def _most_pipelines(self) -> int:
        return min(self.batch, self.pool.chips, self.space.max_pipelines or self.pool.chips)

    def run(self) -> bool:
        """True when the whole space was searched; False when ``improve`` asked to stop.

        First with the best layers by closed form only, which gives a good plan; then with all that could beat it.
        """
        for exact in (False, True):
            self.exact = exact
            if not self._pass():
                return False
        return True

    def _pass(self) -> bool:
        counts = range(1, self._most_pipelines() + 1)
        shelves = {d: self._shelves(d) for d in counts}
        rows: list[tuple[float, tuple[Usage, ...], tuple[int, ...]]] = []
        usages = sorted({u for s in shelves.values() for u in s})
        for combination in multisets(usages, self.pool.counts, self._most_pipelines()):
            shelf = shelves[len(combination)]
            if any(u not in shelf for u in combination):
                continue
            found = allocate([shelf[u].times for u in combination], self.batch)
            if found is not None:
                rows.append((found[0], combination, found[1]))
        rows.sort()
        left = math.inf  # least time of what was not gone through
        for bound, combination, shares in rows:
            if bound >= self.best:
                break
            shelf = shelves[len(combination)]
            rest: float | None
            if self.exact and len(combination) > 1:
                rest = self._together(combination, shelf, bound)
            else:
                rest = self._best_of(combination, shares, shelf, bound)
            if rest is None:
                return False
            left = min(left, rest)
        if self.exact or not rows:
            # What was left out takes at least as long as the best plan.
            self.bound = min(self.best, self.skipped, left)
        return True

    def _best_of(
        self, combination: tuple[Usage, ...], shares: tuple[int, ...], shelf: dict[Usage, Shelf], bound: float
    ) -> float | None:
        """Try the best columns for one division of the batch; returns the least time of what was left out, None to
        stop."""
        # All that one pipeline can be is tried, so only what its shelf did not keep is left of the combination.
        rest = float(shelf[combination[0]].cut[self.batch]) if len(combination) == 1 else bound
        for least, candidate in self._candidates(combination, shares, shelf):
            placed = place(candidate, self.pool)
            if placed is None:
                self.rejected["packing"] += 1
                rest = min(rest, least)  # in other nodes it may pack
            elif not self._try(placed)[1]:
                return None
        return rest

    def _together(self, combination: tuple[Usage, ...], shelf: dict[Usage, Shelf], bound: float) -> float | None:
        """Try all that several pipelines can be and any division of the batch, as :meth:`_best_of` does."""
        shelves = [shelf[u] for u in combination]
        rest = max(bound, least_dropped([s.times for s in shelves], [s.cut for s in shelves], self.batch))
        for schedule in self.space.schedules:
            rows = [self._rows(s, schedule) for s in shelves]
            if not all(rows) or (schedule != self.space.schedules[0] and not self._several_stages(rows, shelves)):
                continue
            if self.listed >= MOST_LISTED or self.fitting.computed >= MOST_FITTED:
                return bound
            ways, limit = ways_together(rows, self.batch, bound, self.best, MOST_WAYS)
            self.listed += len(ways)
            rest = min(rest, limit)
            for least, way in ways:
                if least >= self.best:
                    break
                if self.fitting.computed >= MOST_FITTED:
                    rest = min(rest, least)
                    break
                columns = [s.columns[index] for s, (_, index) in zip(shelves, way)]
                parts = tuple(Part(c.shape, 1, q // c.shape.micro_batch_size) for c, (q, _) in zip(columns, way))
                tried = None
                for order in ("stage", "pipeline"):
                    placed = place(Candidate(parts, schedule, order), self.pool)
                    if placed is None:
                        rest = min(rest, least)
                    elif tried is None or placed.pipelines != tried.pipelines:
                        fitted, go_on = self._try(placed)
                        rest = min(rest, max(least, fitted))
                        if not go_on:
                            return None
                        tried = placed
        return rest

    def _rows(self, shelf: Shelf, schedule: str) -> dict[int, list[tuple[float, int]]]:
        """By number of sequences, the columns of a schedule that are below the best; one stage alone is the same in
        all."""
        found = {}
        for q, row in enumerate(shelf.best):
            few = [
                (seconds, i) for seconds, i in row
                if seconds < self.best and schedule in (shelf.columns[i].schedule, *self._any(shelf.columns[i]))
            ]  # fmt: skip
            if few:
                found[q] = few
        return found

    def _any(self, column: Column) -> tuple[str, ...]:
        return self.space.schedules if len(column.shape.stages) == 1 else ()

    def _several_stages(self, rows: list[dict[int, list[tuple[float, int]]]], shelves: list[Shelf]) -> bool:
        return any(
            len(shelf.columns[i].shape.stages) > 1
            for by_q, shelf in zip(rows, shelves) for row in by_q.values() for _, i in row
        )  # fmt: skip

    def _try(self, placed: Placed) -> tuple[float, bool]:
        """(least seconds of ways to fit the candidate that were not tried, inf if there are none; whether to go on)."""
        fits, other = self.fitting.fits(placed)
        least = math.inf if other is None else self._least(other)
        for found in fits:
            if self._least(found) >= self.best:
                continue
            score = self.evaluator.score(found)
            assert score is not None, "it was placed a moment ago"
            self.best = min(self.best, score.step_seconds)
            if not self.improve(found.joined(), score.step_seconds):
                return least, False
        self.rejected["memory"] += not fits
        return least, True

    def _least(self, candidate: Candidate) -> float:
        """Lower bound on the step time, over the best links that the stages could have."""
        worst = 0.0
        for part in candidate.parts:
            shape, m = part.shape, part.num_micro_batches
            links = self.evaluator.links(shape)
            after = self.evaluator.least_after(shape.stages, shape.micro_batch_size, links, candidate.pipelines)
            worst = max(worst, after + self.evaluator.pipeline_seconds(shape, m, candidate.schedule))
        return worst

    def _shelves(self, pipelines: int) -> dict[Usage, Shelf]:
        """Columns by usage, for plans of ``pipelines`` pipelines."""
        shelves: dict[Usage, Shelf] = {}
        most = self.batch - pipelines + 1
        for size in batch_sizes(self.space, most):
            if pipelines == 1 and self.batch % size:
                continue
            found = sequences(self.pool, self.model, self.space, size, MOST_SEQUENCES)
            assert found is not None
            for usage, rows in found.items():
                if self._others_have_none(usage, pipelines):
                    continue
                for row in rows:
                    for schedule in self.space.schedules:
                        if schedule == "gpipe" and not self._slow_links(row, size):
                            continue
                        if usage not in shelves:
                            keep = 400 if pipelines == 1 else MOST_KEPT if self.exact else 6
                            shelves[usage] = Shelf(self.batch, self.exact, keep)
                        shelf = shelves[usage]
                        for column, counts in self._columns(row, size, pipelines, most // size, schedule, shelf):
                            shelf.add_at(column, counts)
        return {usage: shelf for usage, shelf in shelves.items() if shelf.columns}

    def _others_have_none(self, usage: Usage, pipelines: int) -> bool:
        return sum(self.pool.counts) - sum(usage) < pipelines - 1

    def _slow_links(self, row: Sequence_, size: int) -> bool:
        """Whether transfers take long enough that more micro-batches in flight could pay; in the last pass any."""
        if self.exact:
            return len(row) > 1
        stages = [StageShape(o.group, o.tp, o.dp, 1) for o in row]
        for a, b in zip(stages, stages[1:]):
            link = self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b))
            table = self.tables.table(Kind(a.group, a.tp, a.dp, size, False, False, 1))
            if link > 0.02 * float(table.forward[1]):
                return True
        return False

    def _columns(
        self, row: Sequence_, size: int, pipelines: int, most: int, schedule: str, shelf: Shelf
    ) -> Iterator[tuple[Column, list[int]]]:
        """Best layers of one sequence of stages, for every number of micro-batches that can be asked for."""
        stages = [StageShape(o.group, o.tp, o.dp) for o in row]
        tables = [self.tables.table(self._kind(row, s, size, pipelines)) for s in range(len(row))]
        links = [
            self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b)) for a, b in zip(stages, stages[1:])
        ]
        counts = [most] if pipelines == 1 else _anchors(most)
        every = len(counts) == most or pipelines == 1
        forward = [t.forward for t in tables]
        whole = [replace(x, layers=self.model.num_layers) for x in stages]
        # Of what follows only this is known before the layers are.
        least = (self.evaluator.least_update if pipelines > 1 else 0.0) - max(
            self.evaluator.saved_seconds(x, s == 0, s == len(row) - 1) for s, x in enumerate(whole)
        )
        by_split: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
        for m in counts:
            alive = in_flight(schedule, len(stages), m)
            if max(alive) > self.tables.depth:
                continue
            times = [t.seconds[t.row(k)] for t, k in zip(tables, alive)]
            if self.exact and count_splits(self.model.num_layers, len(stages)) <= LISTED:
                for split, taken in self._promising(times, forward, links, m, schedule, self.best - least):
                    if shelf.takes(m * size, taken + least):
                        by_split[split, alive].append(m)
                continue
            found = best_split(times, links, m, schedule, forward)
            if found is not None and found[0] < self.best:
                by_split[found[1], alive].append(m)
                if self.exact:
                    self.skipped = min(self.skipped, found[0])
        for (layers, alive), found_at in by_split.items():
            column = self._column(stages, tables, layers, alive, size, links, schedule, pipelines)
            yield column, found_at if every else list(range(1, max(found_at) + 1))

    def _kind(self, row: Sequence_, s: int, size: int, pipelines: int) -> Kind:
        """Of a stage; for lower bounds buckets take no memory, and of several pipelines the others may own its states,
        or as many of them as there can be."""
        o, replicas = row[s], float(pipelines)
        if self.exact and pipelines > 1:
            others = min(self.pool.chips - sum(x.chips for x in row), (pipelines - 1) * self._widest)
            replicas = NEARLY_NONE if self.space.shares else 1 + others / o.chips
        return Kind(
            o.group, o.tp, o.dp, size, s == 0, s == len(row) - 1, replicas, self.space.recompute,
            buckets=not self.exact,
        )  # fmt: skip

    @cached_property
    def _widest(self) -> int:
        """Chips of the largest stage that there can be."""
        most = max(batch_sizes(self.space, self.batch)) if self.space.inner_dp else 1
        sizes = [tp_degrees(self.pool, g, self.model, self.space, True) for g in range(len(self.pool.groups))]
        return max(min(g.chips, max(tps, default=0) * most) for g, tps in zip(self.pool.groups, sizes))

    def _promising(
        self, times: list[Floats], forward: list[Floats], links: list[float], m: int, schedule: str, limit: float
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """The splits whose exact time is below ``limit``, and that time; fastest first."""
        ways, closed, seconds = listed(times, links, m, schedule, forward)
        good = np.flatnonzero(closed < limit)
        if not len(good):
            return
        if self.simulated > MOST_SIMULATED:
            self.skipped = min(self.skipped, float(closed.min()))
            yield tuple(int(x) for x in ways[int(np.argmin(closed))]), float(closed.min())
            return
        self.simulated += len(good) * m
        first = np.stack([forward[i][ways[good, i]] for i in range(len(times))], axis=1)
        exact = many(first, seconds[good] - first, links, m, schedule)
        order = np.argsort(exact, kind="stable")
        order = order[: int(np.searchsorted(exact[order], limit))]
        for i in order[:MOST_SPLITS]:
            yield tuple(int(x) for x in ways[good[i]]), float(exact[i])
        if len(order) > MOST_SPLITS:
            self.skipped = min(self.skipped, float(exact[order[MOST_SPLITS]]))

    def _column(
        self,
        stages: list[StageShape],
        tables: Sequence[StageTable],
        layers: tuple[int, ...],
        alive: tuple[int, ...],
        size: int,
        links: list[float],
        schedule: str,
        pipelines: int,
    ) -> Column:
        made, forward, backward = [], [], []
        for s, (stage, table) in enumerate(zip(stages, tables)):
            recompute, first = table.choice(alive[s], layers[s])
            if self.space.recompute is not None:
                recompute, first = self.space.recompute, 0
            made.append(StageShape(stage.group, stage.tp, stage.dp, layers[s], recompute, first))
            forward.append(float(table.forward[layers[s]]))
            backward.append(float(table.seconds[table.row(alive[s]), layers[s]]) - forward[-1])
        after = self.evaluator.least_after(made, size, links, pipelines)
        shape = PipelineShape(size, tuple(made))
        return Column(shape, tuple(forward), tuple(backward), tuple(links), schedule, after)

    def _candidates(
        self, combination: tuple[Usage, ...], shares: tuple[int, ...], shelves: dict[Usage, Shelf]
    ) -> Iterator[tuple[float, Candidate]]:
        """(lower bound, plan) of one combination: the best columns of each pipeline for its share; of a single pipeline
        all that could be best, of several the first two each."""
        for schedule in self.space.schedules:
            choices = []
            for usage, q in zip(combination, shares):
                found = self._shapes(shelves[usage], q, schedule, len(combination))
                choices.append(found if len(combination) == 1 else found[:2])
            for row in itertools.islice(itertools.product(*choices), 400 if len(choices) == 1 else 8):
                if row[0][0] >= self.best:
                    continue
                parts = tuple(Part(shape, 1, m) for _, shape, m in row)
                for order in ("stage", "pipeline") if len(parts) > 1 else ("stage",):
                    yield max(seconds for seconds, _, _ in row), Candidate(parts, schedule, order)

    def _shapes(self, shelf: Shelf, q: int, schedule: str, pipelines: int) -> list[tuple[float, PipelineShape, int]]:
        """(seconds, shape, micro-batches) of the columns for ``q`` sequences, fastest first."""
        found = []
        for _, index in shelf.best[q]:
            column = shelf.columns[index]
            shape: PipelineShape | None = column.shape
            m = q // column.shape.micro_batch_size
            if self.space.recompute is None and not self.exact:
                shape = best_recompute(self.tables, column.shape, schedule, m, pipelines)
            if shape is not None:
                found.append((self.evaluator.pipeline_seconds(shape, m, schedule) + column.after, shape, m))
        return sorted(found, key=lambda row: row[0])


def _anchors(most: int) -> list[int]:
    """All counts up to 16, then about every eighth part."""
    found, m = [], 1
    while m < most:
        found.append(m)
        m = max(m + 1, math.ceil(m * 1.125)) if m >= 16 else m + 1
    return [*found, most]
