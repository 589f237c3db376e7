"""HeteroAuto: the best plan of a model on a mixed cluster.

``search`` enumerates completely where that is possible (``search_small``), else uses dynamic programs and a beam search
(``search_large``; for many kinds of nodes part by part, ``graph``); on all chips and on each type alone. Uniform plans
are always among the candidates, stages of context groups where sequences are long (``context_stages``), optimizers in
host memory where asked for and where nothing fits without. The best few by exact evaluation of their shape are placed
on ranks and judged by ``predict``; the result is a canonical plan that validates.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plan import supports
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.memory import cannot_offload
from hetero_megatron.planner.estimate.stage_table import StageTables
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.search.enumeration import Enumeration
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS, GraphPartition
from hetero_megatron.planner.search.incumbent import (
    DEFAULTS,
    Incumbent,
    JudgedPlan,
    Progress,
    Row,
    SearchOptions,
    judge,
    judge_template,
)
from hetero_megatron.planner.search.local_search import polish
from hetero_megatron.planner.search.pipeline_dp import PipelineDP
from hetero_megatron.planner.search.tp_moves import regroup
from hetero_megatron.planner.search.uniform import few_uniform
from hetero_megatron.planner.template.device_pool import DeviceGroup, DevicePool, make_pool
from hetero_megatron.planner.template.placement import shrink
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.planner.template.search_space import SearchSpace, why_no_context
from hetero_megatron.planner.time_budget import TimeBudget
from hetero_megatron.spec import ModelSpec

__all__ = [
    "JudgedPlan", "Progress", "SearchOptions", "SearchResult", "judge", "make_evaluator", "search",
    "search_part", "search_types_alone",
]  # fmt: skip
MARGIN = 0.1  # of memory, up to which the search leaves more and more room when nothing it finds fits exactly
POLISH = 240  # evaluations of changes to each of the two best plans, on large clusters fewer
EVERY_SUBSET = 3  # chip types, up to which every set of them is tried with optimizers in host memory
DEPTH = 48  # pipeline stages that the search goes up to


@dataclass
class SearchResult:
    """What a search found. ``others``: the runners-up, best first; ``rejected``: how many candidates were dropped for
    what; ``complete``: nothing was cut short; ``lower_bound``: seconds that no plan of the space beats (0: not computed
    here); ``context``: what came of trying stages of context groups; ``context_tried``: whether there were any;
    ``offload_tried``: whether plans with optimizers in host memory were among them; ``unlike_groups``: whether the best
    has TP groups of unlike chips; ``ranked``: the best candidates by
    evaluation, also those that were not made concrete; ``alone``: where each chip type was searched alone, by chip;
    ``parts``: what came of searching parts of a cluster, by an objective beside speed."""

    best: JudgedPlan
    others: list[JudgedPlan]
    pool: DevicePool
    evaluator: TemplateScorer
    seconds: float
    evaluated: int
    rejected: dict[str, int] = field(default_factory=dict)
    complete: bool = True
    method: str = ""
    lower_bound: float = 0.0
    context: str = ""
    context_tried: bool = False
    offload_tried: bool = False
    unlike_groups: bool = False
    ranked: tuple[PlanTemplate, ...] = ()
    alone: dict[str, SearchResult | UserError] = field(default_factory=dict)
    parts: str = ""


def make_evaluator(
    model: ModelSpec, cluster: Cluster, seq_length: int, options: SearchOptions, costs: CostModel | None = None
) -> TemplateScorer:
    """Tables and evaluator over the chips of a cluster that compute in the dtype."""
    costs = costs or CostModel(model, cluster, seq_length, options.dtype, options.costs)
    known = costs.rates
    pool = make_pool(cluster, lambda a, b: known.link(a, b).as_link(), options.dtype)
    depth = min(DEPTH if pool.chips <= 512 else 32, model.num_layers + 2, max(pool.chips, 16))
    return TemplateScorer(StageTables(costs, pool, model.num_layers, depth), pool)


def search(
    model: ModelSpec,
    cluster: Cluster,
    seq_length: int,
    global_batch_size: int,
    options: SearchOptions = DEFAULTS,
    *,
    progress: Progress | None = None,
    evaluator: TemplateScorer | None = None,
    watch: TimeBudget | None = None,
) -> SearchResult:
    """The best plan found.

    Args:
        watch: that of the searches which this is one of; else its own, with the options' time limit.

    Raises:
        UserError: a batch or sequence that no plan can have, missing rates or links, or a model that fits nowhere; the
            message says the smallest change that would help.
        KeyboardInterrupt: Ctrl-C before any plan was found, or a second one.
    """
    check_request(model, seq_length, global_batch_size, options)
    watch, started = watch or TimeBudget(options.time_limit), time.monotonic()
    evaluator = evaluator or make_evaluator(model, cluster, seq_length, options)
    result = _search(model, cluster, seq_length, global_batch_size, options, progress, evaluator, watch)
    if result.method == "enumeration" and result.complete and len({g.chip for g in result.pool.groups}) > 1:
        with watch.catching():
            _add_types_alone(result, model, cluster, seq_length, global_batch_size, options, watch)
            _add_unlike_groups(result, model, cluster, global_batch_size, options, watch)
    result.complete = result.complete and not watch.cut
    result.seconds = time.monotonic() - started
    return result


def _add_unlike_groups(
    result: SearchResult, model: ModelSpec, cluster: Cluster, batch: int, options: SearchOptions, watch: TimeBudget
) -> None:
    """The best plan with TP groups of unlike chips, where that is faster than all others."""
    if not options.space.unlike_tp or watch.over():
        return
    from hetero_megatron.planner.search.hetero_tp import HeteroTP

    search_ = HeteroTP(model, cluster, result.evaluator, batch, options.space)
    best = search_.run(result.best.step_seconds, watch.over)
    if best is not None:
        used = set(best.plan.ranks)
        idle = tuple(r for g in result.pool.groups for node in g.ranks for r in node if r not in used)
        result.others = [result.best, *result.others]
        result.best = JudgedPlan(best.plan, cluster, PlanTemplate(()), best.prediction, tuple(sorted(idle)), best.text)
        result.lower_bound, result.unlike_groups = 0.0, True  # the enumeration's is without


def _add_types_alone(
    result: SearchResult, model: ModelSpec, cluster: Cluster, seq_length: int, batch: int, options: SearchOptions,
    watch: TimeBudget,
) -> None:  # fmt: skip
    """Also what is best on each chip type alone: the enumeration does not go into what it evaluates slower than its
    best, which prediction may see the other way round, nor into optimizers in host memory where all chips do without.
    """
    search_types_alone(result, model, cluster, seq_length, batch, options, watch)
    choices = [result.best, *result.others]
    for chip, own in result.alone.items():
        if isinstance(own, UserError):
            continue
        groups = [g for g, group in enumerate(result.pool.groups) if group.chip == chip]
        # With context groups there is no candidate: those are tried on all chips too. Where links to other types are
        # all that tells node groups apart, they are one group alone.
        alike = [_make_up(g) for g in own.pool.groups] == [_make_up(result.pool.groups[g]) for g in groups]
        if alike and not own.best.text:
            choice = judge_template(
                own.best.candidate.over(groups), cluster, model, seq_length, options, result.evaluator
            )
            if choice is not None and not choice.prediction.over and all(choice.plan != x.plan for x in choices):
                choices.append(choice)
    choices.sort(key=lambda choice: choice.step_seconds)
    result.best, result.others = choices[0], choices[1:]
    result.lower_bound = min(result.lower_bound, choices[0].step_seconds)
    if any(stage.offload for part in choices[0].candidate.parts for stage in part.shape.stages):
        result.lower_bound, result.offload_tried = 0.0, True  # the enumeration's is without


def search_part(
    model: ModelSpec, cluster: Cluster, keep: Sequence[int], seq_length: int, batch: int, options: SearchOptions,
    watch: TimeBudget,
) -> SearchResult | UserError:  # fmt: skip
    """Search these ranks of a cluster alone; a plan counts ranks as ``shrink`` numbers them. The error where nothing
    fits on them."""
    part = cluster if len(keep) == cluster.world_size else shrink(cluster, keep)
    try:
        return search(model, part, seq_length, batch, options, watch=watch)
    except UserError as error:
        return error


def search_types_alone(
    result: SearchResult, model: ModelSpec, cluster: Cluster, seq_length: int, batch: int, options: SearchOptions,
    watch: TimeBudget, progress: Progress | None = None,
) -> bool:  # fmt: skip
    """Search each chip type of ``cluster`` alone, and note in ``result.alone`` what was found, or why nothing fits.
    Those that are there already are kept; where there is one type, the result is of it. Nothing that was cut short is
    noted.

    Returns:
        whether none was left out.
    """
    chips = list(dict.fromkeys(group.chip for group in result.pool.groups))
    for chip in (chip for chip in chips if chip not in result.alone and len(chips) > 1):
        if watch.over():
            return False
        if progress is not None:
            progress(f"{chip} alone")
        try:
            keep = [rank.rank for rank in cluster.ranks if rank.chip == chip]
            own = search_part(model, cluster, keep, seq_length, batch, options, watch)
        except KeyboardInterrupt:
            if watch.interrupted:
                raise
            watch.stop()
            return False
        if watch.cut:
            return False
        result.alone[chip] = own
    return True


def _make_up(group: DeviceGroup) -> tuple[str, int, int]:
    return group.chip, group.per_node, group.nodes


def _search(
    model: ModelSpec,
    cluster: Cluster,
    seq_length: int,
    global_batch_size: int,
    options: SearchOptions,
    progress: Progress | None,
    evaluator: TemplateScorer,
    watch: TimeBudget,
    plain: bool = True,
) -> SearchResult:
    """``plain``: False where it is known that nothing fits with all optimizers on the chips."""
    space = replace(options.space, schedules=tuple(s for s in options.space.schedules if supports(f"schedule.{s}")))
    tried = replace(options, space=space)

    def judged(rows: list[Row]) -> list[JudgedPlan]:
        return judge(rows, cluster, model, seq_length, tried, evaluator, watch)

    found = _candidates(model, global_batch_size, tried, progress, evaluator, watch, plain, judged)
    choices, evaluated = judged(found.rows), evaluator.evaluated
    choices, why, with_groups = with_context(choices, model, cluster, global_batch_size, space, evaluator, watch)
    margin = options.costs.margin
    while not choices and found.rows and margin < MARGIN:
        # The exact placement of states takes a little more than their mean: leave more room, but only to search.
        margin += MARGIN / 2
        roomy = make_evaluator(model, cluster, seq_length, replace(tried, costs=replace(options.costs, margin=margin)))
        found = _candidates(model, global_batch_size, tried, progress, roomy, watch, plain, judged)
        found.bound = 0.0  # it is of less memory than plans may use
        choices, evaluated = judged(found.rows), evaluated + roomy.evaluated
    if watch.interrupted and not choices:
        raise KeyboardInterrupt
    if not choices and space.offload == "auto" and cannot_offload(options.costs.moments, options.dtype) is None:
        away = replace(options, space=replace(options.space, offload="always"))
        return _search(model, cluster, seq_length, global_batch_size, away, progress, evaluator, watch, plain=False)
    if not choices and watch.cut:
        raise UserError("none of the plans found by then fits", field="--time-limit", accepted="a longer one, or none")
    if not choices:
        from hetero_megatron.planner.search.infeasible import refuse

        raise refuse(model, cluster, evaluator, space)
    return SearchResult(
        choices[0], choices[1:], evaluator.pool, evaluator, 0.0, evaluated, found.rejected, found.complete,
        # The search's evaluation of the best plan may be a little above its prediction.
        found.method, min(found.bound, choices[0].step_seconds), why, with_groups,
        space.offload == "always", ranked=tuple(row[2] for row in found.best.rows),
    )  # fmt: skip


@dataclass
class _Candidates:
    """What a search evaluated. ``rows``: the best, uniform plans with them, to be predicted; ``bound``: seconds that
    none of its space beats, 0 where that is not known."""

    best: Incumbent
    rows: list[Row]
    rejected: dict[str, int]
    complete: bool
    method: str
    bound: float


def _candidates(
    model: ModelSpec,
    batch: int,
    options: SearchOptions,
    progress: Progress | None,
    evaluator: TemplateScorer,
    watch: TimeBudget,
    plain: bool,
    judged: Callable[[list[Row]], list[JudgedPlan]],
) -> _Candidates:
    """Search; ``judged``: concrete plans of candidates that fit."""
    space = options.space
    best = Incumbent(max(options.top, 1) * 2, watch, progress)
    small = Enumeration(evaluator, model, batch, space, best.improve, best.late)
    many = len(evaluator.pool.groups) > MOST_GROUPS
    enumerate_all = options.exhaustive is not False and not many and small.possible()
    chosen: Enumeration | PipelineDP | GraphPartition = small
    if not enumerate_all:
        chosen = _by_programs(evaluator, model, batch, space, best, options.seed)
    complete = True
    uniform: list[Row] = []
    with watch.catching():
        if plain:
            _seeds(evaluator, model, batch, space, best)
            uniform = list(best.rows)
            if enumerate_all and judged(uniform[:1]):
                small.best = uniform[0][0]
            complete = _on_chips(chosen, evaluator, options, space, best)
        if complete and space.offload == "always":
            complete = _offloaded(evaluator, model, batch, options, space, best)
    if watch.interrupted and not best.rows:
        raise KeyboardInterrupt
    complete = complete and not watch.cut
    rows = sorted([*best.rows, *(row for row in uniform if row not in best.rows)], key=lambda row: row[:2])
    method = "enumeration" if enumerate_all else "islands" if many else "programs"
    proven = enumerate_all and complete and space.offload != "always"
    return _Candidates(best, rows, dict(chosen.rejected), complete, method, small.bound if proven else 0.0)


def _on_chips(
    chosen: Enumeration | PipelineDP | GraphPartition,
    evaluator: TemplateScorer,
    options: SearchOptions,
    space: SearchSpace,
    best: Incumbent,
) -> bool:
    """Search with all optimizers on the chips; what was not enumerated completely is improved in small steps."""
    complete = chosen.run()
    if not complete or isinstance(chosen, Enumeration):
        return complete
    complete = _polish(evaluator, space, best)
    if isinstance(chosen, PipelineDP):
        complete = complete and _each_type(chosen, best, evaluator)
        for candidate in best.make_ups() if options.regroup else ():
            seconds = best.rows[0][0]
            complete = complete and regroup(chosen.builder, candidate, seconds, space, options.regroup, best.improve)
    return complete


def _by_programs(
    evaluator: TemplateScorer, model: ModelSpec, batch: int, space: SearchSpace, best: Incumbent, seed: int
) -> PipelineDP | GraphPartition:
    """The search of clusters that cannot be enumerated."""
    if len(evaluator.pool.groups) > MOST_GROUPS:
        return GraphPartition(evaluator, model, batch, space, best, seed)
    return PipelineDP(evaluator, model, batch, space, best.improve, late=best.late)


def _each_type(whole: PipelineDP, best: Incumbent, evaluator: TemplateScorer) -> bool:
    """Search also on the chips of each type alone, where they could be faster than what was found: by the programs'
    measure a part of a cluster looks worse than its plans are once they are polished (with ``evaluator``)."""
    groups = whole.pool.groups
    for chip in sorted({g.chip for g in groups}) if len({g.chip for g in groups}) > 1 else ():
        counts = tuple(g.chips if g.chip == chip else 0 for g in groups)
        own = Incumbent(best.keep, best.watch, None, part_of=best)
        alone = PipelineDP(whole.evaluator, whole.model, whole.batch, whole.space, own.improve, counts, own.late)
        if best.rows and alone.least_seconds() >= best.rows[0][0]:
            continue
        complete = alone.run() and _polish(evaluator, whole.space, own)
        for seconds, _, candidate in own.rows:
            complete = best.improve(candidate, seconds) and complete
        if not complete:
            return False
    return True


def _offloaded(
    evaluator: TemplateScorer, model: ModelSpec, batch: int, options: SearchOptions, space: SearchSpace, best: Incumbent
) -> bool:
    """Search with the optimizers of all chip types in host memory, then of some of them; then stage by stage."""
    pool = evaluator.pool
    chips = sorted({g.chip for g in pool.groups})
    counts = range(len(chips), 0, -1) if len(chips) <= EVERY_SUBSET else (len(chips), 1)
    for away in (frozenset(x) for n in counts for x in itertools.combinations(chips, n)):
        there = TemplateScorer(evaluator.tables.over(pool, offload=away), pool, like=evaluator)
        whole = _by_programs(there, model, batch, space, best, options.seed)
        if not whole.run():
            return False
        # A type alone is the same in every set that it is in.
        if len(away) == len(chips) and isinstance(whole, PipelineDP) and not _each_type(whole, best, evaluator):
            return False
    return _polish(evaluator, space, best)


def _polish(evaluator: TemplateScorer, space: SearchSpace, best: Incumbent) -> bool:
    """Improve the best two in small steps."""
    effort = POLISH if evaluator.pool.chips <= 256 else POLISH // 8
    rows = list(best.rows[:2])
    return all(polish(evaluator, row[2], row[0], space, effort, best.improve, best.late) for row in rows)


def _seeds(evaluator: TemplateScorer, model: ModelSpec, batch: int, space: SearchSpace, best: Incumbent) -> None:
    """Uniform plans that the space allows."""
    if space.micro_batch_sizes is not None or space.recompute is not None or space.max_pipelines is not None:
        return
    for _, candidate in few_uniform(evaluator, model, batch, 4)[0]:
        score = evaluator.score(candidate)
        if score is not None and score.over == 0 and not best.improve(candidate, score.step_seconds):
            return


def with_context(
    choices: list[JudgedPlan],
    model: ModelSpec,
    cluster: Cluster,
    batch: int,
    space: SearchSpace,
    evaluator: TemplateScorer,
    watch: TimeBudget,
) -> tuple[list[JudgedPlan], str, bool]:
    """(the choices and plans with context groups, best first; what came of trying those; whether any was tried)."""
    why_not = (
        "not supported" if not supports("context") else why_no_context(space, evaluator.costs.seq_length, bool(choices))
    )
    if why_not:
        return choices, why_not, False
    if choices and watch.over():
        return choices, "not tried: the search was cut short", False
    from hetero_megatron.planner.search.context_stages import ContextStages, ContextStagesFound

    best = choices[0].step_seconds if choices else float("inf")
    found = ContextStagesFound([], "cut short")
    with watch.catching():
        found = ContextStages(model, cluster, evaluator.pool, evaluator.costs, batch, space).run(best, watch)
    new = [
        JudgedPlan(
            x.plan, cluster, PlanTemplate(()), x.prediction,
            tuple(sorted({r for g in evaluator.pool.groups for n in g.ranks for r in n} - set(x.plan.ranks))), x.text,
        )
        for x in found.plans
    ]  # fmt: skip
    every = sorted([*choices, *new], key=lambda choice: choice.step_seconds)
    why = found.why
    if new and every[0].text:
        why += f"; chosen, {best / every[0].step_seconds:.2f} x as fast as the best without" if choices else "; chosen"
        why += "" if choices else ", because nothing fits without"
    elif new:
        why += f"; the best takes {new[0].step_seconds / best:.2f} x as long as the plan without"
    return every, why, True


def check_request(model: ModelSpec, seq_length: int, batch: int, options: SearchOptions) -> None:
    """Refuse sizes that no plan can have."""
    if not 1 <= seq_length <= model.max_position_embeddings:
        raise UserError(
            f"the model has {model.max_position_embeddings} positions", field="--seq-length", value=seq_length,
            accepted=f"1 to {model.max_position_embeddings}",
        )  # fmt: skip
    problem = cannot_offload(options.costs.moments, options.dtype)
    if options.space.offload == "always" and problem is not None:
        raise UserError(problem[0], field="--offload", value="always", accepted="auto, never")
    if batch < 1:
        raise UserError("too small", field="--global-batch-size", value=batch, accepted="an integer >= 1")
    sizes = options.space.micro_batch_sizes
    if sizes is not None and len(sizes) == 1 and batch % sizes[0]:
        size = sizes[0]
        lower = batch // size * size
        near = f"{lower} or {lower + size}" if lower else str(size)
        raise UserError(
            f"cannot be divided into micro-batches of {size} sequences", field="--global-batch-size", value=batch,
            accepted=f"{near}, or --micro-batch-size 1",
        )  # fmt: skip
