"""What a schedule is made from: seconds and memory of the stages of a concrete plan; and what none can beat."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero_megatron.plans import Pipeline, Plan
from hetero_megatron.plans.memory.micro_batches import micro_batch_bytes
from hetero_megatron.plans.shares import has_context
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import PipelineCosts, StageCosts
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.schedule import Costs
from hetero_megatron.schedule.chunk_times import ChunkedTimes, chunked_lower_bound_seconds
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes, lower_bound_seconds


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
