"""Tensor-parallel groups of unlike chips: heads, MLP columns and vocabulary in proportion to the chips' speed.

They pay where little work has to be done in a short time (one or two sequences per step) over links between unlike
chips that are about as fast as those inside a node. Tried on small clusters, for equal pipelines of one stage each; a
structure is predicted only if its micro-batches alone take less than the best plan known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, Recompute, Stage, Unit, validate
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.simulate.stage_cost import StageCosts
from hetero_megatron.planner.simulate.step import Prediction, predict
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.planner.template.search_space import SearchSpace, batch_sizes
from hetero_megatron.planner.time_budget import Late, never
from hetero_megatron.spec import ModelSpec

MOST_CHIPS = 16
FINEST = 64  # parts by which weights are rounded
LESS = 0.85  # of its share for a rank that has too little memory
ROUNDS = 4
Weights = tuple[int, ...]


@dataclass(frozen=True)
class HeteroTPPlan:
    """``text``: what it is, for reports."""

    plan: Plan
    prediction: Prediction
    text: str


class HeteroTP:
    """See the module docstring."""

    def __init__(
        self, model: ModelSpec, cluster: Cluster, evaluator: TemplateScorer, batch: int, space: SearchSpace
    ) -> None:
        self.model, self.cluster, self.evaluator, self.batch, self.space = model, cluster, evaluator, batch, space
        self.costs, self.pool = evaluator.costs, evaluator.pool

    def run(self, best: float, late: Late = never) -> HeteroTPPlan | None:
        """The best plan with such groups that takes less than ``best`` seconds, of those tried before ``late``."""
        found: HeteroTPPlan | None = None
        if len({g.chip for g in self.pool.groups}) < 2 or self.pool.chips > MOST_CHIPS:
            return None
        for counts, copies, size in self.structures():
            if late():
                break
            for recompute in (self.space.recompute,) if self.space.recompute else ("none", "full"):
                plans = [self.fitted(counts, copies, size, recompute, w, best) for w in self.weights(counts, size)]
                tried = [x for x in plans if x is not None]
                if tried:
                    found = min(tried, key=lambda x: x.prediction.step_seconds)
                    best = found.prediction.step_seconds
                    break  # recompute only costs
        return found

    def structures(self) -> Iterator[tuple[Weights, int, int]]:
        """(chips of each group in a TP group, pipelines, micro-batch size)."""
        most = min(self.model.num_heads, self.space.max_tp)
        for counts in itertools.product(*(range(n + 1) for n in self.pool.counts)):
            if len({self.pool.groups[g].chip for g, n in enumerate(counts) if n}) < 2 or sum(counts) > most:
                continue
            fit = min(have // n for have, n in zip(self.pool.counts, counts) if n)
            for copies in range(1, min(fit, self.space.max_pipelines or fit) + 1):
                for size in batch_sizes(self.space, self.batch // copies):
                    if self.batch % (copies * size) == 0:
                        yield counts, copies, size

    def weights(self, counts: Weights, size: int) -> list[Weights]:
        """Splits by speed: fine ones for the MLP, and whole numbers of heads with the earliest end; and equal parts."""
        speeds = [1 / self.layer_seconds(g, size) for g, n in enumerate(counts) for _ in range(n)]
        fine = tuple(max(1, round(FINEST * s / max(speeds))) for s in speeds)
        heads = [1] * len(speeds)
        for _ in range(self.model.num_heads - len(speeds)):
            heads[min(range(len(heads)), key=lambda t: ((heads[t] + 1) / speeds[t], t))] += 1
        return list(dict.fromkeys((fine, tuple(heads), (1,) * len(speeds))))

    def layer_seconds(self, group: int, size: int) -> float:
        """Of one layer and micro-batch on one chip."""
        one, two = (self.evaluator.stage(StageTemplate(group, 1, 1, n), size, False, False) for n in (1, 2))
        return two.forward + two.backward - one.forward - one.backward

    def fitted(
        self, counts: Weights, copies: int, size: int, recompute: str, weights: Weights, best: float
    ) -> HeteroTPPlan | None:
        """The plan with these weights, or where ranks lack memory with less on those; None: not below ``best``."""
        for _ in range(ROUNDS):
            plan = self.plan(counts, copies, size, recompute, weights)
            try:
                validate(plan, self.model, self.cluster, dtype=self.costs.dtype)
            except UserError:  # a rank without any column of the MLP
                return None
            if least_seconds(plan, self.costs) >= best:
                return None
            prediction = predict(plan, self.model, self.cluster, self.costs.dtype, self.costs)
            if not prediction.over:
                text = self.text(counts, copies, size, recompute, weights)
                return HeteroTPPlan(plan, prediction, text) if prediction.step_seconds < best else None
            ranks = {x.rank for x in prediction.over}
            units = [unit for p in plan.pipelines for unit in p.stages[0].units]
            over = {t for unit in units for t, rank in enumerate(unit.ranks) if rank in ranks}
            weights = tuple(max(1, math.floor(w * LESS)) if t in over else w for t, w in enumerate(weights))
        return None

    def plan(self, counts: Weights, copies: int, size: int, recompute: str, weights: Sequence[int]) -> Plan:
        """One pipeline after the other, on consecutive chips of each group."""
        free = [[r for node in g.ranks for r in node] for g in self.pool.groups]
        pipelines = []
        for p in range(copies):
            ranks = tuple(r for g, n in enumerate(counts) for r in free[g][p * n : (p + 1) * n])
            common = math.gcd(*weights)
            split = tuple(w // common for w in weights)
            unit = Unit(ranks, split, (0, size), ((0, self.costs.seq_length),), (0, self.model.num_heads))
            stage = Stage(((0, self.model.num_layers),), (unit,), True, True, Recompute(recompute))
            pipelines.append(Pipeline(size, self.batch // copies // size, (stage,)))
        return Plan(self.costs.seq_length, self.batch, self.space.schedules[0], tuple(pipelines))

    def text(self, counts: Weights, copies: int, size: int, recompute: str, weights: Weights) -> str:
        chips = " + ".join(f"{n} {self.pool.groups[g].chip}" for g, n in enumerate(counts) if n)
        more = "" if recompute == "none" else f" recompute {recompute}"
        split = ",".join(map(str, weights))
        m = self.batch // copies // size
        return f"{copies} x (m {m}, b {size}) tp {chips} by {split} [{self.model.num_layers}]{more}"


def least_seconds(plan: Plan, costs: CostModel) -> float:
    """Of the micro-batches alone, as prediction has them."""
    stages = StageCosts(plan, costs)
    rows = [(p.num_micro_batches, stages.of(p).costs) for p in plan.pipelines[:1]]
    return max(m * (max(c.forward) + max(c.backward)) for m, c in rows)
