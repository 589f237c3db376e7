"""The best plans under further schedules: zero-bubble, interleaved, and one made for the plan's own stages.

Templates are searched under 1F1B and GPipe, which have fast times. What is best there is tried again, as a concrete
plan, under schedules that split the backward or cut stages into chunks; the step simulator decides. From the fastest of
these, hill climbing goes on with the schedule's own seconds: layers, recompute and order of stages, micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, supports, validate
from hetero_megatron.plan.context_plan import has_context
from hetero_megatron.plan.pipeline_schedule import ADAPTIVE
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, JudgedPlan, judge_template
from hetero_megatron.planner.search.local_search import shapes_near
from hetero_megatron.planner.simulate.memory_report import micro_batch_bytes
from hetero_megatron.planner.simulate.stage_cost import PipelineCosts, StageCosts
from hetero_megatron.planner.simulate.step import Prediction, predict
from hetero_megatron.planner.template.plan_template import PipelineReplicas, PlanTemplate
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.pipeline_times import LinkTimes, PipelineTimes, StageTimes
from hetero_megatron.schedule.stored import stored_orders

STARTS = 2  # plans that are tried under other schedules
FEW = 64  # chips, up to which this is done without being asked for
CHUNKS = (2, 3, 4)  # per stage, of the interleaved schedule
MOST_PIPELINES = 4  # unlike ones, that a schedule is made for
EFFORT, CLIMBING = 300_000, 20_000  # actions that may be timed for one pipeline, at the end and while climbing
MOVES, NEAR, LEAST_GAIN = 60, 1.05, 1e-6  # plans that climbing tries; it starts from what is so near to the best


class ScheduleSearch:
    """Proposes the best judged plans under other schedules, where the space allows it."""

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
        first = min(best, key=lambda x: x.step_seconds, default=None)
        if first is None or not first.template.parts or first.step_seconds > NEAR * incumbent.plans[0].step_seconds:
            return True
        return self._climb(first, problem, incumbent)

    def _climb(self, best: JudgedPlan, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Other templates under the schedule of ``best``; zero-bubble gives way to adaptive, which begins with it."""
        scorer, chunks = incumbent.scorer, best.plan.pipelines[0].chunks
        plain: JudgedPlan | None = None  # the best under 1F1B

        def improves(template: PlanTemplate) -> bool:
            nonlocal best, plain
            start = None if incumbent.should_stop() else judge_template(template, problem, scorer)
            if start is None or start.step_seconds - max(start.prediction.pipeline_seconds) + max(
                start.prediction.busy.values()
            ) >= best.step_seconds:  # its busiest stage alone takes longer
                return False
            made = interleaved(start.plan, chunks) if chunks > 1 else adapted(
                start.plan, start.prediction, scorer.costs, CLIMBING
            )  # fmt: skip
            found = None if made is None else self._judged(start, made, problem, scorer.costs)
            if found is None or found.step_seconds >= best.step_seconds * (1 - LEAST_GAIN):
                return False
            best, plain = found, start
            return True

        seen, near = {best.template}, _near(best.template, problem.space)
        while len(seen) <= MOVES and (template := next((t for t in near if t not in seen), None)) is not None:
            seen.add(template)
            if improves(template):
                near = _near(template, problem.space)
        if plain is None or best.step_seconds >= incumbent.plans[0].step_seconds:
            return not incumbent.should_stop()
        if not plain.prediction.over:
            incumbent.take_plan(plain)
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
        found = predict(plan, problem.model, problem.cluster, problem.dtype, costs)
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
        if supports("schedule.adaptive"):
            made = adapted(plan, start.prediction, costs)
            if made is not None:
                yield made


