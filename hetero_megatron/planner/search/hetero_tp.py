"""Tensor-parallel groups of unlike chips: heads, MLP columns and vocabulary in proportion to the chips' speed.

They pay off for very small batches (one or two sequences per step) when links between unlike chips are about as fast as
those inside a node. Tried on small clusters, for equal pipelines of one stage each. A structure is only simulated if
its micro-batches alone take less than the best known plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, Recompute, Stage, Unit, validate
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.batch_partition import divide_units
from hetero_megatron.planner.search.graph_partition import layer_seconds
from hetero_megatron.planner.search.incumbent import Incumbent, JudgedPlan, judged_plan
from hetero_megatron.planner.simulate.stage_cost import StageCosts
from hetero_megatron.planner.simulate.stage_dtypes import with_dtypes
from hetero_megatron.planner.simulate.step import predict
from hetero_megatron.planner.template.search_space import batch_sizes

MOST_CHIPS = 16
FINEST = 64  # resolution of weights
LESS = 0.85  # factor on the weight of a rank that lacks memory
ROUNDS = 4
Weights = tuple[int, ...]


class HeteroTP:
    """Proposes the best plan with TP groups of unlike chips, if it is faster than all plans so far."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        pool = incumbent.scorer.pool
        if len({g.chip for g in pool.groups}) < 2 or pool.chips > MOST_CHIPS:
            return True
        search = _Structures(problem, incumbent.scorer)
        best = incumbent.plans[0].step_seconds if incumbent.plans else math.inf
        for counts, copies, size in search.structures():
            if incumbent.should_stop():
                return False
            for recompute in (problem.space.recompute,) if problem.space.recompute else ("none", "full"):
                plans = [search.fitted(counts, copies, size, recompute, w, best) for w in search.weights(counts, size)]
                tried = [x for x in plans if x is not None]
                if tried:
                    found = min(tried, key=lambda x: x.step_seconds)
                    best = found.step_seconds
                    incumbent.take_plan(found)
                    break  # more recompute would only be slower
        return True


class _Structures:
    """Single-stage pipelines whose TP groups mix chips of several groups."""

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.problem, self.scorer, self.costs, self.pool = problem, scorer, scorer.costs, scorer.pool
        self.model, self.cluster, self.space = problem.model, problem.cluster, problem.space
        self.batch = problem.global_batch_size

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
        """TP splits: fine-grained by speed (for the MLP), whole heads by speed, and equal."""
        each = [layer_seconds(self.scorer, g, size) for g, n in enumerate(counts) for _ in range(n)]
        fine = tuple(max(1, round(FINEST * min(each) / seconds)) for seconds in each)
        heads = divide_units(self.model.num_heads, each, [0.0] * len(each))
        return list(dict.fromkeys((fine, tuple(heads), (1,) * len(each))))

    def fitted(
        self, counts: Weights, copies: int, size: int, recompute: str, weights: Weights, best: float
    ) -> JudgedPlan | None:
        """The simulated plan with these weights, reduced on ranks that lack memory; None: not faster than ``best`` or
        invalid."""
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
                judged = judged_plan(self.problem, self.scorer, plan, prediction, text)
                return judged if judged.step_seconds < best else None
            ranks = {x.rank for x in prediction.over}
            units = [unit for p in plan.pipelines for unit in p.stages[0].units]
            over = {t for unit in units for t, rank in enumerate(unit.ranks) if rank in ranks}
            weights = tuple(max(1, math.floor(w * LESS)) if t in over else w for t, w in enumerate(weights))
        return None

    def plan(self, counts: Weights, copies: int, size: int, recompute: str, weights: Sequence[int]) -> Plan:
        """The plan with its pipelines on consecutive chips of each group."""
        free = [[r for node in g.ranks for r in node] for g in self.pool.groups]
        pipelines = []
        for p in range(copies):
            ranks = tuple(r for g, n in enumerate(counts) for r in free[g][p * n : (p + 1) * n])
            common = math.gcd(*weights)
            split = tuple(w // common for w in weights)
            unit = Unit(ranks, split, (0, size), ((0, self.costs.seq_length),), (0, self.model.num_heads))
            stage = Stage(((0, self.model.num_layers),), (unit,), True, True, Recompute(recompute))
            pipelines.append(Pipeline(size, self.batch // copies // size, (stage,)))
        plan = Plan(self.costs.seq_length, self.batch, self.space.schedules[0], tuple(pipelines))
        return with_dtypes(plan, self.costs)

    def text(self, counts: Weights, copies: int, size: int, recompute: str, weights: Weights) -> str:
        chips = " + ".join(f"{n} {self.pool.groups[g].chip}" for g, n in enumerate(counts) if n)
        more = "" if recompute == "none" else f" recompute {recompute}"
        split = ",".join(map(str, weights))
        m = self.batch // copies // size
        return f"{copies} x (m {m}, b {size}) tp {chips} by {split} [{self.model.num_layers}]{more}"


def least_seconds(plan: Plan, costs: CostModel) -> float:
    """Lower bound (s) on a step: its micro-batches alone, as the simulator prices them."""
    stages = StageCosts(plan, costs)
    rows = [(p.num_micro_batches, stages.of(p).costs) for p in plan.pipelines[:1]]
    return max(m * (max(c.forward) + max(c.backward)) for m, c in rows)
