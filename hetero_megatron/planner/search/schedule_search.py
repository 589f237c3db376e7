"""The best plans under schedules made for their own stages, with one chunk of layers per stage or several.

Templates are searched under 1F1B, which has fast times. What is best there, on every set of node groups and
of every other structure (replicas, stages, micro-batch size), is estimated under a schedule made for it
(:mod:`schedule_times`); from the best, hill climbing goes on by such estimates: layers, recompute and order of stages,
micro-batches. The best of these become concrete plans, schedules are made for them, and the step simulator decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem, SearchSpace, SearchWork
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan, simulate_template
from hetero_megatron.planner.search.local_search import climb, inner_replicas_as_pipelines, shapes_near
from hetero_megatron.planner.search.pipeline_dp import Structure, pipelines_of_each_structure, structure
from hetero_megatron.planner.search.schedule_times import (
    CHUNKED,
    SCHEDULE_NEAR,
    Rules,
    ScheduleScorer,
    pipeline_times,
    without_context,
)
from hetero_megatron.planner.template.plan_template import PipelineReplicas, PipelineTemplate, PlanTemplate
from hetero_megatron.plans import Plan, supports, validate
from hetero_megatron.plans.program import ADAPTIVE
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.stage_orders import PipelineTimes
from hetero_megatron.schedule.stored import stored_orders

STARTS = 2  # plans that are tried under other schedules
FEW = 64  # chips, up to which this is done without being asked for
CHUNKS = (2, 3)  # of layers per stage, that schedules are made for beside one; of the best plan
MOST_PIPELINES = 4  # unlike ones, that a schedule is made for
EFFORT, CHUNKED_EFFORT = 300_000, 40_000  # actions that may be timed for one pipeline of a plan; with several chunks
FIRST = 0.12  # of that with one chunk, before it is known which plan is the fastest
TRIED, CHUNKED_TRIED = 12_000, 6_000  # the same for an estimate
CLIMBING, CHUNKED_CLIMBING = 4_000, 3_000  # and where the rules of a similar template are known
WORK, OTHER_WORK, CHUNKED_WORK = 300_000, 120_000, 200_000  # of climbing, in actions timed: from the best, from others
LEAST_WORK = 5 / 8  # of what a search may do in all, which is left for this, however much was done before
KEPT = 5 / 32  # of the same, for the simulation of the best and their schedules
MOST_MOVES, LEAST_GAIN = 2_000, 1e-6
STRUCTURES, SETS, OTHERS = 12, 6, 3  # that are tried: structures, sets of node groups; those climbed from
SETS_BESIDE = 3  # further sets of node groups that are climbed from
NEAR, ALIKE = 1.05, 1.002  # climbing starts from what is so near to the best; estimates that say no difference
SIMULATED, WITHIN = 3, 1.01  # plans that are simulated in the end; the others only if so near to the best estimate


@dataclass(frozen=True, order=True)
class _Candidate:
    """A template under a schedule made by ``rules`` for so many chunks of layers per stage, by its estimate."""

    seconds: float
    chunks: int
    template: PlanTemplate = field(compare=False)
    rules: Rules = field(compare=False)


class ScheduleSearch:
    """Proposes plans under schedules made for them, where the space allows it. ``by_groups``: the best template on each
    set of node groups; the fastest under 1F1B need not be the fastest then."""

    def __init__(self, by_groups: Sequence[PlanTemplate] = ()) -> None:
        self.by_groups = by_groups

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        space = problem.space
        too_many = incumbent.scorer.pool.chips > FEW
        if space.more_schedules == "never" or (space.more_schedules == "auto" and too_many):
            return True
        if not supports("schedule.adaptive"):
            return True
        work = incumbent.scorer.work
        work.most = max(work.most, work.done + LEAST_WORK * problem.options.work * space.schedule_effort)
        starts = [p for p in incumbent.plans if any(len(pipeline.stages) > 1 for pipeline in p.plan.pipelines)]
        for start in starts[:STARTS]:
            for chunks in (1, *CHUNKS) if not start.template.parts else ():
                if incumbent.should_stop() or work.over():
                    return False
                self._try(start, chunks, 1.0, problem, incumbent)
        templates = [start.template for start in starts[:STARTS] if start.template.parts]
        return self._try_best(self._best(templates, problem, incumbent), problem, incumbent)

    def _best(
        self, starts: Sequence[PlanTemplate], problem: PlanningProblem, incumbent: Incumbent
    ) -> list[_Candidate]:
        """The best by estimate: of ``starts``, of those on other sets of node groups and of other structures, and of
        what climbing from the best of them finds."""
        scorer, effort = ScheduleScorer(incumbent.scorer), problem.space.schedule_effort
        reserve = KEPT * problem.options.work * effort
        tried, candidates, limit = {structure(x) for x in starts}, list[_Candidate](), math.inf
        groups_of_templates = itertools.chain(
            ([x] for x in starts), self._on_other_groups(incumbent),
            self._untried(problem, incumbent, NEAR * incumbent.plans[0].step_seconds, tried),
        )  # fmt: skip
        for templates in groups_of_templates:
            if incumbent.should_stop() or (candidates and scorer.work.over(reserve)):
                break
            rows = [_estimate(scorer, x, 1, effort, limit) for x in templates if problem.space.allows(x)]
            candidates += [x for x in rows if x.seconds < math.inf]
            limit = NEAR * min((x.seconds for x in candidates), default=math.inf)
        best, cut = list[_Candidate](), list[_Candidate]()
        climbed = [x for x in _unlike(candidates)[:OTHERS] if x.seconds < limit]
        for i, start in enumerate([*climbed, *self._on_sets_beside(climbed, scorer, effort, reserve, incumbent)]):
            if best and (
                scorer.work.over(reserve) or _least_seconds(start.template, scorer.scorer) >= min(best).seconds
            ):
                continue
            climbed_to = self._climbed(start, scorer, problem, incumbent, OTHER_WORK if i else WORK)
            if best and climbed_to.seconds < min(best).seconds:
                climbed_to = self._climbed(climbed_to, scorer, problem, incumbent, WORK - OTHER_WORK)
            best.append(climbed_to)
            limit_near = NEAR * min(best).seconds
            chunks = [n for n in (CHUNKS if climbed_to is min(best) else CHUNKS[:1]) if not scorer.work.over(reserve)]
            cut += [_estimate(scorer, climbed_to.template, n, effort, limit_near) for n in chunks]
        if cut and min(cut).seconds < NEAR * min(best).seconds:
            best.append(self._climbed(min(cut), scorer, problem, incumbent, CHUNKED_WORK))
        return sorted(best)

    def _on_sets_beside(
        self, candidates: Sequence[_Candidate], scorer: ScheduleScorer, effort: float, kept: float, incumbent: Incumbent
    ) -> Iterator[_Candidate]:
        """The template on each of a few other sets of node groups than those of ``candidates``, however slow it seems
        before climbing: fewer chips may be faster than all of them, once their schedule is theirs."""
        sets = {_node_groups(x.template) for x in candidates}
        for (template,) in self._on_other_groups(incumbent):
            if len(sets) >= len(candidates) + SETS_BESIDE or incumbent.should_stop() or scorer.work.over(kept):
                return
            if _node_groups(template) not in sets:
                sets.add(_node_groups(template))
                candidate = _estimate(scorer, template, 1, effort, math.inf)
                if candidate.seconds < math.inf:
                    yield candidate

    @staticmethod
    def _climbed(
        start: _Candidate, scorer: ScheduleScorer, problem: PlanningProblem, incumbent: Incumbent, work: int
    ) -> _Candidate:
        """The best of other templates, tried with so much work at most."""
        best, space, all_done = start, problem.space, scorer.work
        reserve = KEPT * problem.options.work * space.schedule_effort
        last_action = all_done.done + work * space.schedule_effort

        def improves(template: PlanTemplate) -> bool:
            nonlocal best
            limit = best.seconds * (1 - LEAST_GAIN)
            if all_done.done >= last_action or all_done.over(reserve) or incumbent.should_stop():
                return False
            if _least_seconds(template, scorer.scorer) >= limit or not space.allows(template):
                return False
            candidate = _estimate(scorer, template, best.chunks, space.schedule_effort, limit, best.rules)
            if candidate.seconds < limit:
                best = candidate
            return best is candidate

        def neighbours(template: PlanTemplate) -> Iterator[PlanTemplate]:
            """Those of the same structure first, and of these where the busiest stage leaves the best chance."""
            own_structure = structure(template)
            rows = [
                (structure(x) != own_structure, _least_seconds(x, scorer.scorer), x) for x in _near(template, space)
            ]
            return (x for *_, x in sorted(rows, key=lambda row: row[:2]))

        climb(best.template, neighbours, improves, MOST_MOVES)
        return best

    def _try_best(self, best: Sequence[_Candidate], problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Simulate the best candidates; False where the incumbent said to stop."""
        fastest, work = None, incumbent.scorer.work
        for i, candidate in enumerate(best):
            if fastest is not None and (i >= SIMULATED or candidate.seconds > WITHIN * best[0].seconds):
                break
            if incumbent.should_stop() or (i and work.over()):
                return False
            start = simulate_template(candidate.template, problem, incumbent.scorer)
            if start is None:
                continue
            if not start.prediction.over and start.step_seconds < incumbent.plans[0].step_seconds:
                incumbent.take_plan(start)
            if self._try(start, candidate.chunks, FIRST if candidate.chunks == 1 else 1.0, problem, incumbent):
                fastest = start, candidate.chunks
        if fastest is not None and fastest[1] == 1 and not incumbent.should_stop():
            self._try(*fastest, 1.0, problem, incumbent)
        return not incumbent.should_stop()

    @staticmethod
    def _try(
        start: SimulatedPlan, chunks: int, effort: float, problem: PlanningProblem, incumbent: Incumbent
    ) -> bool:
        """Whether a plan is the fastest under a schedule made for it; ``effort``: the part of what may be taken."""
        costs, cut = incumbent.scorer.costs, start.plan if chunks == 1 else interleaved(start.plan, chunks)
        timed_actions = effort * problem.space.schedule_effort * (EFFORT if chunks == 1 else CHUNKED_EFFORT)
        adapted_plan = (
            None if cut is None else adapted(cut, start.prediction, costs, int(timed_actions), incumbent.scorer.work)
        )
        simulated = None if adapted_plan is None else _simulated(start, adapted_plan, problem, costs)
        if simulated is None or simulated.step_seconds >= incumbent.plans[0].step_seconds:
            return False
        incumbent.take_plan(simulated)
        return True

    def _on_other_groups(self, incumbent: Incumbent) -> Iterator[list[PlanTemplate]]:
        """The template on each set of node groups whose busiest stage leaves it a chance, the best chance first."""
        planned = {plan.template for plan in incumbent.plans}
        rows = [(_least_seconds(x, incumbent.scorer), i, x) for i, x in enumerate(self.by_groups) if x not in planned]
        for seconds, _, template in sorted(rows, key=lambda row: row[:2])[:SETS]:
            if seconds < incumbent.plans[0].step_seconds and any(len(x.shape.stages) > 1 for x in template.parts):
                yield [template]

    @staticmethod
    def _untried(
        problem: PlanningProblem, incumbent: Incumbent, limit: float, tried: set[Structure]
    ) -> Iterator[list[PlanTemplate]]:
        if len(incumbent.scorer.pool.groups) > MOST_GROUPS:
            return
        for templates in pipelines_of_each_structure(problem, incumbent, limit):
            if len(tried) >= STRUCTURES:
                return
            if structure(templates[0]) not in tried:
                tried.add(structure(templates[0]))
                yield templates


