"""Exhaustive search over plans of small clusters, and random clusters to search.

Written apart from the planner's search: nested loops over everything, nothing clever but two cuts that cannot lose a
better plan. A plan whose slowest pipeline alone takes as long as the best plan known is skipped (synchronisation only
adds), and of a stage's recompute levels only the fastest that fits is tried (all times grow with a stage's).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.planner.evaluate import Evaluator, Score
from hetero_megatron.planner.shape import Candidate, Part, PipelineShape, StageShape, in_flight
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import parameter_count

GIB = 2**30
Usage = tuple[int, ...]


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
    """The best plan of a case by trying all of them, but none that is not below ``best`` to begin with."""

    def __init__(self, case: Case, evaluator: Evaluator, best: float) -> None:
        self.case, self.evaluator, self.best = case, evaluator, best
        self.counts = evaluator.pool.counts
        self.found: Candidate | None = None
        self.tried = 0
        self.fixed = min(evaluator.costs.chip_rates(g.chip).step_seconds for g in evaluator.pool.groups)
        self._seconds: dict[Any, float] = {}

    def run(self) -> float:
        everything = [u for u in itertools.product(*(range(n + 1) for n in self.counts)) if any(u)]
        for schedule in ("1f1b", "gpipe"):
            for d in range(1, min(self.case.batch, sum(self.counts)) + 1):
                tables = {u: self._pipelines(u, schedule, d) for u in everything}
                for usages in itertools.combinations_with_replacement(everything, d):
                    if all(sum(u[g] for u in usages) <= n for g, n in enumerate(self.counts)):
                        self._combine(usages, tables, schedule)
        return self.best

    def _pipelines(self, usage: Usage, schedule: str, d: int) -> dict[int, list[tuple[float, PipelineShape, int]]]:
        """By number of sequences: every pipeline on exactly these chips that ends in time."""
        found: dict[int, list[tuple[float, PipelineShape, int]]] = {}
        most = self.case.batch - d + 1
        sizes = [self.case.size] if self.case.size else [b for b in (1, 2, 3, 4, 8) if b <= most]
        for size in sizes:
            for stages in self._stages(usage, size):
                for layers in self._layers(len(stages)):
                    shape = PipelineShape(size, tuple(replace(s, layers=n) for s, n in zip(stages, layers)))
                    for m in range(1, most // size + 1):
                        if d == 1 and m * size != self.case.batch:
                            continue
                        seconds = self._time(shape, m, schedule)
                        if seconds + self.fixed < self.best:
                            found.setdefault(m * size, []).append((seconds, shape, m))
        for rows in found.values():
            rows.sort(key=lambda row: row[0])
        return found

    def _time(self, shape: PipelineShape, m: int, schedule: str) -> float:
        key = (shape, m, schedule)
        if key not in self._seconds:
            self._seconds[key] = self.evaluator.pipeline_seconds(shape, m, schedule)
        return self._seconds[key]

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

    def _layers(self, count: int) -> Iterator[tuple[int, ...]]:
        total = self.case.model.num_layers
        if count == 1:
            yield (total,)
            return
        for cut in itertools.combinations_with_replacement(range(total + 1), count - 1):
            layers = tuple(b - a for a, b in zip((0, *cut), (*cut, total)))
            if all(layers[1:-1]):
                yield layers

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
                    extend(i + 1, left - q, (*parts, Part(shape, 1, m)))

        extend(0, self.case.batch, ())

    def _try(self, candidate: Candidate) -> None:
        fitting = self._recomputed(candidate)
        if fitting is None:
            return
        for order in ("stage", "pipeline") if len(fitting.parts) > 1 else ("stage",):
            self.tried += 1
            score: Score | None = self.evaluator.score(replace(fitting, order=order))
            if score is not None and score.over == 0 and score.step_seconds < self.best:
                self.best, self.found = score.step_seconds, replace(fitting, order=order)

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
        levels = [("none", 0), ("selective", 0), *(("first", n) for n in range(1, stage.layers)), ("full", 0)]
        if self.case.recompute is not None:
            levels = [(self.case.recompute, 0)]
        tables, costs = self.evaluator.tables, self.evaluator.costs
        best: tuple[float, StageShape] | None = None
        for recompute, first in levels:
            made = replace(stage, recompute=recompute, first=first)
            choice = tables.choice(made, s == 0, s == len(shape.stages) - 1)
            needs = costs.memory_bytes(choice, shape.micro_batch_size, alive, replicas).total  # type: ignore[arg-type]
            if needs > costs.memory_limit(choice.chip):
                continue
            seconds = costs.backward_seconds(choice, shape.micro_batch_size)
            if best is None or seconds < best[0]:
                best = (seconds, made)
        return best[1] if best else None
