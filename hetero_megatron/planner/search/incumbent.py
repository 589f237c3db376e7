"""The incumbent: the best plans found so far, and when to stop looking.

Proposers offer plan templates, ranked by the fast estimate of :class:`TemplateScorer`. :func:`simulate_best` turns
the best few into concrete plans and times them with the step simulator; only those times are reported.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.estimate.template_score import TemplateScore, TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.search.materialize import TemplateBuilder
from hetero_megatron.planner.template.plan_template import PlacedTemplate, PlanTemplate, place, to_plan
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.islands import with_islands_where_quick
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.utils.text import plural

WINDOW = 1.01  # templates are simulated if they are within this of the best: both mostly agree to 0.5 %
SMALL = 256  # chips, up to which simulation takes next to no time
FINEST = 4  # shares of the slowest chip, where owners of matrices are chosen by speed
SIMULATED, SIMULATED_RANK = 7_500, 1_650  # work of a simulation, and of each rank in it
Progress = Callable[[str], None]
Row = tuple[float, int, PlanTemplate]  # (estimated seconds, number of the offer, template)


class Proposer(Protocol):
    """A source of plans."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Offer plans to the incumbent, most promising first.

        Returns:
            Whether the proposer finished; False where the incumbent said to stop.
        """
        ...


class Incumbent:
    """The best templates so far, without duplicates.

    Attributes:
        rows: the best templates, fastest first.
        plans: simulated concrete plans, fastest first.
        seeds: uniform plans, kept whatever else is found.
        by_groups: the fastest template on each set of node groups.
        rejected: number of rejected offers: over "memory", TP groups that do not pack into nodes ("packing"),
            "unequal pipelines" where only equal ones are asked for.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        scorer: TemplateScorer,
        budget: TimeBudget | None = None,
        *,
        keep: int | None = None,
        progress: Progress | None = None,
        part_of: Incumbent | None = None,
    ) -> None:
        """Args:
            keep: number of templates to keep; None: twice the number that are simulated.
            part_of: the search that this one is a part of; this one may stop once that one has a plan."""
        self.problem, self.scorer, self.budget, self.progress, self.part_of = (
            problem, scorer, budget, progress, part_of
        )  # fmt: skip
        self.keep = 2 * max(problem.options.top, 1) if keep is None else keep
        self.rows: list[Row] = []
        self.plans: list[SimulatedPlan] = []
        self.seeds: list[Row] = []
        self.by_groups: dict[frozenset[int], Row] = {}
        self.rejected: Counter[str] = Counter()
        self._offers = itertools.count(1)

    def on(self, scorer: TemplateScorer) -> Incumbent:
        """A view of the same incumbent whose offers are scored by another scorer."""
        view = Incumbent(self.problem, scorer, self.budget, keep=self.keep, progress=self.progress)
        view.part_of, view.rows, view.seeds, view.plans = self.part_of, self.rows, self.seeds, self.plans
        view.by_groups, view.rejected, view._offers = self.by_groups, self.rejected, self._offers
        return view

    @cached_property
    def builder(self) -> TemplateBuilder:
        """Makes templates from pipeline outlines; caches shapes."""
        return TemplateBuilder(self.problem, self.scorer)

    @property
    def seconds(self) -> float:
        """Estimate of the best template; inf without one."""
        return self.rows[0][0] if self.rows else math.inf

    def offer(self, template: PlanTemplate, limit: float = math.inf) -> TemplateScore | None:
        """Score a template and keep it if it fits and takes less than ``limit`` seconds; returns None if rejected."""
        if not self.problem.space.allows(template):
            self.rejected["unequal pipelines"] += 1
            return None
        score = self.scorer.score(template, limit)
        if score is None or score.over > 0:
            self.rejected["packing" if score is None else "memory"] += 1
            return None
        if score.step_seconds >= limit:
            return None
        self.take(template, score.step_seconds)
        return score

    def take(self, template: PlanTemplate, seconds: float) -> None:
        """Insert a template that fits, if it is among the best."""
        number, template = next(self._offers), _canonical(template)
        groups = frozenset(stage.group for part in template.parts for stage in part.shape.stages)
        if groups not in self.by_groups or seconds < self.by_groups[groups][0]:
            self.by_groups[groups] = seconds, number, template
        if any(row[2] == template for row in self.rows):
            return
        if len(self.rows) >= self.keep and seconds >= self.rows[-1][0]:
            return
        improved = seconds < self.seconds
        # One assignment, before reporting progress: after a report, Ctrl-C must return at least that plan.
        self.rows[:] = sorted([*self.rows, (seconds, number, template)], key=lambda row: row[:2])[: self.keep]
        if self.progress is not None and improved:
            self.progress(f"{seconds:.4g} s per step with {plural(template.pipelines, 'pipeline')}")

    def take_plan(self, plan: SimulatedPlan) -> None:
        """Insert a simulated plan."""
        self.plans[:] = sorted([*self.plans, plan], key=lambda x: x.step_seconds)
        if self.progress is not None and self.plans[0] is plan:
            self.progress(f"{plan.step_seconds:.4g} s per step, simulated, under {plan.plan.schedule}")

    def should_stop(self) -> bool:
        """Whether to stop: the budget is over and there is a plan to return."""
        any_plan = self.rows or self.plans or (self.part_of is not None and self.part_of.rows)
        return self.budget is not None and bool(any_plan) and self.budget.over()

    def ranked(self) -> list[Row]:
        """The best templates and the seeds, fastest first."""
        return sorted([*self.rows, *(row for row in self.seeds if row not in self.rows)], key=lambda row: row[:2])


