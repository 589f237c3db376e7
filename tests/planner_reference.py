"""Exhaustive search over plans of small clusters, and random clusters to search.

Written apart from the planner's search: nested loops over everything, nothing clever but cuts that cannot lose a better
plan. A plan is skipped when one of its stages alone, doing all its micro-batches, or one of its pipelines takes as long
as the best plan known (synchronisation only adds). Of a stage's recompute levels only the fastest that fits is tried
(all times grow with a stage's); before the other pipelines are known, the fastest that would fit if optimizer states
were divided among all chips and buckets took no memory, which is never slower.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.planner.evaluate import Evaluator, Score
from hetero_megatron.planner.search import SearchOptions, judge
from hetero_megatron.planner.shape import Candidate, Part, PipelineShape, StageShape, in_flight
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import parameter_count

GIB = 2**30
Usage = tuple[int, ...]
Row = tuple[float, PipelineShape, int]  # seconds, shape, micro-batches


@dataclass(frozen=True)
class Case:
    """One planning problem; ``size``/``recompute``: fixed, or None for open."""

    model: ModelSpec
    cluster: Cluster
    seq_length: int
    batch: int
    size: int | None = None
    recompute: str | None = None


def random_case(seed: int, kind: str) -> Case:
    """``open``: up to 4 chips of 1-3 types, every choice open; ``fixed``: 2 + 2 + 2 chips, micro-batch 1, no
    recompute."""
    rng = random.Random(f"{kind}{seed}")
    layers = rng.randint(3, 5) if kind == "open" else rng.randint(3, 4)
    hidden = rng.choice([1024, 2048, 4096])
    model = ModelSpec(
        "small", "llama", layers, hidden, rng.choice([2, 3]) * hidden, hidden // 128, hidden // 128, 128,
        rng.choice([8000, 32000]), 8192,
    )  # fmt: skip
    if kind == "open":
        sizes = rng.choice([[1, 1], [2, 1], [1, 2], [2, 2], [1, 1, 1], [1, 1, 2], [3, 1], [3], [4], [1, 3], [2]])
    else:
        sizes = [2, 2, 2]
    state = 18 * parameter_count(model)
    nodes, chips = [], {}
    speed = rng.uniform(50, 400)
    for i, count in enumerate(sizes):
        per_node = rng.choice([1, count]) if count < 3 else count
        nodes.append({"name": f"n{i}", "chip": f"c{i}", "count": count // per_node, "chips_per_node": per_node})
        memory = GIB + state * rng.choice([0.35, 0.6, 0.9, 1.3, 2.5]) / rng.choice([1, 1, sum(sizes) / 2])
        chips[f"c{i}"] = {
            "memory": f"{int(memory)} B", "tflops": {"bf16": speed * rng.choice([1, 1.5, 2, 3])},
            "memory_bandwidth": f"{rng.choice([0.6, 1, 2])} TB/s",
            "link_bandwidth": f"{rng.choice([20, 100, 300])} GB/s", "dtypes": ["bf16"],
        }  # fmt: skip
    links = {"inter_node": {"bandwidth": f"{rng.choice([1, 5, 25, 100])} GB/s", "latency": "10 us"}}
    cluster = cluster_from_dict({"nodes": nodes, "chips": chips, "links": links})
    batch = rng.choice([4, 6, 8]) if kind == "open" else 4
    return Case(model, cluster, rng.choice([1024, 2048]), batch, *((None, None) if kind == "open" else (1, "none")))


class Exhaustive:
    """The best plan of a case by trying all of them, but none that is not below ``best`` to begin with.

    ``exact``: plans must fit with the optimizer states where they are placed, not only by their mean, as plans that the
    search returns do.
    """

    def __init__(self, case: Case, evaluator: Evaluator, best: float, exact: bool = True) -> None:
        self.case, self.evaluator, self.best, self.exact = case, evaluator, best, exact
        self.counts = evaluator.pool.counts
        self.found: Candidate | None = None
        self.tried = 0
        self.fixed = min(evaluator.costs.chip_rates(g.chip).step_seconds for g in evaluator.pool.groups)
        self._afters: dict[Any, float] = {}
        self._least: dict[Any, tuple[float, StageShape | None]] = {}

    def run(self) -> float:
        everything = [u for u in itertools.product(*(range(n + 1) for n in self.counts)) if any(u)]
        for schedule in ("1f1b", "gpipe"):
            tables = {u: self._pipelines(u, schedule) for u in everything}
            for d in range(1, min(self.case.batch, sum(self.counts)) + 1):
                for usages in itertools.combinations_with_replacement(everything, d):
                    if all(sum(u[g] for u in usages) <= n for g, n in enumerate(self.counts)):
                        self._combine(usages, tables, schedule)
        return self.best

    def _pipelines(self, usage: Usage, schedule: str) -> dict[int, list[Row]]:
        """By number of sequences: every pipeline on exactly these chips that could end in time."""
        found: dict[int, list[Row]] = {}
        batch, alone = self.case.batch, sum(self.counts) == sum(usage)
        sizes = [self.case.size] if self.case.size else [b for b in (1, 2, 3, 4, 8) if b <= batch]
        for size in sizes:
            few = batch // size if alone else 1  # a pipeline on all chips computes the whole batch
            if alone and batch % size:
                continue
            for stages in self._stages(usage, size):
                for layers in self._layers(stages, size, few):
                    shape = PipelineShape(size, tuple(replace(s, layers=n) for s, n in zip(stages, layers)))
                    for m in range(few, batch // size + 1):
                        seconds = self._time(shape, m, schedule)
                        if seconds + self.fixed >= self.best and m > 1:
                            break  # more micro-batches take longer
                        if seconds + self.fixed < self.best:
                            found.setdefault(m * size, []).append((seconds, shape, m))
        for rows in found.values():
            rows.sort(key=lambda row: row[0])
        return found

    def _time(self, shape: PipelineShape, m: int, schedule: str) -> float:
        """Of a pipeline with the least recompute that could ever fit; inf if none could."""
        alive = in_flight(schedule, len(shape.stages), m)
        last = len(shape.stages) - 1
        slowest, made = 0.0, []
        for s, stage in enumerate(shape.stages):
            seconds, fitting = self._stage(stage, shape.micro_batch_size, s == 0, s == last, alive[s])
            slowest = max(slowest, seconds)
            made.append(fitting)
        if m * slowest + self.fixed >= self.best:
            return m * slowest
        fitting_shape = PipelineShape(shape.micro_batch_size, tuple(x for x in made if x is not None))
        return self.evaluator.pipeline_seconds(fitting_shape, m, schedule)

    def _stage(
        self, stage: StageShape, size: int, embed: bool, head: bool, alive: int
    ) -> tuple[float, StageShape | None]:
        """(seconds of a micro-batch, the stage) with the fastest recompute that could ever fit; inf if none could."""
        key = (stage, size, embed, head, alive)
        if key not in self._least:
            costs, best = self.evaluator.costs, (math.inf, None)
            for made in self._levels(stage):
                choice = self.evaluator.tables.choice(made, embed, head)
                needs = costs.memory_bytes(choice, size, alive, sum(self.counts))
                state = needs.overhead + needs.weights + needs.gradients + needs.optimizer
                if state + needs.activations <= costs.memory_limit(choice.chip):
                    seconds = costs.forward_seconds(choice, size) + costs.backward_seconds(choice, size)
                    best = min(best, (seconds, made), key=lambda row: row[0])
            self._least[key] = best
        return self._least[key]

    def _after(self, shape: PipelineShape, pipelines: int) -> float:
        """Least seconds of what follows a pipeline in a plan of so many; tests check that it is never too much."""
        key = (shape, pipelines)
        if key not in self._afters:
            links = [0.0] * (len(shape.stages) - 1)
            self._afters[key] = self.evaluator.least_after(shape.stages, shape.micro_batch_size, links, pipelines)
        return self._afters[key]

    def _levels(self, stage: StageShape) -> list[StageShape]:
        levels = [("none", 0), ("selective", 0), *(("first", n) for n in range(1, stage.layers)), ("full", 0)]
        if self.case.recompute is not None:
            levels = [(self.case.recompute, 0)]
        return [replace(stage, recompute=recompute, first=first) for recompute, first in levels]

    def _stages(self, usage: Usage, size: int) -> Iterator[tuple[StageShape, ...]]:
        if not any(usage):
            yield ()
            return
        for g, left in enumerate(usage):
            node = self.evaluator.pool.groups[g].per_node
            for tp in range(1, left + 1):
                if self.case.model.num_heads < tp or (tp > node and (tp % node or (tp // node) & (tp // node - 1))):
                    continue
                for dp in range(1, left // tp + 1):
                    if size % dp:
                        continue
                    rest = tuple(n - tp * dp * (h == g) for h, n in enumerate(usage))
                    for others in self._stages(rest, size):
                        yield (StageShape(g, tp, dp), *others)

    def _layers(self, stages: tuple[StageShape, ...], size: int, m: int) -> Iterator[tuple[int, ...]]:
        """All layers of the stages, none of which alone takes too long for ``m`` micro-batches."""
        total, last = self.case.model.num_layers, len(stages) - 1

        def extend(s: int, left: int, prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            for n in range(left + 1) if s < last else (left,):
                if n == 0 and 0 < s < last:
                    continue
                seconds, _ = self._stage(replace(stages[s], layers=n), size, s == 0, s == last, 1)
                if m * seconds + self.fixed >= self.best:
                    continue
                if s == last:
                    yield (*prefix, n)
                else:
                    yield from extend(s + 1, left - n, (*prefix, n))

        yield from extend(0, total, ())

    def _combine(self, usages: tuple[Usage, ...], tables: dict[Usage, Any], schedule: str) -> None:
        def extend(i: int, left: int, parts: tuple[Part, ...]) -> None:
            if i == len(usages):
                if left == 0:
                    self._try(Candidate(parts, schedule))
                return
            rest = len(usages) - i - 1
            for q, rows in tables[usages[i]].items():
                if q > left - rest or (rest == 0 and q != left):
                    continue
                for seconds, shape, m in rows:
                    if seconds + self.fixed >= self.best:
                        break
                    if seconds + self._after(shape, len(usages)) >= self.best:
                        continue
                    extend(i + 1, left - q, (*parts, Part(shape, 1, m)))

        extend(0, self.case.batch, ())

    def _try(self, candidate: Candidate) -> None:
        fitting = self._recomputed(candidate)
        if fitting is None:
            return
        for order in ("stage", "pipeline") if len(fitting.parts) > 1 else ("stage",):
            self.tried += 1
            score: Score | None = self.evaluator.score(replace(fitting, order=order))
            if score is None or score.over > 0 or score.step_seconds >= self.best:
                continue
            if not self.exact or self._fits(replace(fitting, order=order)):
                self.best, self.found = score.step_seconds, replace(fitting, order=order)

    def _fits(self, candidate: Candidate) -> bool:
        case, evaluator = self.case, self.evaluator
        row = [(0.0, 0, candidate)]
        return bool(judge(row, case.cluster, case.model, case.seq_length, SearchOptions(), evaluator))

    def _recomputed(self, candidate: Candidate) -> Candidate | None:
        """The fastest recompute of each stage that fits; None where none does."""
        copies: dict[int, int] = {}
        for part in candidate.parts:
            at = 0
            for stage in part.shape.stages:
                for layer in range(at, at + stage.layers):
                    copies[layer] = copies.get(layer, 0) + stage.dp
                at += stage.layers
        parts = []
        for part in candidate.parts:
            alive = in_flight(candidate.schedule, len(part.shape.stages), part.num_micro_batches)
            stages, at = [], 0
            for s, stage in enumerate(part.shape.stages):
                own = sum(stage.dp / copies[layer] for layer in range(at, at + stage.layers))
                replicas = stage.layers / own if stage.layers else float(len(candidate.parts))
                chosen = self._fastest(stage, part.shape, s, alive[s], replicas)
                if chosen is None:
                    return None
                stages.append(chosen)
                at += stage.layers
            parts.append(replace(part, shape=PipelineShape(part.shape.micro_batch_size, tuple(stages))))
        return replace(candidate, parts=tuple(parts))

    def _fastest(
        self, stage: StageShape, shape: PipelineShape, s: int, alive: int, replicas: float
    ) -> StageShape | None:
        tables, costs = self.evaluator.tables, self.evaluator.costs
        best: tuple[float, StageShape] | None = None
        for made in self._levels(stage):
            choice = tables.choice(made, s == 0, s == len(shape.stages) - 1)
            needs = costs.memory_bytes(choice, shape.micro_batch_size, alive, replicas).total  # type: ignore[arg-type]
            if needs > costs.memory_limit(choice.chip):
                continue
            seconds = costs.backward_seconds(choice, shape.micro_batch_size)
            if best is None or seconds < best[0]:
                best = (seconds, made)
        return best[1] if best else None
