"""Exhaustive search over plans of small clusters, and random clusters to search.

Written apart from the planner's search: nested loops over everything, nothing clever but cuts that cannot lose a better
plan. A plan is skipped when one of its stages alone, doing all its micro-batches, or one of its pipelines takes as long
as the best plan known (synchronisation only adds). Of a stage's recompute levels only the fastest that fits is tried
(all times grow with a stage's), with optimizer states and buckets where the plan places them; before the other
pipelines are known, the fastest that would fit if optimizer states were divided among all chips (with shares: belonged
to others) and buckets took no memory, which is never slower.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.planner.estimate.template_score import TemplateScore, TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import simulate_best
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
    place,
    to_plan,
)
from hetero_megatron.plans.memory.of_plan import MemoryBytes, estimate_memory
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import parameter_count

GIB = 2**30
Usage = tuple[int, ...]
Row = tuple[float, PipelineTemplate, int]  # seconds, shape, micro-batches


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


def unequal_directions(case: Case, seed: int) -> Case:
    """The same with measured links between nodes, some of whose directions are many times as fast as the other."""
    rng, names = random.Random(seed), [g.name for g in case.cluster.nodes]
    links = [
        {"from": a, "to": b, "alpha": 1e-5, "beta": rng.choice([0.01, 0.1, 1]) * 1e-9}
        for a in names for b in names
    ]  # fmt: skip
    return replace(case, cluster=replace(case.cluster, rates={**case.cluster.rates, "links": links}))


class Exhaustive:
    """The best plan of a case by trying all of them, but none that is not below ``best`` to begin with.

    Plans must fit with the optimizer states where they are placed, as ``predict`` counts them. ``shares``: those of the
    states that stages may own, ascending; all combinations are tried. ``offload``: whether the optimizer of a stage may
    be in host memory; ``away``: whether the activations of its first layers may be, beside any recompute.
    """

    def __init__(
        self, case: Case, scorer: TemplateScorer, best: float, shares: Sequence[int] = (1,), offload: bool = False,
        away: bool = False,
    ) -> None:
        self.case, self.scorer, self.best, self.shares = case, scorer, best, tuple(shares)
        self.places, self.away = (False, True) if offload else (False,), away
        self.counts = scorer.pool.counts
        self.found: PlanTemplate | None = None
        self.tried = 0
        self.fixed = min(scorer.costs.chip_rates(g.chip).step_seconds for g in scorer.pool.groups)
        self._afters: dict[Any, float] = {}
        self._least: dict[Any, tuple[float, StageTemplate | None]] = {}
        self._states: dict[Any, dict[int, MemoryBytes]] = {}

    def run(self) -> float:
        everything = [u for u in itertools.product(*(range(n + 1) for n in self.counts)) if any(u)]
        tables = {u: self._pipelines(u, "1f1b") for u in everything}
        for d in range(1, min(self.case.batch, sum(self.counts)) + 1):
            for usages in itertools.combinations_with_replacement(everything, d):
                if all(sum(u[g] for u in usages) <= n for g, n in enumerate(self.counts)):
                    self._combine(usages, tables, "1f1b")
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
                    shape = PipelineTemplate(size, tuple(replace(s, layers=n) for s, n in zip(stages, layers)))
                    for m in range(few, batch // size + 1):
                        seconds = self._time(shape, m, schedule)
                        if seconds + self.fixed >= self.best and m > 1:
                            break  # more micro-batches take longer
                        if seconds + self.fixed < self.best:
                            found.setdefault(m * size, []).append((seconds, shape, m))
        for rows in found.values():
            rows.sort(key=lambda row: row[0])
        return found

    def _time(self, shape: PipelineTemplate, m: int, schedule: str) -> float:
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
        fitting_shape = PipelineTemplate(shape.micro_batch_size, tuple(x for x in made if x is not None))
        return self.scorer.pipeline_seconds(fitting_shape, m, schedule)

    def _stage(
        self, stage: StageTemplate, size: int, embed: bool, head: bool, alive: int
    ) -> tuple[float, StageTemplate | None]:
        """(seconds of a micro-batch, the stage) with the fastest recompute that could ever fit; inf if none could."""
        key = (stage, size, embed, head, alive)
        if key not in self._least:
            costs = self.scorer.costs
            best: tuple[float, StageTemplate | None] = (math.inf, None)
            for made in self._levels(stage):
                choice = self.scorer.tables.choice(made, embed, head)
                needs = costs.memory_bytes(choice, size, alive, 1e6 if len(self.shares) > 1 else sum(self.counts))
                state = needs.overhead + needs.weights + needs.gradients + needs.optimizer
                if state + needs.activations <= costs.memory_limit(choice.chip):
                    seconds = costs.forward_seconds(choice, size) + costs.backward_seconds(choice, size)
                    best = min(best, (seconds, made), key=lambda row: row[0])
            self._least[key] = best
        return self._least[key]

    def _after(self, shape: PipelineTemplate, pipelines: int) -> float:
        """Least seconds of what follows a pipeline in a plan of so many; tests check that it is never too much."""
        key = (shape, pipelines)
        if key not in self._afters:
            links = [(0.0, 0.0)] * (len(shape.stages) - 1)
            self._afters[key] = self.scorer.bounds.sync_tail(shape, links, pipelines)
        return self._afters[key]

    def _levels(self, stage: StageTemplate) -> list[StageTemplate]:
        levels = [(kind, 0) for kind in ("none", "selective", "elementwise", "full")]
        levels += [("first", n) for n in range(1, stage.layers)]
        if self.case.recompute is not None:
            levels = [(self.case.recompute, 0)]
        found = [replace(stage, recompute=recompute, first=first) for recompute, first in levels]
        counts = range(stage.layers + 1 if self.away else 1)
        return [replace(made, away=n) for made in found for n in counts if made.recompute != "first" or not n]

    def _stages(self, usage: Usage, size: int) -> Iterator[tuple[StageTemplate, ...]]:
        if not any(usage):
            yield ()
            return
        for g, left in enumerate(usage):
            node = self.scorer.pool.groups[g].per_node
            for tp in range(1, left + 1):
                if self.case.model.num_heads < tp or (tp > node and (tp % node or (tp // node) & (tp // node - 1))):
                    continue
                for dp in range(1, left // tp + 1):
                    if size % dp:
                        continue
                    rest = tuple(n - tp * dp * (h == g) for h, n in enumerate(usage))
                    for others in self._stages(rest, size):
                        for away in self.places:
                            yield (StageTemplate(g, tp, dp, offload=away), *others)

    def _layers(self, stages: tuple[StageTemplate, ...], size: int, m: int) -> Iterator[tuple[int, ...]]:
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
        def extend(i: int, left: int, parts: tuple[PipelineReplicas, ...]) -> None:
            if i == len(usages):
                if left == 0:
                    self._try(PlanTemplate(parts, schedule))
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
                    extend(i + 1, left - q, (*parts, PipelineReplicas(shape, 1, m)))

        extend(0, self.case.batch, ())

    def _try(self, candidate: PlanTemplate) -> None:
        for order in ("stage", "pipeline") if len(candidate.parts) > 1 else ("stage",):
            self.tried += 1
            for fitting in self._recomputed(replace(candidate, order=order)):
                if self._slow(fitting):
                    continue
                score: TemplateScore | None = self.scorer.score(fitting)
                if score is not None and score.step_seconds < self.best and self._fits(fitting):
                    self.best, self.found = score.step_seconds, fitting

    def _slow(self, candidate: PlanTemplate) -> bool:
        """Whether a pipeline alone, with the recompute that fits, takes as long as the best plan."""
        return any(
            self.scorer.pipeline_seconds(p.shape, p.num_micro_batches, candidate.schedule)
            + self._after(p.shape, len(candidate.parts))
            >= self.best
            for p in candidate.parts
        )

    def _fits(self, candidate: PlanTemplate) -> bool:
        case, scorer = self.case, self.scorer
        row = [(0.0, 0, candidate)]
        problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch)
        return bool(simulate_best(row, problem, scorer))

    def _recomputed(self, candidate: PlanTemplate) -> Iterator[PlanTemplate]:
        """With the fastest recompute of each stage that fits on all its ranks: with equal shares of the optimizer
        states and, where these cost recompute or do not fit, with all others that are tried."""
        if place(candidate, self.scorer.pool) is None:
            return
        even = self._levelled(candidate, True)
        if even is not None:
            yield even
        least = self._levelled(candidate, False)
        if len(candidate.parts) == 1 or least is None or least == even or self._slow(least):
            return
        count = sum(len(p.shape.stages) for p in candidate.parts)
        for shares in itertools.product(self.shares, repeat=count):
            if min(shares) > self.shares[0] or max(shares) == self.shares[0]:
                continue  # all alike, or in the same proportion as others
            uneven = self._levelled(_with_shares(candidate, shares), True)
            if uneven is not None:
                yield uneven

    def _levelled(self, candidate: PlanTemplate, states_count: bool) -> PlanTemplate | None:
        """With the fastest recompute of each stage, or None; without states it is what no division of them can beat."""
        placed = place(candidate, self.scorer.pool)
        assert placed is not None, "only shares differ"
        where = tuple(
            (units, tuple((s.layers, s.share, s.offload) for s in shape.stages)) for shape, _, units in placed.pipelines
        )
        if where not in self._states:
            plan = to_plan(placed, self.case.cluster, self.case.seq_length, self.case.model.num_heads)
            self._states[where] = estimate_memory(plan, self.case.model, "bf16")
        parts = []
        for part, (_, _, units) in zip(candidate.parts, placed.pipelines, strict=True):
            alive = in_flight(candidate.schedule, len(part.shape.stages), part.num_micro_batches)
            stages = []
            for s, stage in enumerate(part.shape.stages):
                states = [self._states[where][rank] for unit in units[s] for rank in unit]
                if not states_count:
                    states = [replace(m, optimizer=0, buffers=0) for m in states]
                chosen = self._fastest(stage, part.shape, s, alive[s], states)
                if chosen is None:
                    return None
                stages.append(chosen)
            parts.append(replace(part, shape=PipelineTemplate(part.shape.micro_batch_size, tuple(stages))))
        return replace(candidate, parts=tuple(parts))

    def _fastest(
        self, stage: StageTemplate, shape: PipelineTemplate, s: int, alive: int, states: list[MemoryBytes]
    ) -> StageTemplate | None:
        """``states``: of the stage's ranks, with activations of some recompute level or other."""
        tables, costs = self.scorer.tables, self.scorer.costs
        best: tuple[float, StageTemplate] | None = None
        for made in self._levels(stage):
            choice = tables.choice(made, s == 0, s == len(shape.stages) - 1)
            activations = costs.memory_bytes(choice, shape.micro_batch_size, alive, 1).activations
            overhead, limit = costs.overhead(choice.chip), costs.memory_limit(choice.chip)
            if any(replace(m, activations=activations, overhead=overhead).total > limit for m in states):
                continue
            size = shape.micro_batch_size
            seconds = costs.forward_seconds(choice, size) + costs.backward_seconds(choice, size)
            if best is None or seconds < best[0]:
                best = (seconds, made)
        return best[1] if best else None


def _with_shares(candidate: PlanTemplate, shares: Sequence[int]) -> PlanTemplate:
    left, parts = iter(shares), []
    for part in candidate.parts:
        stages = tuple(replace(s, share=next(left)) for s in part.shape.stages)
        parts.append(replace(part, shape=replace(part.shape, stages=stages)))
    return replace(candidate, parts=tuple(parts))