def _unlike(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The best that differ in more than in how their replicas are spelled, the best first. Of those which only differ
    in that, and hardly in seconds, the one with most pipelines."""
    best: dict[str, _Candidate] = {}
    for candidate in sorted(candidates):
        parts = [(part.copies, part.shape.micro_batch_size, part.shape.stages) for part in candidate.template.parts]
        key = repr([(n * x[0].dp, size // x[0].dp, [(s.group, s.tp, s.layers) for s in x]) for n, size, x in parts])
        listed = best.setdefault(key, candidate)
        if candidate.template.pipelines > listed.template.pipelines and candidate.seconds < ALIKE * listed.seconds:
            best[key] = candidate
    return list(best.values())


def _estimate(
    scorer: ScheduleScorer, template: PlanTemplate, chunks: int, effort: float, limit: float, rules: Rules = ()
) -> _Candidate:
    """``rules``: of a similar template."""
    if all(len(part.shape.stages) == 1 for part in template.parts) or len(template.parts) > MOST_PIPELINES:
        return _Candidate(math.inf, chunks, template, ())
    timed_actions = (CHUNKED_CLIMBING if rules else CHUNKED_TRIED) if chunks > 1 else CLIMBING if rules else TRIED
    seconds, rules_used = scorer.estimate(template, chunks, int(effort * timed_actions), limit, rules)
    return _Candidate(seconds, chunks, template, rules_used)


def _simulated(start: SimulatedPlan, plan: Plan, problem: PlanningProblem, costs: CostModel) -> SimulatedPlan | None:
    """None where it does not fit, or cannot run."""
    try:
        validate(plan, problem.model, problem.cluster, dtype=problem.dtype)
    except UserError:
        return None
    sync = start.prediction.sync if plan.stages == start.plan.stages else None
    prediction = predict(plan, problem.model, problem.cluster, problem.dtype, costs, sync=sync)
    return None if prediction.over else replace(start, plan=plan, prediction=prediction)


def _node_groups(template: PlanTemplate) -> frozenset[object]:
    """On which a template has stages."""
    return frozenset(stage.group for part in template.parts for stage in part.shape.stages)


def _least_seconds(template: PlanTemplate, scorer: TemplateScorer) -> float:
    """Seconds of compute of the busiest stage."""
    rows = ((part.num_micro_batches, *scorer.stage_seconds(part.shape)) for part in template.parts)
    return max(count * max(map(sum, zip(forward, backward))) for count, forward, backward in rows)


def _near(template: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    """With one move in one part: inner replicas as pipelines, moves of local search, recompute of a stage on or off,
    exchanges with a layer."""
    yield from inner_replicas_as_pipelines(template, space)
    for p, part in enumerate(template.parts):
        count, size = part.num_micro_batches, part.shape.micro_batch_size
        shapes = [(shape, count) for shape in shapes_near(part.shape, space)]
        if space.micro_batch_sizes is None and count % 2 == 0:
            shapes.append((replace(part.shape, micro_batch_size=2 * size), count // 2))
        if space.micro_batch_sizes is None and size % 2 == 0 and all(size // 2 % s.dp == 0 for s in part.shape.stages):
            shapes.append((replace(part.shape, micro_batch_size=size // 2), 2 * count))
        for s, stage in enumerate(part.shape.stages if space.recompute is None else ()):
            toggled = replace(stage.plain, recompute="none" if stage.recompute != "none" else "full")
            shapes.append((part.shape.with_stages({s: toggled}), count))
        yield from (_with_part(template, p, shape, m) for shape, m in shapes)
    for p, part in enumerate(template.parts):
        for shape in _swapped_and_moved(part.shape):
            yield _with_part(template, p, shape, part.num_micro_batches)


def _with_part(template: PlanTemplate, p: int, shape: PipelineTemplate, micro_batches: int) -> PlanTemplate:
    """Other pipelines as part ``p``. A stage that gave away a layer recomputes no more than it has left, nor has
    more in host memory."""
    stages = tuple(replace(x, first=min(x.first, x.layers), away=min(x.away, x.layers)) for x in shape.stages)
    copies = template.parts[p].copies
    return template.with_part(p, PipelineReplicas(replace(shape, stages=stages), copies, micro_batches))


def _swapped_and_moved(shape: PipelineTemplate) -> Iterator[PipelineTemplate]:
    """Neighbouring stages exchanged, and a layer moved between them: where either alone would be slower."""
    for i, (a, b) in enumerate(itertools.pairwise(shape.stages)):
        for n in (-1, 1):
            if a.layers + n > 0 and b.layers - n > 0:
                yield shape.with_stages({i: replace(b, layers=b.layers - n), i + 1: replace(a, layers=a.layers + n)})


def interleaved(plan: Plan, chunks: int) -> Plan | None:
    """The plan with the layers of every stage cut into so many runs, some of which may be empty; None where half of
    those of a stage would be, where only some layers are recomputed, or where the ends are not at the ends."""
    pipelines = []
    for pipeline in plan.pipelines:
        first, last = pipeline.stages[0], pipeline.stages[-1]
        if any(2 * s.num_layers < chunks or s.recompute.kind == "first" for s in pipeline.stages):
            return None
        if not (first.embed and last.head):
            return None
        start, layers = 0, [list[tuple[int, int]]() for _ in pipeline.stages]
        for c in range(chunks):
            for s, stage in enumerate(pipeline.stages):
                count = stage.num_layers * (c + 1) // chunks - stage.num_layers * c // chunks
                layers[s].append((start, start + count))
                start += count
        stages = tuple(replace(s, layers=tuple(x)) for s, x in zip(pipeline.stages, layers, strict=True))
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, schedule="interleaved", pipelines=tuple(pipelines))


def adapted(
    plan: Plan, prediction: Prediction, costs: CostModel, effort: int = EFFORT, work: SearchWork | None = None
) -> Plan | None:
    """The plan with a schedule made for each of its pipelines; None where it stays 1F1B, or interleaved 1F1B.

    Args:
        prediction: of the plan under 1F1B; for one with several chunks, before its layers were cut.
        effort: actions that may be timed for each pipeline.
        work: of the search that this is part of, which has so much left at most; None: of its own.
    """
    prices, work = StageCosts(plan, costs), work or SearchWork()
    if not without_context(plan):
        return None
    orders_by_times: dict[PipelineTimes | ChunkedTimes, tuple[str, ...]] = {}
    pipelines, tails = [], _tails(prediction, plan, prices)
    for pipeline in plan.pipelines:
        priced = prices.of(pipeline)
        times = pipeline_times(prediction, pipeline, priced, costs, tails[id(priced)])
        if times is None:
            return None
        if times not in orders_by_times:
            if len(orders_by_times) == MOST_PIPELINES:
                return None
            action_cost, count = 1 if isinstance(times, PipelineTimes) else CHUNKED, pipeline.num_micro_batches
            timed_actions = int(min(effort, work.left() / action_cost))
            searched = (
                search_adaptive(times, count, timed_actions, SCHEDULE_NEAR) if isinstance(times, PipelineTimes)
                else search_adaptive_chunks(times, count, timed_actions, SCHEDULE_NEAR)
            )  # fmt: skip
            work.add(action_cost * searched.timed_actions)
            orders_by_times[times] = stored_orders(searched.schedule) if searched.schedule.name == ADAPTIVE else ()
        pipelines.append(replace(pipeline, orders=orders_by_times[times]))
    return replace(plan, schedule=ADAPTIVE, pipelines=tuple(pipelines)) if any(orders_by_times.values()) else None


def _tails(prediction: Prediction, plan: Plan, prices: StageCosts) -> dict[int, tuple[float, ...]]:
    """By the identity of a pipeline's costs, seconds of gradient reduction after each stage: of the slowest of the
    pipelines that cost the same."""
    by_costs = dict[int, tuple[float, ...]]()
    for pipeline in plan.pipelines:
        key, stage_tails = id(prices.of(pipeline)), [max(prediction.tails[r] for r in s.ranks) for s in pipeline.stages]
        by_costs[key] = tuple(map(max, stage_tails, by_costs.get(key, stage_tails)))
    return by_costs
