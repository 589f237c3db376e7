"""The search for the best plan of a model on a mixed cluster (HeteroAuto).

:func:`search` runs proposers of plan templates: uniform plans, dynamic programs (:mod:`pipeline_dp`, or
:mod:`graph_partition` for many kinds of nodes), local search, the same on parts of the cluster (:mod:`parts`), and
more where the cluster is small (:mod:`small_clusters`); optimizers in host memory if asked for or if nothing fits
otherwise. The best few by estimate become concrete plans that the step simulator times. Plans with context groups
(:mod:`context_stages`) and divided experts (:mod:`expert_stages`) are compared with those. Where layers cost unlike
much, single ones of the best plan are moved (:mod:`unlike_layers`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetero_megatron.cluster.subset import of_type
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import work_bound
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute, make_scorer, no_room
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget, why_no_context
from hetero_megatron.planner.search.context_stages import ContextStages
from hetero_megatron.planner.search.divided_stages import DividedStages
from hetero_megatron.planner.search.expert_stages import ExpertStages
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS, GraphPartition
from hetero_megatron.planner.search.incumbent import (
    Incumbent,
    Progress,
    Proposer,
    SimulatedPlan,
    simulate_best,
    simulate_template,
)
from hetero_megatron.planner.search.infeasible import refuse
from hetero_megatron.planner.search.local_search import LocalSearch
from hetero_megatron.planner.search.pipeline_dp import PipelineDP
from hetero_megatron.planner.search.schedule_search import FEW, ScheduleSearch
from hetero_megatron.planner.search.small_clusters import Parts, SmallClusters
from hetero_megatron.planner.search.uniform import UniformSeeds
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes, without_fp8
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec.flops import layers_cost_unlike

WORTH = 0.01  # part of a step that activations in host memory save at least, unless they are asked for
MARGIN = 0.1  # largest share of memory kept free in retries when no template fits as a concrete plan


@dataclass
class SearchResult:
    """Attributes:
    others: the runners-up, best first.
    ranked: the best templates by estimate, simulated or not; by_groups: the best on each set of node groups.
    seconds: duration of the search.
    evaluated: number of scored templates; rejected: numbers of rejected ones by reason.
    complete: nothing was cut short by the time limit or Ctrl-C; work_ended: it may find better plans with more effort.
    method: "programs" or "islands".
    context: outcome of trying context groups; context_tried: whether they were tried.
    offload_tried: plans with optimizers in host memory were considered.
    alone: by chip type, the result of searching its chips alone.
    experts: outcome of trying plans that divide experts; empty for dense models.
    divided: outcome of trying plans that divide weights; empty where they were not tried.
    parts: outcome of searching parts of the cluster, for objectives other than speed."""

    best: SimulatedPlan
    others: list[SimulatedPlan]
    pool: DevicePool
    scorer: TemplateScorer
    seconds: float
    evaluated: int
    rejected: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    method: str = ""
    context: str = ""
    context_tried: bool = False
    offload_tried: bool = False
    experts: str = ""
    divided: str = ""
    ranked: tuple[PlanTemplate, ...] = ()
    by_groups: tuple[PlanTemplate, ...] = ()
    alone: dict[str, SearchResult | UserError] = field(default_factory=dict)
    parts: str = ""
    work_ended: bool = False


def search(
    problem: PlanningProblem,
    *,
    progress: Progress | None = None,
    scorer: TemplateScorer | None = None,
    budget: TimeBudget | None = None,
) -> SearchResult:
    """The best plan found.

    Args:
        scorer: over the problem's chips, when the caller has one.
        budget: shared with other searches; None: its own, with the options' time limit.

    Raises:
        UserError: a batch or sequence length that no plan can have, missing rates or links, or a model that fits
            nowhere; the message names the smallest change that would help.
        KeyboardInterrupt: Ctrl-C before any plan was found, or a second one.
    """
    problem.check()
    budget, started = budget or TimeBudget(problem.options.time_limit), time.monotonic()
    scorer = scorer or make_scorer(problem)
    if no_room(scorer):
        raise refuse(problem, scorer)
    run = _search_all if problem.options.costs.fp8 is None else _search_in_fp8
    result = run(problem, scorer, budget, progress)
    result.seconds = time.monotonic() - started
    return result


def _search_all(
    problem: PlanningProblem, scorer: TemplateScorer, budget: TimeBudget, progress: Progress | None
) -> SearchResult:
    if problem.options.time_limit is None and scorer.pool.chips <= FEW:
        scorer.work.most = scorer.work.done + problem.options.work * problem.space.schedule_effort
    result = _search(problem, scorer, budget, progress)
    with budget.catching():
        _improve(result, ScheduleSearch(result.by_groups), problem, budget, progress)
        if layers_cost_unlike(problem.model, problem.seq_length):
            from hetero_megatron.planner.search.unlike_layers import UnlikeLayers

            _improve(result, UnlikeLayers(), problem, budget, progress)
    result.complete = result.complete and not budget.cut
    result.work_ended = scorer.work.cut
    if problem.space.offload_activations == "auto":
        _stay_on_chips(result, problem)
    return result


def _stay_on_chips(result: SearchResult, problem: PlanningProblem) -> None:
    """Take the fastest plan whose activations stay on the chips, where host memory makes the best one hardly faster:
    one of the runners-up, or the same with recompute instead."""
    if all(stage.activations is None for stage in result.best.plan.stages):
        return
    if (recomputed := _recomputed(result, problem)) is not None:
        result.others = sorted([*result.others, recomputed], key=lambda plan: plan.step_seconds)
    for runner_up in result.others:
        if runner_up.step_seconds > (1 + WORTH) * result.best.step_seconds:
            return
        if all(stage.activations is None for stage in runner_up.plan.stages):
            others = [plan for plan in result.others if plan is not runner_up]
            result.best, result.others = runner_up, [result.best, *others]
            return


def _recomputed(result: SearchResult, problem: PlanningProblem) -> SimulatedPlan | None:
    """The best plan's template with recompute in place of host memory; None where that does not fit."""
    template, tables = result.best.template, result.scorer.tables.on_chips()
    parts = []
    for part in template.parts:
        shape = best_recompute(tables, part.shape.plain, template.schedule, part.num_micro_batches, template.pipelines)
        if shape is None:
            return None
        parts.append(replace(part, shape=shape))
    if not parts:  # of a plan that no template describes
        return None
    simulated = simulate_template(replace(template, parts=tuple(parts)), problem, result.scorer)
    return simulated if simulated is not None and not simulated.prediction.over else None


