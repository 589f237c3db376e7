"""Search by complete enumeration, for clusters where that is possible.

Every sequence of stages (group, TP, inner DP) over every number of chips, with the exact best layers and recompute;
every multiset of such pipelines that the cluster has chips for; the exact division of the batch. Combinations are
evaluated exactly in the order of their lower bounds until no bound is below the best value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from hetero_megatron.planner.columns import Column, Shelf, allocate
from hetero_megatron.planner.evaluate import Evaluator, best_recompute
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import Candidate, Part, PipelineShape, StageShape, in_flight
from hetero_megatron.planner.space import Option, Space, batch_sizes, options
from hetero_megatron.planner.split import best_split
from hetero_megatron.planner.tables import Kind, StageTable
from hetero_megatron.spec import ModelSpec

Usage = tuple[int, ...]
Sequence_ = tuple[Option, ...]
MOST_SEQUENCES = 6000
MOST_COMBINATIONS = 20_000


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
        self.bound = math.inf  # least lower bound of all combinations
        self.rejected: dict[str, int] = defaultdict(int)

    def possible(self) -> bool:
        total = 0
        for size in batch_sizes(self.space, self.batch):
            found = sequences(self.pool, self.model, self.space, size, MOST_SEQUENCES)
            if found is None:
                return False
            total += sum(map(len, found.values()))
        limit = MOST_SEQUENCES * (3 if self.model.num_layers <= 16 else 1)
        if total > limit:
            return False
        count = 0
        usages = [u for u in self._usages()]
        for _ in multisets(usages, self.pool.counts, self._most_pipelines()):
            count += 1
            if count > MOST_COMBINATIONS:
                return False
        return True

    def _usages(self) -> list[Usage]:
        found: list[Usage] = [()]
        for n in self.pool.counts:
            found = [(*u, i) for u in found for i in range(n + 1)]
        return [u for u in found if any(u)]

    def _most_pipelines(self) -> int:
        return min(self.batch, self.pool.chips, self.space.max_pipelines or self.pool.chips)

    def run(self) -> bool:
        """True when the whole space was searched; False when ``improve`` asked to stop."""
        shelves = {d: self._shelves(d) for d in range(1, self._most_pipelines() + 1)}
        rows: list[tuple[float, tuple[Usage, ...], tuple[int, ...]]] = []
        for combination in multisets(
            sorted({u for s in shelves.values() for u in s}), self.pool.counts, self._most_pipelines()
        ):
            shelf = shelves[len(combination)]
            if any(u not in shelf for u in combination):
                continue
            found = allocate([shelf[u].times for u in combination], self.batch)
            if found is not None:
                rows.append((found[0], combination, found[1]))
        rows.sort()
        self.bound = rows[0][0] if rows else math.inf
        best = math.inf
        for bound, combination, shares in rows:
            if bound >= best:
                break
            for candidate in self._candidates(combination, shares, shelves[len(combination)]):
                score = self.evaluator.score(candidate)
                if score is None or score.over > 0:
                    self.rejected["memory" if score else "packing"] += 1
                    continue
                best = min(best, score.step_seconds)
                if not self.improve(candidate, score.step_seconds):
                    return False
        return True

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
                        for column, counts in self._columns(row, size, pipelines, most // size, schedule):
                            shelves.setdefault(usage, Shelf(self.batch)).add_at(column, counts)
        return shelves

    def _others_have_none(self, usage: Usage, pipelines: int) -> bool:
        return sum(self.pool.counts) - sum(usage) < pipelines - 1

    def _slow_links(self, row: Sequence_, size: int) -> bool:
        """Whether transfers take long enough that more micro-batches in flight could pay."""
        stages = [StageShape(o.group, o.tp, o.dp, 1) for o in row]
        for a, b in zip(stages, stages[1:]):
            link = self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b))
            table = self.tables.table(Kind(a.group, a.tp, a.dp, size, False, False, 1))
            if link > 0.02 * float(table.forward[1]):
                return True
        return False

    def _columns(
        self, row: Sequence_, size: int, pipelines: int, most: int, schedule: str
    ) -> Iterator[tuple[Column, list[int]]]:
        """Best layers of one sequence of stages, for every number of micro-batches that can be asked for."""
        stages = [StageShape(o.group, o.tp, o.dp) for o in row]
        last = len(stages) - 1
        tables = [
            self.tables.table(Kind(o.group, o.tp, o.dp, size, s == 0, s == last, pipelines, self.space.recompute))
            for s, o in enumerate(row)
        ]
        links = [
            self.tables.boundary(a, b, size, self.tables.likely_same_node(a, b)) for a, b in zip(stages, stages[1:])
        ]
        counts = [most] if pipelines == 1 else _anchors(most)
        by_split: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
        for m in counts:
            alive = in_flight(schedule, len(stages), m)
            if max(alive) > self.tables.depth:
                continue
            times = [t.seconds[t.row(k)] for t, k in zip(tables, alive)]
            found = best_split(times, links, m, schedule, [t.forward for t in tables])
            if found is not None:
                by_split[found[1], alive].append(m)
        for (layers, alive), found_at in by_split.items():
            column = self._column(stages, tables, layers, alive, size, links, schedule, pipelines)
            yield column, found_at if len(counts) == most or pipelines == 1 else list(range(1, max(found_at) + 1))

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
    ) -> Iterator[Candidate]:
        """The best columns of each pipeline for its share, under each schedule and order of placement."""
        for schedule in self.space.schedules:
            parts = []
            for usage, q in zip(combination, shares):
                best: tuple[float, PipelineShape, int] | None = None
                for _, index in shelves[usage].best[q]:
                    shape: PipelineShape | None = shelves[usage].columns[index].shape
                    assert shape is not None
                    m = q // shape.micro_batch_size
                    if self.space.recompute is None:
                        shape = best_recompute(self.tables, shape, schedule, m, len(combination))
                    if shape is None:
                        continue
                    column = shelves[usage].columns[index]
                    time = self.evaluator.pipeline_seconds(shape, m, schedule) + column.after
                    if best is None or time < best[0]:
                        best = (time, shape, m)
                if best is None:
                    break
                parts.append(Part(best[1], 1, best[2]))
            else:
                for order in ("stage", "pipeline") if len(parts) > 1 else ("stage",):
                    yield Candidate(tuple(parts), schedule, order).merged()


def _anchors(most: int) -> list[int]:
    """All counts up to 16, then about every eighth part."""
    found, m = [], 1
    while m < most:
        found.append(m)
        m = max(m + 1, math.ceil(m * 1.125)) if m >= 16 else m + 1
    return [*found, most]
