"""The best plans under further schedules: zero-bubble, interleaved, and one made for the plan's own stages.

Templates are searched under 1F1B and GPipe, which have fast times. What is best there is tried again, as a concrete
plan, under schedules that split the backward or cut stages into chunks; the step simulator decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, supports, validate
from hetero_megatron.plan.context_plan import has_context
from hetero_megatron.plan.pipeline_schedule import ADAPTIVE
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, JudgedPlan
from hetero_megatron.planner.simulate.memory_report import micro_batch_bytes
from hetero_megatron.planner.simulate.stage_cost import PipelineCosts, StageCosts
from hetero_megatron.planner.simulate.step import Prediction, predict
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.pipeline_times import LinkTimes, PipelineTimes, StageTimes
from hetero_megatron.schedule.stored import stored_orders

STARTS = 2  # plans that are tried under other schedules
FEW = 64  # chips, up to which this is done without being asked for
CHUNKS = (2, 3, 4)  # per stage, of the interleaved schedule
MOST_PIPELINES = 4  # unlike ones, that a schedule is made for
EFFORT = 300_000  # actions that may be timed for one pipeline


class ScheduleSearch:
    """Proposes the best judged plans under other schedules, where the space allows it."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        space = problem.space
        restricted = space.schedules != SearchSpace.schedules or incumbent.scorer.pool.chips > FEW
        if space.more_schedules == "never" or (space.more_schedules == "auto" and restricted):
            return True
        costs = incumbent.scorer.costs
        for start in list(incumbent.plans[:STARTS]):
            if all(len(pipeline.stages) == 1 for pipeline in start.plan.pipelines):
                continue
            for plan in self._variants(start, costs):
                if incumbent.should_stop():
                    return False
                found = self._judged(start, plan, problem, costs)
                if found is not None and found.step_seconds < start.step_seconds:
                    incumbent.take_plan(found)
        return True

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


def adapted(plan: Plan, prediction: Prediction, costs: CostModel) -> Plan | None:
    """The plan with a schedule made for each of its pipelines; None where it stays 1F1B.

    Args:
        prediction: of the plan under 1F1B.
    """
    prices = StageCosts(plan, costs)
    if any(has_context(stage, plan.seq_length) for pipeline in plan.pipelines for stage in pipeline.stages):
        return None
    known: dict[PipelineTimes, tuple[str, ...]] = {}
    pipelines = []
    for pipeline in plan.pipelines:
        times = pipeline_times(prediction, pipeline, prices.of(pipeline), costs)
        if times is None:
            return None
        if times not in known:
            if len(known) == MOST_PIPELINES:
                return None
            found = search_adaptive(times, pipeline.num_micro_batches, EFFORT).schedule
            known[times] = stored_orders(found) if found.name == ADAPTIVE else ()
        pipelines.append(replace(pipeline, orders=known[times]))
    return replace(plan, schedule=ADAPTIVE, pipelines=tuple(pipelines)) if any(known.values()) else None


def pipeline_times(
    prediction: Prediction, pipeline: Pipeline, priced: PipelineCosts, costs: CostModel
) -> PipelineTimes | None:
    """Seconds of the pipeline's stages and links, and the bytes that its activations may take beside all else that
    ``prediction`` counts; None where a stage has no room for one micro-batch."""
    seconds, memory, limits = priced.costs, prediction.memory, prediction.limits
    stages = []
    for s, stage in enumerate(pipeline.stages):
        host, weight, more = seconds.host[s], seconds.weight[s], seconds.split[s]
        whole = seconds.backward[s] + host.get("RECV_B", 0.0) + host.get("SEND_B", 0.0)
        rows = micro_batch_bytes(stage, costs.model, costs.item)
        kept, waiting = (max(row[i] for row in rows.values()) for i in (0, 1))
        room = min(limits[rank] - memory[rank].lasting - row[2] for rank, row in rows.items())
        if room < kept:
            return None
        stages.append(StageTimes(
            forward_seconds=seconds.forward[s] + host.get("RECV_F", 0.0) + host.get("SEND_F", 0.0),
            input_gradient_seconds=whole - weight + more, weight_gradient_seconds=weight, split_seconds=more,
            activation_bytes=kept, deferred_bytes=waiting, memory_bytes=room,
        ))  # fmt: skip
    links = zip(seconds.link, seconds.link_back, seconds.latency)
    return PipelineTimes(tuple(stages), tuple(LinkTimes(*row) for row in links))