def _improve(
    result: SearchResult, proposer: Proposer, problem: PlanningProblem, budget: TimeBudget, progress: Progress | None
) -> None:
    """Take what a proposer of plans that no template describes found, where it is better than the result's best."""
    if budget.over():
        return
    incumbent = Incumbent(problem, result.scorer, budget, progress=progress)
    incumbent.plans[:] = [result.best, *result.others]
    proposer.propose(problem, incumbent)
    result.best, result.others = incumbent.plans[0], incumbent.plans[1:]


def _search_in_fp8(
    problem: PlanningProblem, scorer: TemplateScorer, budget: TimeBudget, progress: Progress | None
) -> SearchResult:
    """The best plan whose stages may be in fp8, or the best one without it where that is faster: what fp8 needs of
    memory for a while may be missing, and the search is no complete one."""
    plain_problem = problem.without_fp8()
    unquantised = make_scorer(plain_problem)
    try:
        result = _search_all(problem, scorer, budget, progress)
    except UserError:
        result = _search_all(plain_problem, unquantised, budget, progress)
        result.best, result.scorer, result.others = _unquantised(result.best, problem, scorer), scorer, []
        return result
    beaten = result.best.step_seconds <= work_bound(unquantised, problem.model, problem.global_batch_size)
    if not beaten and not budget.over():
        with budget.catching():
            plain_plan = _unquantised(_search_all(plain_problem, unquantised, budget, None).best, problem, scorer)
            if plain_plan.step_seconds < result.best.step_seconds:
                result.best, result.others = plain_plan, [result.best, *result.others]
    return result


def _unquantised(plan: SimulatedPlan, problem: PlanningProblem, scorer: TemplateScorer) -> SimulatedPlan:
    """A plan that was found without fp8, with the stages in fp8 where that pays if it fits into memory so."""
    unquantised = without_fp8(plan.plan, problem.dtype)
    for candidate in (with_dtypes(unquantised, scorer.costs), unquantised):
        prediction = predict(candidate, problem.model, problem.cluster, problem.dtype, scorer.costs)
        if not prediction.over:
            break
    return replace(plan, plan=candidate, prediction=prediction)


