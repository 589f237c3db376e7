"""What a schedule is made from: seconds and memory of the stages of a concrete plan, and what no schedule can beat; and
the estimate of a template's step under a schedule made for it, by which plans under such schedules are looked for.

For that estimate, seconds and bytes of stages, transfers and the reduction of gradients are those of the fast estimate
under 1F1B; the schedule is made from them as it is for a concrete plan, with less effort. The step simulator times the
best ones again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_megatron.planner.estimate.template_score import StepEnds, TemplateScorer
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate
from hetero_megatron.plans import Pipeline, Plan
from hetero_megatron.plans.memory.micro_batches import micro_batch_bytes
from hetero_megatron.plans.shares import has_context
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import PipelineCosts, StageCosts
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.schedule import Costs
from hetero_megatron.schedule.adaptive import adaptive_seconds
from hetero_megatron.schedule.adaptive_chunks import adaptive_chunks_seconds
from hetero_megatron.schedule.chunk_scheduling import ChunkRule
from hetero_megatron.schedule.chunk_times import ChunkedTimes, chunked_lower_bound_seconds
from hetero_megatron.schedule.list_scheduling import ListRule
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes, lower_bound_seconds
from hetero_megatron.utils.cached_method import cached_method


def pipeline_times(
    prediction: Prediction | None, pipeline: Pipeline, priced: PipelineCosts, costs: CostModel, tails: Sequence[float]
) -> PipelineTimes | ChunkedTimes | None:
    """Seconds of the pipeline's stages and links (``tails``: of gradient reduction after each stage), and the bytes
    that its activations may take beside all else that ``prediction`` counts (None: any number); None where a stage has
    no room for one micro-batch."""
    seconds, stages = priced.costs, list[tuple[StageTimes, ...]]()
    for s, stage in enumerate(pipeline.stages):
        rows = micro_batch_bytes(stage, costs.model, costs.item, costs.options.routing, costs.options.fp8)
        room = math.inf
        if prediction is not None:
            limits, memory = prediction.limits, prediction.memory
            room = min(limits[rank] - memory[rank].lasting - max(x[2] for x in row) for rank, row in rows.items())
        kept_bytes, waiting = (
            [max(row[c][i] for row in rows.values()) for c in range(pipeline.chunks)] for i in (0, 1)
        )
        if room < sum(kept_bytes):
            return None
        stages.append(tuple(
            StageTimes(
                *_compute_seconds(pipeline, seconds, s, c), tail_seconds=0.0 if c else tails[s],
                split_seconds=_split_seconds(seconds, s, c), activation_bytes=kept_bytes[c], deferred_bytes=waiting[c],
                memory_bytes=room,
            )
            for c in range(pipeline.chunks)
        ))  # fmt: skip
    links = tuple(LinkTimes(*row) for row in zip(seconds.link, seconds.link_back, seconds.latency))
    if pipeline.chunks > 1:
        return ChunkedTimes(tuple(stages), links)
    return PipelineTimes(tuple(chunks[0] for chunks in stages), links)


def _compute_seconds(pipeline: Pipeline, seconds: Costs, s: int, c: int) -> tuple[float, float, float]:
    """F, B_INPUT and W of a chunk, with what its stage spends on its messages."""
    of_chunk = seconds.chunks[s][c] if seconds.chunks else None
    forward, backward, weight = (
        of_chunk[:3] if of_chunk else (seconds.forward[s], seconds.backward[s], seconds.weight[s])
    )
    host, last = seconds.host[s], len(pipeline.stages) - 1
    if last and (s, c) != (0, 0):
        forward += host.get("RECV_F", 0.0)
        backward += host.get("SEND_B", 0.0)
    if last and (s, c) != (last, pipeline.chunks - 1):
        forward += host.get("SEND_F", 0.0)
        backward += host.get("RECV_B", 0.0)
    return forward, backward - weight + _split_seconds(seconds, s, c), weight


def _split_seconds(seconds: Costs, s: int, c: int) -> float:
    return seconds.chunks[s][c].split if seconds.chunks else seconds.split[s]


def without_context(plan: Plan) -> bool:
    """No stage has context groups, whose activations are counted otherwise."""
    return not any(has_context(stage, plan.seq_length) for pipeline in plan.pipelines for stage in pipeline.stages)


def least_seconds(plan: Plan, costs: CostModel, prediction: Prediction | None = None) -> float:
    """No schedule over the plan's stages and chunks computes forwards and backwards in less; 0 where that is not known
    (context groups). ``prediction``: of the plan, for the memory that there is."""
    prices, bound = StageCosts(plan, costs), 0.0
    for pipeline in plan.pipelines if without_context(plan) else ():
        no_tails = [0.0] * len(pipeline.stages)
        times = pipeline_times(prediction, pipeline, prices.of(pipeline), costs, no_tails)
        if times is not None:
            bound = max(bound, least_of_times(times, pipeline.num_micro_batches))
    return bound


def least_of_times(times: PipelineTimes | ChunkedTimes, micro_batches: int) -> float:
    """No schedule of one pipeline takes less."""
    if isinstance(times, ChunkedTimes):
        return chunked_lower_bound_seconds(times, micro_batches)
    return lower_bound_seconds(times, micro_batches)


FEWEST, FEWEST_KNOWN = 6, 2  # schedules that are made for an estimate; where the rule of a similar template is known
MOST_CHUNKED = 15_000  # actions of these schedules with several chunks, which take longer
PRICED, CHUNKED = 1_000, 5  # work of all but the schedule; of an action of several chunks
SCHEDULE_NEAR = 0.001  # part of the least seconds of a schedule, for which none faster is looked for
Rules = tuple[ListRule | ChunkRule, ...]  # of the parts of a template


@dataclass(frozen=True)
class _ChunkWork:
    """Of one micro-batch in one chunk: seconds of F, B_INPUT and W, what the last two take more than B; bytes held from
    F to its backward and from B_INPUT to W; and those that backward works with."""

    forward: float
    input_gradient: float
    weight_gradient: float
    split: float
    kept: int
    waiting: int
    working: int


class ScheduleScorer:
    """Estimates templates under schedules made for them."""

    def __init__(self, scorer: TemplateScorer) -> None:
        self.scorer, self.tables, self.costs = scorer, scorer.tables, scorer.costs
        self.work = scorer.work

    def estimate(
        self, template: PlanTemplate, chunks: int, effort: int, limit: float = math.inf, rules: Rules = ()
    ) -> tuple[float, Rules]:
        """(seconds of a step, rules by which its schedules were made); inf where it fits in no schedule, cannot have so
        many chunks, or seems to take ``limit`` or more.

        Args:
            chunks: of layers, of every stage.
            effort: actions that may be timed to make the schedule of one pipeline; at least some schedules are.
            rules: of a similar template, tried first.
        """
        infeasible = math.inf, Rules()
        self.work.add(PRICED)
        ends = None if not _can_have(template, chunks) else self.scorer.ends(template)
        if ends is None:
            return infeasible
        rows = list[tuple[PipelineTimes | ChunkedTimes, int, float]]()
        for p, part in enumerate(template.parts):
            times = self._times(p, part.shape, chunks, ends)
            if times is None:
                return infeasible
            rows.append((times, part.num_micro_batches, ends.after - self._saved(part.shape)))
        if max(least_of_times(times, count) + after_pipeline for times, count, after_pipeline in rows) >= limit:
            return infeasible
        slowest, best = 0.0, list[ListRule | ChunkRule]()
        for (times, count, after_pipeline), rule in itertools.zip_longest(rows, rules[: len(rows)]):
            seconds, rule_used = self._scheduled(times, count, effort, rule)
            slowest = max(slowest, seconds + after_pipeline)
            if slowest >= limit:
                return infeasible
            best.append(rule_used)
        return slowest, tuple(best)

    def _scheduled(
        self, times: PipelineTimes | ChunkedTimes, count: int, effort: int, rule: ListRule | ChunkRule | None
    ) -> tuple[float, ListRule | ChunkRule]:
        """(seconds, rule) of a schedule made for one pipeline."""
        chunks = times.chunks if isinstance(times, ChunkedTimes) else 1
        size, fewest = 3 * len(times.stages) * chunks * count, FEWEST_KNOWN if rule else FEWEST
        effort = max(effort, FEWEST_KNOWN * size, min(fewest * size, MOST_CHUNKED if chunks > 1 else fewest * size))
        if isinstance(times, PipelineTimes):
            list_rule = rule if isinstance(rule, ListRule) else None
            seconds, best_rule, actions = adaptive_seconds(times, count, effort, SCHEDULE_NEAR, list_rule)
            self.work.add(actions)
            return seconds, best_rule
        chunk_rule = rule if isinstance(rule, ChunkRule) else None
        seconds, best, actions = adaptive_chunks_seconds(times, count, effort, SCHEDULE_NEAR, chunk_rule)
        self.work.add(CHUNKED * actions)
        return seconds, best

    def _saved(self, shape: PipelineTemplate) -> float:
        """By how much the first backward of a step is shorter on the busiest stage."""
        forward, backward = self.scorer.stage_seconds(shape)
        last = len(shape.stages) - 1
        s = max(range(last + 1), key=lambda s: forward[s] + backward[s])
        return self.scorer.stage(shape.stages[s], shape.micro_batch_size, s == 0, s == last).saved

    def _times(
        self, p: int, shape: PipelineTemplate, chunks: int, ends: StepEnds
    ) -> PipelineTimes | ChunkedTimes | None:
        """None where a stage has no room for one micro-batch."""
        stages, last, size = list[tuple[StageTimes, ...]](), len(shape.stages) - 1, shape.micro_batch_size
        same_node, cards = last == 1 and not ends.sharing[p][0], max(1, *ends.sharing[p]) if last else 1
        messages = self.scorer.messages(shape, ends.sharing[p])
        if chunks > 1 and last:
            sent, received = self.tables.message_seconds(shape.stages[-1], shape.stages[0], same_node)
            messages[0], messages[last] = (received, messages[0][1]), (messages[last][0], sent)
        for s, stage in enumerate(shape.stages):
            work = self._work(stage, size, s == 0, s == last, chunks, messages[s])
            communicators = self.tables.communicators.counted(shape.stages, s, ends.reducing[p, s])
            room = self._room(stage, size, s == 0, s == last, ends.replicas[p, s]) - communicators
            room -= max(x.working for x in work)
            if room < sum(x.kept for x in work):
                return None
            stages.append(tuple(
                StageTimes(
                    x.forward, x.input_gradient, x.weight_gradient, 0.0 if c else max(0.0, ends.tails[p, s]), x.split,
                    activation_bytes=x.kept, deferred_bytes=x.waiting, memory_bytes=room,
                )
                for c, x in enumerate(work)
            ))  # fmt: skip
        links = [LinkTimes(*seconds) for seconds in self.scorer.links(shape, ends.sharing[p])]
        if chunks == 1:
            return PipelineTimes(tuple(x for (x,) in stages), tuple(links))
        if last:
            around = self.tables.boundary(shape.stages[-1], shape.stages[0], size, same_node, cards)
            links.append(LinkTimes(*around))
        return ChunkedTimes(tuple(stages), tuple(links))

    @cached_method
    def _room(self, stage: StageTemplate, size: int, embed: bool, head: bool, replicas: float) -> float:
        """Bytes for activations and what backward works with; negative where buckets do not fit."""
        choice = self.tables.choice(stage, embed, head)
        needs, limit = self.costs.memory_bytes(choice, size, 0, replicas), self.costs.memory_limit(choice.chip)
        return limit - needs.lasting if needs.lasting + needs.buffers <= limit else -1.0

    @cached_method
    def _work(
        self, stage: StageTemplate, size: int, embed: bool, head: bool, chunks: int, messages: tuple[float, float]
    ) -> tuple[_ChunkWork, ...]:
        """``messages``: seconds of the host for those of one direction, with the stage before and the one after."""
        stage_choice, chunk_works = self.tables.choice(stage, embed, head), list[_ChunkWork]()
        parts, recomputed_left, away = self.costs.parts(stage_choice, size), stage_choice.full, stage_choice.away
        for c in range(chunks):
            layers = stage.layers * (c + 1) // chunks - stage.layers * c // chunks
            full = min(recomputed_left, layers)
            recomputed_left -= full
            offloaded = min(away, layers)
            away -= offloaded
            first, last = embed and c == 0, head and c == chunks - 1
            choice = replace(stage_choice, layers=layers, embed=first, head=last, away=offloaded)
            forward, backward = parts.total(layers, full, first, last)
            if offloaded:
                forward, backward = (
                    a + b for a, b in zip((forward, backward), self.costs.copy_waits(choice, size), strict=True)
                )
            weight, split_seconds = parts.split(layers, last)
            host = messages[0] * (not first) + messages[1] * (not last)
            kept_bytes, _ = self.costs.activation_bytes(choice, size)
            waiting, working = self.costs.waiting_bytes(choice, size), self.costs.working_bytes(choice, size)
            inputs = backward + host - weight + split_seconds
            chunk_works.append(_ChunkWork(forward + host, inputs, weight, split_seconds, kept_bytes, waiting, working))
        return tuple(chunk_works)


def _can_have(template: PlanTemplate, chunks: int) -> bool:
    """Whether all layers of every stage can be cut into so many runs, most of which are not empty."""
    stages = [stage for part in template.parts for stage in part.shape.stages]
    return chunks == 1 or all(2 * x.layers >= chunks and x.recompute != "first" for x in stages)
