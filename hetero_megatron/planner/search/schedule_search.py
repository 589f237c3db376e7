"""The best plans under further schedules: zero-bubble, interleaved, and one made for the plan's own stages.

Templates are searched under 1F1B and GPipe, which have fast times. What is best there is tried again, as a concrete
plan, under schedules that split the backward or cut stages into chunks; the step simulator decides. So is the best
template on every set of node groups, and the best pipeline of every other structure (replicas, stages, micro-batch
size), that could be faster under such a schedule. From the fastest of these, hill climbing goes on with the schedule's
own seconds: layers, recompute and order of stages, micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan, supports, validate
from hetero_megatron.plan.pipeline_schedule import ADAPTIVE
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, JudgedPlan, judge_template, placed_plan
from hetero_megatron.planner.search.local_search import climb, inner_replicas_as_pipelines, shapes_near
from hetero_megatron.planner.search.schedule_times import least_of_times, least_seconds, pipeline_times, without_context
from hetero_megatron.planner.search.structures import Structure, pipelines_of_each_structure, structure
from hetero_megatron.planner.template.placement import place
from hetero_megatron.planner.template.plan_template import PipelineReplicas, PipelineTemplate, PlanTemplate
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.pipeline_times import PipelineTimes
from hetero_megatron.schedule.stored import stored_orders

STARTS = 2  # plans that are tried under other schedules
FEW = 64  # chips, up to which this is done without being asked for
CHUNKS = (2, 3, 4)  # per stage, of the interleaved schedule
MOST_PIPELINES = 4  # unlike ones, that a schedule is made for
EFFORT, CLIMBING = 300_000, 20_000  # actions that may be timed for one pipeline, at the end and while climbing
CHUNKED_EFFORT, MOST_ADAPTED = 30_000, 2  # the same with several chunks, at the end; chunks of an adaptive schedule
MOVES, NEAR, LEAST_GAIN = 60, 1.05, 1e-6  # plans that climbing tries; it starts from what is so near to the best
STRUCTURES, SETS = 12, 6  # that are tried: structures, sets of node groups
OTHERS, OTHER_MOVES = 2, 30  # of those, how many are climbed from, and how far


class ScheduleSearch:
    """Proposes the best judged plans under other schedules, where the space allows it. ``by_groups``: the best template
    on each set of node groups; the fastest under 1F1B need not be the fastest then."""

    def __init__(self, by_groups: Sequence[PlanTemplate] = ()) -> None:
        self.by_groups = by_groups

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        space = problem.space
        restricted = space.schedules != SearchSpace.schedules or incumbent.scorer.pool.chips > FEW
        if space.more_schedules == "never" or (space.more_schedules == "auto" and restricted):
            return True
        costs, best = incumbent.scorer.costs, list[JudgedPlan]()
        starts = [p for p in incumbent.plans if any(len(pipeline.stages) > 1 for pipeline in p.plan.pipelines)]
        for start in starts[:STARTS]:
            for plan in self._variants(start, costs):
                if incumbent.should_stop():
                    return False
                found = self._judged(start, plan, problem, costs)
                if found is not None:
                    best.append(found)
                if found is not None and found.step_seconds < start.step_seconds:
                    incumbent.take_plan(found)
        first, chunked = (
            min((x for x in best if _is_chunked(x.plan) == own), key=lambda x: x.step_seconds, default=None)
            for own in (False, True)
        )
        start_here = first is not None and first.template.parts and _is_near(first, incumbent)
        if first is not None and start_here and not self._climb(first, None, problem, incumbent, MOVES):
            return False
        others = self._other_structures(problem, incumbent, {structure(x.template) for x in starts[:STARTS]})
        if chunked is not None and chunked.template.parts:
            others.append((chunked, None))
        for other, plain in sorted(others, key=lambda row: row[0].step_seconds)[:OTHERS]:
            if _is_near(other, incumbent) and not self._climb(other, plain, problem, incumbent, OTHER_MOVES):
                return False
        return not incumbent.should_stop()

    def _other_structures(
        self, problem: PlanningProblem, incumbent: Incumbent, tried: set[Structure]
    ) -> list[tuple[JudgedPlan, JudgedPlan | None]]:
        """The best on each other set of node groups and of each other structure, (under a schedule made for it in
        little time, which may be 1F1B, under 1F1B)."""
        found, scorer = list[tuple[JudgedPlan, JudgedPlan | None]](), incumbent.scorer
        limit = incumbent.plans[0].step_seconds
        for templates in itertools.chain(
            self._on_other_groups(incumbent), self._untried(problem, incumbent, NEAR * limit, tried)
        ):
            if incumbent.should_stop():
                break
            near = [template for template in templates if _bound(template, problem, scorer) < NEAR * limit]
            judged = [judge_template(template, problem, scorer) for template in near]
            start = min((x for x in judged if x is not None), key=lambda x: x.step_seconds, default=None)
            if start is None or _busiest(start) >= NEAR * limit:
                continue
            made = adapted(start.plan, start.prediction, scorer.costs, CLIMBING, NEAR * limit)
            if made is not None:
                other = self._judged(start, made, problem, scorer.costs)
            else:  # it stays 1F1B, or no schedule made for it seems near to the best
                other = None if start.prediction.over else start
            if other is not None:
                found.append((other, start))
                if other.step_seconds < incumbent.plans[0].step_seconds:
                    incumbent.take_plan(other)
        return found

    def _on_other_groups(self, incumbent: Incumbent) -> Iterator[list[PlanTemplate]]:
        """The template on each set of node groups whose busiest stage leaves it a chance, the best chance first."""
        known = {plan.template for plan in incumbent.plans}
        rows = [(_least_seconds(x, incumbent.scorer), i, x) for i, x in enumerate(self.by_groups) if x not in known]
        for seconds, _, template in sorted(rows, key=lambda row: row[:2])[:SETS]:
            if seconds < incumbent.plans[0].step_seconds and any(len(x.shape.stages) > 1 for x in template.parts):
                yield [template]

    @staticmethod
    def _untried(
        problem: PlanningProblem, incumbent: Incumbent, limit: float, tried: set[Structure]
    ) -> Iterator[list[PlanTemplate]]:
        for templates in pipelines_of_each_structure(problem, incumbent, limit):
            if len(tried) >= STRUCTURES:
                return
            if structure(templates[0]) not in tried:
                tried.add(structure(templates[0]))
                yield templates

    def _climb(
        self, best: JudgedPlan, plain: JudgedPlan | None, problem: PlanningProblem, incumbent: Incumbent, moves: int
    ) -> bool:
        """Other templates under the schedule of ``best``, so many at most; zero-bubble gives way to adaptive, which
        begins with it. ``plain``: ``best`` under 1F1B, where not all schedules have been tried for it yet."""
        scorer, chunks = incumbent.scorer, best.plan.pipelines[0].chunks

        def improves(template: PlanTemplate) -> bool:
            nonlocal best, plain
            if incumbent.should_stop() or _least_seconds(template, scorer) >= best.step_seconds:
                return False
            if _bound(template, problem, scorer, chunks) >= best.step_seconds:
                return False
            start = judge_template(template, problem, scorer)
            if start is None or _busiest(start) >= best.step_seconds:
                return False
            made = start.plan if chunks == 1 else interleaved(start.plan, chunks)
            if made is not None and best.plan.schedule != "interleaved":
                made = adapted(made, start.prediction, scorer.costs, CLIMBING, best.step_seconds)
            found = None if made is None else self._judged(start, made, problem, scorer.costs)
            if found is None or found.step_seconds >= best.step_seconds * (1 - LEAST_GAIN):
                return False
            best, plain = found, start
            return True

        climb(best.template, partial(_near, space=problem.space), improves, moves)
        if plain is None or best.step_seconds > incumbent.plans[0].step_seconds:
            return not incumbent.should_stop()
        if not plain.prediction.over:
            incumbent.take_plan(plain)
        if all(best is not known for known in incumbent.plans):
            incumbent.take_plan(best)
        for plan in self._variants(plain, scorer.costs):
            found = None if incumbent.should_stop() else self._judged(plain, plan, problem, scorer.costs)
            if found is not None and found.step_seconds < best.step_seconds:
                incumbent.take_plan(found)
        return not incumbent.should_stop()

    @staticmethod
    def _judged(start: JudgedPlan, plan: Plan, problem: PlanningProblem, costs: CostModel) -> JudgedPlan | None:
        """None where it does not fit, or cannot run."""
        try:
            validate(plan, problem.model, problem.cluster, dtype=problem.dtype)
        except UserError:
            return None
        sync = start.prediction.sync if plan.stages == start.plan.stages else None
        found = predict(plan, problem.model, problem.cluster, problem.dtype, costs, sync=sync)
        return None if found.over else replace(start, plan=plan, prediction=found)

    @staticmethod
    def _variants(start: JudgedPlan, costs: CostModel) -> Iterator[Plan]:
        plan = start.plan
        if supports("schedule.zero-bubble"):
            yield replace(plan, schedule="zero-bubble")
        for chunks in CHUNKS if supports("schedule.interleaved") else ():
            cut = interleaved(plan, chunks)
            if cut is not None:
                yield cut
                if supports("schedule.zero-bubble"):
                    yield replace(cut, schedule="zero-bubble")
                also = chunks <= MOST_ADAPTED and supports("schedule.adaptive")
                made = adapted(cut, start.prediction, costs, CHUNKED_EFFORT) if also else None
                if made is not None:
                    yield made
        if supports("schedule.adaptive"):
            made = adapted(plan, start.prediction, costs)
            if made is not None:
                yield made


def _least_seconds(template: PlanTemplate, scorer: TemplateScorer) -> float:
    """Seconds of compute of the busiest stage."""
    rows = ((part.num_micro_batches, *scorer.stage_seconds(part.shape)) for part in template.parts)
    return max(count * max(map(sum, zip(forward, backward))) for count, forward, backward in rows)


def _bound(template: PlanTemplate, problem: PlanningProblem, scorer: TemplateScorer, chunks: int = 1) -> float:
    """Seconds of a step that no schedule with so many chunks per stage beats, whatever its memory; inf: there is no
    such plan."""
    placed = place(template, scorer.pool)
    plan = None if placed is None else placed_plan(placed, problem, scorer)
    plan = plan if plan is None or chunks == 1 else interleaved(plan, chunks)
    if plan is None:
        return math.inf
    ends = [
        (stage, s == 0, s == len(part.shape.stages) - 1)
        for part in template.parts for s, stage in enumerate(part.shape.stages)
    ]  # fmt: skip
    after = max(scorer.bounds.stage_sync_tail(stage, template.pipelines, *end)[2] for stage, *end in ends)
    saved = max(scorer.saved_seconds(stage, *end) for stage, *end in ends)
    return after + least_seconds(plan, scorer.costs) - saved


def _busiest(start: JudgedPlan) -> float:
    """Seconds of the step, if its busiest stage never waited."""
    found = start.prediction
    return start.step_seconds - max(found.pipeline_seconds) + max(found.busy.values())


def _is_chunked(plan: Plan) -> bool:
    """An adaptive schedule over several chunks of layers per stage."""
    return plan.schedule == ADAPTIVE and plan.pipelines[0].chunks > 1


def _is_near(found: JudgedPlan, incumbent: Incumbent) -> bool:
    return found.step_seconds <= NEAR * incumbent.plans[0].step_seconds


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
            other = replace(stage, recompute="none" if stage.recompute != "none" else "full", first=0)
            shapes.append((part.shape.with_stages({s: other}), count))
        yield from (_with_part(template, p, shape, m) for shape, m in shapes)
    for p, part in enumerate(template.parts):
        for shape in _swapped_and_moved(part.shape):
            yield _with_part(template, p, shape, part.num_micro_batches)


def _with_part(template: PlanTemplate, p: int, shape: PipelineTemplate, micro_batches: int) -> PlanTemplate:
    """Other pipelines as part ``p``. A stage that gave away a layer recomputes no more than it has left."""
    stages = tuple(replace(x, first=min(x.first, x.layers)) for x in shape.stages)
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
    plan: Plan, prediction: Prediction, costs: CostModel, effort: int = EFFORT, limit: float = math.inf
) -> Plan | None:
    """The plan with a schedule made for each of its pipelines; None where it stays 1F1B, or interleaved 1F1B.

    Args:
        prediction: of the plan under 1F1B; for one with several chunks, before its layers were cut.
        effort: actions that may be timed for each pipeline.
        limit: seconds of a step; None also where it seems to take longer, by the schedules' own seconds and what the
            step has beside them under 1F1B: an estimate.
    """
    prices = StageCosts(plan, costs)
    if not without_context(plan):
        return None
    known: dict[PipelineTimes | ChunkedTimes, tuple[str, ...]] = {}
    limit -= sum(prediction.parts[x] for x in ("jitter", "optimizer", "parameters"))
    pipelines, tails = [], _tails(prediction, plan, prices)
    for pipeline in plan.pipelines:
        priced = prices.of(pipeline)
        times = pipeline_times(prediction, pipeline, priced, costs, tails[id(priced)])
        if times is None:
            return None
        if times not in known:
            if len(known) == MOST_PIPELINES:
                return None
            if least_of_times(times, pipeline.num_micro_batches) > limit:
                return None
            found = (
                search_adaptive(times, pipeline.num_micro_batches, effort) if isinstance(times, PipelineTimes)
                else search_adaptive_chunks(times, pipeline.num_micro_batches, effort)
            )  # fmt: skip
            if found.seconds > limit:
                return None
            known[times] = stored_orders(found.schedule) if found.schedule.name == ADAPTIVE else ()
        pipelines.append(replace(pipeline, orders=known[times]))
    return replace(plan, schedule=ADAPTIVE, pipelines=tuple(pipelines)) if any(known.values()) else None


def _tails(prediction: Prediction, plan: Plan, prices: StageCosts) -> dict[int, tuple[float, ...]]:
    """By the identity of a pipeline's costs, seconds of gradient reduction after each stage: of the slowest of the
    pipelines that cost the same."""
    found = dict[int, tuple[float, ...]]()
    for pipeline in plan.pipelines:
        key, own = id(prices.of(pipeline)), [max(prediction.tails[r] for r in s.ranks) for s in pipeline.stages]
        found[key] = tuple(map(max, own, found.get(key, own)))
    return found