def _search(
    problem: PlanningProblem,
    scorer: TemplateScorer,
    budget: TimeBudget,
    progress: Progress | None,
    plain: bool = True,
) -> SearchResult:
    """``plain``: False when it is known that nothing fits with all optimizers on the chips."""
    templates = _templates(problem, scorer, budget, progress, plain)
    templates.incumbent.plans[:] = simulate_best(templates.incumbent.ranked(), problem, scorer, budget)
    context_tried, fits = False, bool(templates.incumbent.plans)
    if not (context_outcome := why_no_context(problem.space, problem.seq_length, fits)):
        context = ContextStages()
        context.propose(problem, templates.incumbent)
        context_outcome, context_tried = context.why, context.tried
    expert_outcome = ""
    if problem.model.moe is not None:
        experts = ExpertStages()
        experts.propose(problem, templates.incumbent)
        expert_outcome = experts.why
    plans, evaluated, margin = templates.incumbent.plans, scorer.evaluated, problem.options.costs.margin
    while not plans and templates.incumbent.ranked() and margin < MARGIN:
        # States placed exactly take slightly more than the scorer's mean: search again with more memory kept free.
        margin += MARGIN / 2
        roomy = make_scorer(problem.with_margin(margin))
        templates = _templates(problem, roomy, budget, progress, plain)
        plans, evaluated = (
            simulate_best(templates.incumbent.ranked(), problem, scorer, budget),
            evaluated + roomy.evaluated,
        )
    divided_outcome = ""
    templates.incumbent.plans[:] = plans
    if not plans or plans[0].saves_memory:
        divided = DividedStages()
        divided.propose(problem, templates.incumbent)
        divided_outcome = divided.why
    plans = templates.incumbent.plans
    if budget.interrupted and not plans:
        raise KeyboardInterrupt
    if not plans and problem.space.offload == "auto" and problem.can_offload:
        return _search(problem.with_space(offload="always"), scorer, budget, progress, plain=False)
    if not plans and budget.cut:
        raise UserError("none of the plans found by then fits", field="--time-limit", accepted="a longer one, or none")
    if not plans:
        raise refuse(problem, scorer)
    return SearchResult(
        plans[0], plans[1:], scorer.pool, scorer, 0.0, evaluated, dict(templates.incumbent.rejected),
        templates.complete, templates.method, context_outcome, context_tried, problem.space.offload == "always",
        ranked=tuple(row[2] for row in templates.incumbent.rows), experts=expert_outcome, divided=divided_outcome,
        by_groups=tuple(row[2] for row in templates.incumbent.by_groups.values()),
    )  # fmt: skip


@dataclass
class _Templates:
    """Result of the template proposers."""

    incumbent: Incumbent
    complete: bool
    method: str


def _templates(
    problem: PlanningProblem, scorer: TemplateScorer, budget: TimeBudget, progress: Progress | None, plain: bool
) -> _Templates:
    incumbent, large = Incumbent(problem, scorer, budget, progress=progress), len(scorer.pool.groups) > MOST_GROUPS
    proposers: list[Proposer] = []
    if plain:
        proposers = [UniformSeeds(), GraphPartition() if large else PipelineDP(), LocalSearch()]
        proposers += [] if large else [Parts(), SmallClusters()]
    if problem.space.offload == "always":
        proposers.append(Offloaded())
    complete = True
    with budget.catching():
        complete = all(proposer.propose(problem, incumbent) for proposer in proposers)
    if budget.interrupted and not incumbent.rows:
        raise KeyboardInterrupt
    return _Templates(incumbent, complete and not budget.cut, "islands" if large else "programs")


def search_or_error(problem: PlanningProblem, budget: TimeBudget | None = None) -> SearchResult | UserError:
    """The search result, or the UserError when nothing fits."""
    try:
        return search(problem, budget=budget)
    except UserError as error:
        return error


def search_types_alone(
    result: SearchResult, problem: PlanningProblem, budget: TimeBudget, progress: Progress | None = None
) -> bool:
    """Search the chips of each type alone and store each result or UserError in ``result.alone``. Existing entries are
    kept; searches that are cut short are not stored; with a single type nothing is done.

    Returns:
        Whether all types were searched.
    """
    chips = list(dict.fromkeys(group.chip for group in result.pool.groups))
    for chip in (chip for chip in chips if chip not in result.alone and len(chips) > 1):
        if budget.over():
            return False
        if progress is not None:
            progress(f"{chip} alone")
        try:
            outcome = search_or_error(problem.on(of_type(problem.cluster, chip)), budget)
        except KeyboardInterrupt:
            if budget.interrupted:
                raise
            budget.stop()
            return False
        if budget.cut:
            return False
        result.alone[chip] = outcome
    return True

EVERY_SUBSET = 3  # up to so many chip types, every subset is tried


class Offloaded:
    """Proposes plans with the optimizers of all, then of some chip types in host memory, then moves single stages."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        pool = incumbent.scorer.pool
        many_groups, chips = len(pool.groups) > MOST_GROUPS, sorted({g.chip for g in pool.groups})
        for offloaded in self._sets(chips):
            offloading = incumbent.on(incumbent.scorer.offloading(offloaded))
            proposers: list[Proposer] = [GraphPartition() if many_groups else PipelineDP()]
            if len(offloaded) == len(chips) and not many_groups:
                proposers.append(Parts(incumbent))
            if not all(proposer.propose(problem, offloading) for proposer in proposers):
                return False
        return LocalSearch().propose(problem, incumbent)

    @staticmethod
    def _sets(chips: Sequence[str]) -> list[frozenset[str]]:
        counts = range(len(chips), 0, -1) if len(chips) <= EVERY_SUBSET else (len(chips), 1)
        return [frozenset(x) for n in counts for x in itertools.combinations(chips, n)]