def _canonical(template: PlanTemplate) -> PlanTemplate:
    """The template in canonical form: schedules only differ with several micro-batches and stages, placement orders
    only with several pipelines."""
    template = template.joined()
    if all(len(part.shape.stages) == 1 or part.num_micro_batches == 1 for part in template.parts):
        template = replace(template, schedule="1f1b")
    return replace(template, order="stage") if template.pipelines == 1 else template


@dataclass(frozen=True)
class SimulatedPlan:
    """A concrete plan and its simulated step.

    Attributes:
        cluster: the cluster that the plan's ranks refer to; idle: its ranks without work.
        template: what the plan was made from; empty if ``text`` describes it (context groups, divided experts).
        once_seconds: of a step without replicas of experts; None: the plan has none.
    """

    plan: Plan
    cluster: Cluster
    template: PlanTemplate
    prediction: Prediction
    idle: tuple[int, ...]
    text: str = ""
    once_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def saves_memory(self) -> bool:
        """Whether it shows that memory is short: chips are idle, or it recomputes or has something in host memory."""
        return bool(self.idle) or any(
            x.recompute.kind != "none" or x.optimizer.offload or x.activations is not None for x in self.plan.stages
        )

    @property
    def cost_per_hour(self) -> float | None:
        """Of the chips that the plan uses; None where one has no ``cost_per_hour``."""
        costs = [self.cluster.chip_of(rank).cost_per_hour for rank in self.plan.ranks]
        stated = [cost for cost in costs if cost is not None]
        return sum(stated) if len(stated) == len(costs) else None

    @property
    def tokens_per_cost(self) -> float | None:
        """Tokens per currency unit; None where a chip that the plan uses has no ``cost_per_hour``."""
        cost = self.cost_per_hour
        return None if cost is None else self.prediction.tokens_per_second * 3600 / cost


def simulated_plan(
    problem: PlanningProblem, scorer: TemplateScorer, plan: Plan, prediction: Prediction, text: str
) -> SimulatedPlan:
    """A plan that was not made from a template; ``text`` describes it."""
    chips = {rank for group in scorer.pool.groups for node in group.ranks for rank in node}
    idle = tuple(sorted(chips - set(plan.ranks)))
    return SimulatedPlan(plan, problem.cluster, PlanTemplate(()), prediction, idle, text)


def simulate_best(
    rows: list[Row], problem: PlanningProblem, scorer: TemplateScorer, budget: TimeBudget | None = None
) -> list[SimulatedPlan]:
    """Simulate concrete plans of the best templates; returns those that fit, fastest first. On small clusters every
    template estimated to be faster than the best simulated plan is simulated too. When ``budget`` is over, the first
    one that fits is enough."""
    budget = budget or TimeBudget()
    simulated: list[SimulatedPlan] = []
    fastest, small, top = math.inf, scorer.pool.chips <= SMALL, problem.options.top
    for seconds, _, template in rows:
        if seconds > WINDOW * (fastest if small else rows[0][0]) and simulated:
            break
        if len(simulated) >= top and not (small and seconds < fastest):
            break
        if simulated and budget.over():
            break
        plan = budget.finish(partial(simulate_template, template, problem, scorer))
        if plan is not None and not plan.prediction.over:
            simulated.append(plan)
            fastest = min(fastest, plan.step_seconds)
    return sorted(simulated, key=lambda plan: plan.step_seconds)


def simulation_work(plan: Plan) -> int:
    """Of its simulation, in the time of an action of a schedule."""
    return SIMULATED + SIMULATED_RANK * len(plan.ranks)


def placed_plan(placed: PlacedTemplate, problem: PlanningProblem, scorer: TemplateScorer) -> Plan:
    """The plan of a placed template, without islands."""
    return with_dtypes(to_plan(placed, problem.cluster, problem.seq_length, problem.model.num_heads), scorer.costs)


def simulate_template(template: PlanTemplate, problem: PlanningProblem, scorer: TemplateScorer) -> SimulatedPlan | None:
    """The plan of a template, validated and simulated; None when its TP groups do not pack into the nodes."""
    placed = place(template, scorer.pool)
    if placed is None:
        return None
    model, cluster = problem.model, problem.cluster
    plan = placed_plan(placed, problem, scorer)
    plan = with_islands_where_quick(plan, model, cluster)
    best: SimulatedPlan | None = None
    shares_may_differ = problem.space.shares and problem.space.equal_pipelines == "no"
    for candidate in (plan, *(owners_by_speed(plan, scorer.costs) if shares_may_differ else ())):
        validate(candidate, model, cluster, dtype=problem.dtype)
        scorer.work.add(simulation_work(candidate))
        prediction = predict(candidate, model, cluster, problem.dtype, scorer.costs)
        found = SimulatedPlan(candidate, cluster, template, prediction, placed.idle)
        if best is None or best.prediction.over or (not prediction.over and found.step_seconds < best.step_seconds):
            best = found
    return best


def owners_by_speed(plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """The plan with matrices for Muon's owners by how fast their chips multiply them, where that changes something."""
    if not costs.options.muon:
        return
    speed = {rank: costs.products_per_second(costs.cluster.ranks[rank].chip) for rank in plan.ranks}
    least = min(speed.values())
    shares = [max(1, round(FINEST * min(speed[r] for r in stage.ranks) / least)) for stage in plan.stages]
    if len(set(shares)) > 1 and all(stage.optimizer.share == 1 for stage in plan.stages):
        common, each = math.gcd(*shares), iter(shares)
        yield plan.with_stages(lambda s: replace(s, optimizer=replace(s.optimizer, share=next(each) // common)))