def _near(template: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    """With one move in one part: those of local search, and recompute of a stage on or off."""
    for p, part in enumerate(template.parts):
        count, size = part.num_micro_batches, part.shape.micro_batch_size
        shapes = [(shape, count) for shape in shapes_near(part.shape, space)]
        if space.micro_batch_sizes is None and count % 2 == 0:
            shapes.append((replace(part.shape, micro_batch_size=2 * size), count // 2))
        if space.micro_batch_sizes is None and size % 2 == 0 and all(size // 2 % s.dp == 0 for s in part.shape.stages):
            shapes.append((replace(part.shape, micro_batch_size=size // 2), 2 * count))
        for s, stage in enumerate(part.shape.stages if space.recompute is None else ()):
            other = replace(stage, recompute="none" if stage.recompute != "none" else "full", first=0)
            stages = (*part.shape.stages[:s], other, *part.shape.stages[s + 1 :])
            shapes.append((replace(part.shape, stages=stages), count))
        for shape, m in shapes:
            parts = (*template.parts[:p], PipelineReplicas(shape, part.copies, m), *template.parts[p + 1 :])
            yield replace(template, parts=parts)


def interleaved(plan: Plan, chunks: int) -> Plan | None:
    """The plan with the layers of every stage cut into so many runs; None where a stage has fewer layers, where only
    some are recomputed, or where the ends are not at the ends."""
    pipelines = []
    for pipeline in plan.pipelines:
        first, last = pipeline.stages[0], pipeline.stages[-1]
        if any(s.num_layers < chunks or s.recompute.kind == "first" for s in pipeline.stages):
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


def adapted(plan: Plan, prediction: Prediction, costs: CostModel, effort: int = EFFORT) -> Plan | None:
    """The plan with a schedule made for each of its pipelines; None where it stays 1F1B.

    Args:
        prediction: of the plan under 1F1B.
        effort: of :func:`~hetero_megatron.schedule.adaptive.search_adaptive`, for each pipeline.
    """
    prices = StageCosts(plan, costs)
    if any(has_context(stage, plan.seq_length) for pipeline in plan.pipelines for stage in pipeline.stages):
        return None
    known: dict[PipelineTimes, tuple[str, ...]] = {}
    pipelines, tails = [], _tails(prediction, prices)
    for pipeline in plan.pipelines:
        priced = prices.of(pipeline)
        times = pipeline_times(prediction, pipeline, priced, costs, tails[id(priced)])
        if times is None:
            return None
        if times not in known:
            if len(known) == MOST_PIPELINES:
                return None
            found = search_adaptive(times, pipeline.num_micro_batches, effort).schedule
            known[times] = stored_orders(found) if found.name == ADAPTIVE else ()
        pipelines.append(replace(pipeline, orders=known[times]))
    return replace(plan, schedule=ADAPTIVE, pipelines=tuple(pipelines)) if any(known.values()) else None


def _tails(prediction: Prediction, prices: StageCosts) -> dict[int, tuple[float, ...]]:
    """By the identity of a pipeline's costs, seconds of gradient reduction after each stage: of the slowest of the
    pipelines that cost the same."""
    found = dict[int, tuple[float, ...]]()
    for pipeline in prediction.plan.pipelines:
        key, own = id(prices.of(pipeline)), [max(prediction.tails[r] for r in s.ranks) for s in pipeline.stages]
        found[key] = tuple(map(max, own, found.get(key, own)))
    return found


def pipeline_times(
    prediction: Prediction, pipeline: Pipeline, priced: PipelineCosts, costs: CostModel, tails: Sequence[float]
) -> PipelineTimes | None:
    """Seconds of the pipeline's stages and links (``tails``: of gradient reduction after each stage), and the bytes
    that its activations may take beside all else that ``prediction`` counts; None where a stage has no room for one
    micro-batch."""
    seconds, memory, limits = priced.costs, prediction.memory, prediction.limits
    stages = []
    for s, stage in enumerate(pipeline.stages):
        host, weight, more = seconds.host[s], seconds.weight[s], seconds.split[s]
        whole = seconds.backward[s] + host.get("RECV_B", 0.0) + host.get("SEND_B", 0.0)
        rows = micro_batch_bytes(stage, costs.model, costs.item, costs.options.routing)
        kept, waiting = (max(row[i] for row in rows.values()) for i in (0, 1))
        room = min(limits[rank] - memory[rank].lasting - row[2] for rank, row in rows.items())
        if room < kept:
            return None
        stages.append(StageTimes(
            forward_seconds=seconds.forward[s] + host.get("RECV_F", 0.0) + host.get("SEND_F", 0.0),
            input_gradient_seconds=whole - weight + more, weight_gradient_seconds=weight, split_seconds=more,
            tail_seconds=tails[s], activation_bytes=kept, deferred_bytes=waiting, memory_bytes=room,
        ))  # fmt: skip
    links = zip(seconds.link, seconds.link_back, seconds.latency)
    return PipelineTimes(tuple(stages), tuple(LinkTimes(*row) for row in links))
