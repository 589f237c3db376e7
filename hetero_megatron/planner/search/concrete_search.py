"""Search of plans that templates cannot describe: context groups, divided experts.

Structures are tried in the order of a lower bound on their step time. Each becomes a concrete plan, which the step
simulator times; the search ends where the bound reaches the best plan so far.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.search.chip_structures import ChipStructure, Ranks, structures
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan, simulated_plan, simulation_work
from hetero_megatron.planner.shares import min_max_shares
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.islands import with_islands_where_quick
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.utils.text import plural

Structure = TypeVar("Structure")


@dataclass
class Outcome:
    """Attributes:
    plans: those that fit and were each the fastest when found; the fastest first.
    tried: number of structures that were made into plans; total: of those that are possible.
    ended: the time did not end the search; faster: structures that it left out might be faster."""

    plans: list[SimulatedPlan] = field(default_factory=list)
    tried: int = 0
    total: int = 0
    ended: bool = True
    faster: bool = False

    def __str__(self) -> str:
        text = f"{self.tried} of {plural(self.total, 'structure')} tried"
        if not self.ended:
            return text + "; cut short"
        if self.tried < self.total and not self.faster:
            text += "; the others cannot be faster at these speeds"
        return text


class ConcreteSearch(ABC, Generic[Structure]):
    """One search. A filling lists structures, bounds them and makes the best plan of each."""

    most: int | None = None  # structures that are made into plans

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.problem, self.scorer, self.costs, self.pool = problem, scorer, scorer.costs, scorer.pool
        self.model, self.cluster, self.space = problem.model, problem.cluster, problem.space
        self.batch = problem.global_batch_size
        self.recompute_kinds = (self.space.recompute,) if self.space.recompute else ("none", "elementwise", "full")

    @abstractmethod
    def structures(self) -> Iterable[Structure]: ...

    @abstractmethod
    def bound(self, structure: Structure) -> float:
        """Seconds that no plan of the structure beats; inf where it has none."""

    @abstractmethod
    def best_plan(self, structure: Structure, best: float) -> SimulatedPlan | None:
        """Its plan, simulated; None where none fits or takes less than ``best`` seconds."""

    def order(
        self, rows: Sequence[tuple[float, int, Structure]], best: float
    ) -> Sequence[tuple[float, int, Structure]]:
        """Which structures to try first; ``rows``: by bound, (bound, number, structure)."""
        return rows

    def run(self, best: float, budget: TimeBudget) -> Outcome:
        """Try structures until none can take less than ``best`` seconds (inf: any plan that fits)."""
        outcome = Outcome(ended=False)
        with budget.catching():
            rows = list[tuple[float, int, Structure]]()
            for i, x in enumerate(self.structures()):
                if best < math.inf and budget.over():
                    return outcome
                rows.append((self.bound(x), i, x))
            rows.sort(key=lambda row: row[:2])
            outcome.total = sum(bound < math.inf for bound, _, _ in rows)
            tried = set[int]()
            for bound, number, structure in self.order(rows[: outcome.total], best):
                if bound >= best or outcome.tried == self.most:
                    continue
                if best < math.inf and (budget.over() or self.scorer.work.over()):
                    return outcome
                tried.add(number)
                outcome.tried += 1
                plan = self.best_plan(structure, best)
                if plan is not None:
                    best = plan.step_seconds
                    outcome.plans.insert(0, plan)
            outcome.faster = any(bound < best and number not in tried for bound, number, _ in rows)
            outcome.ended = True
        return outcome

    def propose_to(self, incumbent: Incumbent) -> Outcome:
        """Run, and offer what was found."""
        best = incumbent.plans[0].step_seconds if incumbent.plans else math.inf
        outcome = self.run(best, incumbent.budget or TimeBudget())
        for plan in outcome.plans:
            incumbent.take_plan(plan)
        return outcome

    def checked(self, plan: Plan) -> Plan:
        """The plan with the dtypes of its stages and, where that is quick, islands.

        Raises:
            UserError: it cannot run.
        """
        plan = with_islands_where_quick(with_dtypes(plan, self.costs), self.model, self.cluster)
        validate(plan, self.model, self.cluster, dtype=self.costs.dtype)
        self.scorer.work.add(simulation_work(plan))
        return plan

    def predict(self, plan: Plan) -> Prediction:
        return predict(plan, self.model, self.cluster, self.costs.dtype, self.costs)

    def simulated(self, plan: Plan, prediction: Prediction, text: str) -> SimulatedPlan:
        return simulated_plan(self.problem, self.scorer, plan, prediction, text)


@dataclass(frozen=True)
class StageSpeed:
    """Seconds of one layer, forward and backward, and of the head; ``least``: below which no layer is."""

    layer: float
    head: float
    least: float


class StagedSearch(ConcreteSearch[ChipStructure]):
    """A search over chips by stage (:mod:`chip_structures`); layers are divided by the stages' speeds."""

    ordered = False  # the order of the groups in a common stage matters
    every_size = False  # micro-batches of every size that divides the batch

    def structures(self) -> Iterable[ChipStructure]:
        return structures(self.problem, self.pool, self.ordered, self.every_size)

    @abstractmethod
    def speed(self, structure: ChipStructure, s: int) -> StageSpeed | None:
        """Of one stage; None where it cannot be made."""

    def bound(self, structure: ChipStructure) -> float:
        stages = [self.speed(structure, s) for s in range(structure.stages)]
        speeds = [stage for stage in stages if stage is not None]
        if len(speeds) < len(stages):
            return math.inf
        seconds = [n * x.least + x.head for n, x in zip(self._divided(speeds), speeds, strict=True)]
        return self.step_seconds(structure, seconds)

    def layers(self, structure: ChipStructure) -> list[int]:
        """Layers per stage, at least one each, with which the slowest stage is fastest."""
        stages = [self.speed(structure, s) for s in range(structure.stages)]
        return self._divided([stage for stage in stages if stage is not None])

    def _divided(self, stages: Sequence[StageSpeed]) -> list[int]:
        fixed = [stage.head for stage in stages]
        return min_max_shares(self.model.num_layers, [x.layer for x in stages], fixed=fixed, least=1).tolist()

    def rounds(self, structure: ChipStructure) -> int:
        """Micro-batches of each pipeline."""
        return self.batch // structure.pipelines // structure.size

    def step_seconds(self, structure: ChipStructure, seconds: Sequence[float]) -> float:
        """Seconds of the micro-batches alone, without a wait; ``seconds``: of one in each stage."""
        return (self.rounds(structure) - 1) * max(seconds) + sum(seconds)

    def alike(self, ranks: Ranks) -> tuple[object, ...]:
        """Equal for ranks of equal groups that are distributed over nodes in the same way."""
        nodes: dict[str, int] = {}
        places = [self.cluster.ranks[r] for r in ranks]
        return tuple((p.group, nodes.setdefault(p.node, len(nodes))) for p in places)

    def chip(self, ranks: Ranks) -> str | None:
        """Their chip type; None where there are several."""
        chips = {self.cluster.ranks[r].chip for r in ranks}
        return chips.pop() if len(chips) == 1 else None
