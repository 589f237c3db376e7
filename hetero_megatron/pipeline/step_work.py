"""The work of one step on one rank: its micro-batches and their rows, and the executor that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.data.upload import UploadedBatches, Uploader
from hetero_megatron.model import GPTStage, StagePart
from hetero_megatron.ops.dropout import Draws
from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.pipeline import PipelineExecutor
from hetero_megatron.pipeline.boundary import Boundary
from hetero_megatron.pipeline.stage_model import RankStage
from hetero_megatron.pipeline.stage_work import LossFunction, StageChunk, StageWork
from hetero_megatron.plans import micro_batch_sizes, pipeline_samples, unit_sequences
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.experts import require_rows
from hetero_megatron.platform.accelerator import Accelerator
from hetero_megatron.schedule import Action, receive_order

Fetch = Callable[[Sequence[int]], Batch]  # global sample indices -> batch on the CPU
DrawsOf = Callable[[int], Draws]  # global index of a micro-batch's first row -> what its dropout draws by
_BACKWARD = {"B", "B_INPUT", "W", "SEND_B", "RECV_B", "REDUCE"}
_AFTER = {"UPDATE", "ALL_GATHER"}  # the optimizer's


class StepWork:
    """Makes the work of one rank, for batches of any size."""

    def __init__(self, compiled: CompiledPlan, here: RankStage, comm: Comm) -> None:
        self._compiled, self._here = compiled, here
        self._uploader = Uploader(comm.accelerator, comm.device) if comm.accelerator is not None else None
        self._schedules: dict[tuple[int, bool], tuple[tuple[Action, ...], tuple[Action, ...]]] = {}
        self._used: dict[bool, frozenset[tuple[int, int]]] = {}

    def use_schedules(self, compiled: CompiledPlan) -> None:
        """Those of a plan with the same stages, from now on."""
        self._compiled, self._schedules = compiled, {}

    def make(
        self, fetch: Fetch, first_sample: int, batch_size: int, forward_only: bool, draws: DrawsOf | None
    ) -> StageWork:
        """The work for the global samples ``[first_sample, first_sample + batch_size)``; batches are fetched now.

        Args:
            draws: of dropout; None: there is none.

        Raises:
            UserError: the plan has no schedule for a batch of this size.
        """
        sizes, rows = self.samples(first_sample, batch_size)
        depth = self._here.spec.mtp_layers if self._here.stage.head and not forward_only else 0
        batch_fetchers = [
            partial(self._batch, fetch, indices, None if draws is None else draws(indices[0]), depth)
            if indices else None
            for indices in rows
        ]
        batches: Sequence[Batch | None]
        if self._uploader is None:
            batches = [None if fetch_batch is None else fetch_batch() for fetch_batch in batch_fetchers]
        else:
            batches = UploadedBatches(batch_fetchers, self._uploader)
        actions, receives = self._actions(batch_size, forward_only)
        return StageWork(actions, batches, sizes, receives)

    def _batch(self, fetch: Fetch, indices: Sequence[int], draws: Draws | None, depth: int) -> Batch:
        """``depth``: how many modules predict further tokens of it."""
        batch = fetch(indices)
        if depth:
            from hetero_megatron.data.batch import look_ahead

            batch = look_ahead(batch, depth)
        return replace(batch.select(self._here.unit.tokens), draws=draws)

    def sizes(self, batch_size: int) -> frozenset[tuple[int, int]]:
        """(pipeline, sequences of a micro-batch) of all that a batch of this size is cut into; equal on all ranks."""
        plan = self._here.plan
        shares = pipeline_samples(plan, batch_size)
        return frozenset(
            (number, size)
            for number, (pipeline, (start, stop)) in enumerate(zip(plan.pipelines, shares, strict=True))
            for size in micro_batch_sizes(pipeline, stop - start)
        )

    def first_use(self, batch_size: int, forward_only: bool) -> tuple[bool, bool]:
        """A batch of this size comes: (it is the first one of all, its micro-batches have sizes that none had before);
        equal on all ranks."""
        used_sizes, sizes = self._used.get(forward_only, frozenset()), self.sizes(batch_size)
        self._used[forward_only] = used_sizes | sizes
        return not used_sizes, not sizes <= used_sizes

    def samples(self, first_sample: int, batch_size: int) -> tuple[tuple[int, ...], list[range]]:
        """(sequences of each micro-batch of the pipeline, the global sample indices of this rank's rows of it)."""
        rank_stage = self._here
        start, stop = pipeline_samples(rank_stage.plan, batch_size)[rank_stage.place.pipeline]
        sizes = micro_batch_sizes(rank_stage.plan.pipelines[rank_stage.place.pipeline], stop - start)
        rows = []
        for size in sizes:
            a, b = unit_sequences(rank_stage.stage, size)[rank_stage.place.unit]
            rows.append(range(first_sample + start + a, first_sample + start + b))
            start += size
        return sizes, rows

    def _actions(self, batch_size: int, forward_only: bool) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """This stage's actions up to the update, and its receives in the order of posting; a schedule is validated
        before it first runs."""
        key, rank_stage = (batch_size, forward_only), self._here
        if key not in self._schedules:
            if rank_stage.spec.moe is not None:
                require_rows(rank_stage.plan, batch_size)
            schedule = self._compiled.schedules(batch_size)[rank_stage.place.pipeline]
            left_out = _AFTER | (_BACKWARD if forward_only else set())
            rows = schedule.stages[rank_stage.place.stage], receive_order(schedule, rank_stage.place.stage)
            actions, receives = (tuple(a for a in row if a.kind not in left_out) for row in rows)
            self._schedules[key] = actions, receives
        return self._schedules[key]


@contextmanager
def random_kept(accelerator: Accelerator | None) -> Iterator[None]:
    """Random numbers afterwards are as if nothing had been drawn inside; a device has done what it was given."""
    random = accelerator.rng_state() if accelerator is not None else torch.get_rng_state()
    yield
    if accelerator is None:
        torch.set_rng_state(random)
        return
    accelerator.synchronize()
    accelerator.set_rng_state(random)


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
    count, chunk_layers = len(pipeline.stages), here.stage.chunks

    @cache
    def boundary(upstream: int, size: int) -> Boundary:
        """After stage ``upstream``, for micro-batches of ``size`` sequences."""
        return Boundary(comm, compiled.boundary(p, upstream, size))

    def chunk(number: int) -> StageChunk:
        is_only_stage, final = count == 1, number + 1 == len(chunk_layers)
        is_first, is_last = s == 0 and number == 0, s + 1 == count and final
        own_part = StagePart(range(*chunk_layers[number]), here.stage.embed and number == 0, here.stage.head and final)
        return StageChunk(
            model if len(chunk_layers) == 1 else partial(model, part=own_part),
            loss if own_part.head else None,
            before=None if is_first or is_only_stage else partial(boundary, (s - 1) % count),
            after=None if is_last or is_only_stage else partial(boundary, s),
            sender=number if s > 0 else number - 1,
            local_before=is_only_stage and not is_first,
            local_after=is_only_stage and not is_last,
        )

    chunks = [chunk(number) for number in range(pipeline.chunks)]
    # Only those that exchange: a connection costs a library's memory. Sizes that only other batches have connect then.
    start, stop = pipeline_samples(compiled.plan, compiled.plan.global_batch_size)[p]
    sizes = {pipeline.micro_batch_size, *micro_batch_sizes(pipeline, stop - start)}
    ways = [way for stage_chunk in chunks for way in (stage_chunk.before, stage_chunk.after) if way is not None]
    comm.connect({peer for way in ways for size in sizes for peer in way(size).peers})
    return PipelineExecutor(comm, chunks, dtype, f"pipeline {p} stage {s}", gradients)
