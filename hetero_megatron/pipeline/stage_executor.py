"""The executor of one rank's stage: its chunks, and their boundaries with the stages beside it."""

from __future__ import annotations

from functools import cache, partial

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.model import GPTStage, StagePart
from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.pipeline import PipelineExecutor
from hetero_megatron.pipeline.boundary import Boundary
from hetero_megatron.pipeline.executor import LossFunction, StageChunk
from hetero_megatron.pipeline.rank_stage import RankStage
from hetero_megatron.plan import micro_batch_sizes, pipeline_samples
from hetero_megatron.plan.compile import CompiledPlan


def build_executor(
    compiled: CompiledPlan,
    here: RankStage,
    comm: Comm,
    model: GPTStage,
    loss: LossFunction,
    dtype: torch.dtype,
    gradients: WeightGradients,
) -> PipelineExecutor:
    """Called on all ranks of a pipeline at once: it connects to the stages beside this one.

    Args:
        dtype: of activations.
        gradients: where products of weight gradients wait between B_INPUT and W.
    """
    p, s = here.place.pipeline, here.place.stage
    pipeline = compiled.plan.pipelines[p]
    count, parts = len(pipeline.stages), here.stage.chunks

    @cache
    def boundary(upstream: int, size: int) -> Boundary:
        """After stage ``upstream``, for micro-batches of ``size`` sequences."""
        return Boundary(comm, compiled.boundary(p, upstream, size))

    def chunk(number: int) -> StageChunk:
        alone, final = count == 1, number + 1 == len(parts)
        first, last = s == 0 and number == 0, s + 1 == count and final
        part = StagePart(range(*parts[number]), here.stage.embed and number == 0, here.stage.head and final)
        return StageChunk(
            model if len(parts) == 1 else partial(model, part=part),
            loss if part.head else None,
            before=None if first or alone else partial(boundary, (s - 1) % count),
            after=None if last or alone else partial(boundary, s),
            sender=number if s > 0 else number - 1,
            local_before=alone and not first,
            local_after=alone and not last,
        )

    chunks = [chunk(number) for number in range(pipeline.chunks)]
    # Only those that exchange: a connection costs a library's memory. Sizes that only other batches have connect then.
    start, stop = pipeline_samples(compiled.plan, compiled.plan.global_batch_size)[p]
    sizes = {pipeline.micro_batch_size, *micro_batch_sizes(pipeline, stop - start)}
    ways = [way for each in chunks for way in (each.before, each.after) if way is not None]
    comm.connect({peer for way in ways for size in sizes for peer in way(size).peers})
    return PipelineExecutor(comm, chunks, dtype, f"pipeline {p} stage {s}", gradients)
