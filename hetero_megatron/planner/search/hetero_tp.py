"""Tensor-parallel groups of unlike chips: heads, MLP columns and vocabulary in proportion to the chips' speed.

They pay off for very small batches (one or two sequences per step) when links between unlike chips are about as fast as
those inside a node. Tried on small clusters, for equal pipelines of one stage each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.concrete_search import ConcreteSearch
from hetero_megatron.planner.search.graph_partition import layer_seconds
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan
from hetero_megatron.planner.shares import min_max_shares
from hetero_megatron.planner.template.search_space import batch_sizes
from hetero_megatron.predictor.simulate.stage_cost import StageCosts, with_dtypes

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
        return _TensorParallelSearch(problem, incumbent.scorer).propose_to(incumbent).ended


@dataclass(frozen=True)
class _Structure:
    """``counts``: chips of each group in a TP group; ``weights``: the TP split over these chips."""

    counts: Weights
    pipelines: int
    size: int
    weights: Weights


class _TensorParallelSearch(ConcreteSearch[_Structure]):
    """Pipelines of one stage whose TP groups mix chips of several groups."""

    def structures(self) -> Iterator[_Structure]:
        most = min(self.model.num_heads, self.space.max_tp)
        for counts in itertools.product(*(range(n + 1) for n in self.pool.counts)):
            if len({self.pool.groups[g].chip for g, n in enumerate(counts) if n}) < 2 or sum(counts) > most:
                continue
            fit = min(have // n for have, n in zip(self.pool.counts, counts) if n)
            for copies in range(1, min(fit, self.space.max_pipelines or fit) + 1):
                for size in batch_sizes(self.space, self.batch // copies):
                    if self.batch % (copies * size) == 0:
                        yield from (_Structure(counts, copies, size, w) for w in self._weights(counts, size))

    def _weights(self, counts: Weights, size: int) -> list[Weights]:
        """TP splits: fine-grained by speed (for the MLP), whole heads by speed, and equal."""
        each = [layer_seconds(self.scorer, g, size) for g, n in enumerate(counts) for _ in range(n)]
        fine = tuple(max(1, round(FINEST * min(each) / seconds)) for seconds in each)
        heads = min_max_shares(self.model.num_heads, each, least=1)
        return list(dict.fromkeys((fine, tuple(heads.tolist()), (1,) * len(each))))

    def bound(self, structure: _Structure) -> float:
        """Its micro-batches alone, as the simulator prices them; inf where a rank has no column of the MLP."""
        plan = with_dtypes(self._plan(structure, self.recompute_kinds[0], structure.weights), self.costs)
        pipeline = plan.pipelines[0]
        try:
            costs = StageCosts(plan, self.costs).of(pipeline).costs
        except UserError:
            return math.inf
        return pipeline.num_micro_batches * (max(costs.forward) + max(costs.backward))

    def best_plan(self, structure: _Structure, best: float) -> SimulatedPlan | None:
        """With less on ranks that lack memory, and recompute only where nothing fits without."""
        for recompute in self.recompute_kinds:
            weights = structure.weights
            for _ in range(ROUNDS):
                try:
                    plan = self.checked(self._plan(structure, recompute, weights))
                except UserError:  # a rank without any column of the MLP
                    break
                found = self.predict(plan)
                if not found.over:
                    text = self._text(structure, recompute, weights)
                    return self.simulated(plan, found, text) if found.step_seconds < best else None
                ranks = {x.rank for x in found.over}
                units = [unit for p in plan.pipelines for unit in p.stages[0].units]
                over = {t for unit in units for t, rank in enumerate(unit.ranks) if rank in ranks}
                weights = tuple(max(1, math.floor(w * LESS)) if t in over else w for t, w in enumerate(weights))
        return None

    def _plan(self, structure: _Structure, recompute: str, weights: Weights) -> Plan:
        """The plan with its pipelines on consecutive chips of each group."""
        free = [[r for node in g.ranks for r in node] for g in self.pool.groups]
        rounds, size, common = self.batch // structure.pipelines // structure.size, structure.size, math.gcd(*weights)
        split, whole = tuple(w // common for w in weights), ((0, self.costs.seq_length),)
        pipelines = []
        for p in range(structure.pipelines):
            ranks = tuple(r for g, n in enumerate(structure.counts) for r in free[g][p * n : (p + 1) * n])
            unit = Unit(ranks, split, (0, size), whole, (0, self.model.num_heads))
            stage = Stage(((0, self.model.num_layers),), (unit,), True, True, Recompute(recompute))
            pipelines.append(Pipeline(size, rounds, (stage,)))
        return Plan(self.costs.seq_length, self.batch, self.space.schedules[0], tuple(pipelines))

    def _text(self, structure: _Structure, recompute: str, weights: Weights) -> str:
        chips = " + ".join(f"{n} {self.pool.groups[g].chip}" for g, n in enumerate(structure.counts) if n)
        more = "" if recompute == "none" else f" recompute {recompute}"
        split, m = ",".join(map(str, weights)), self.batch // structure.pipelines // structure.size
        head = f"{structure.pipelines} x (m {m}, b {structure.size})"
        return f"{head} tp {chips} by {split} [{self.model.num_layers}]{more}"
