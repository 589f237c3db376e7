"""What a step gives one rank to do: its samples in micro-batches, and its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.data.upload import UploadedBatches, Uploader
from hetero_megatron.ops.dropout import Draws
from hetero_megatron.pipeline.executor import StageWork
from hetero_megatron.pipeline.rank_stage import RankStage
from hetero_megatron.plan import micro_batch_sizes, pipeline_samples, unit_sequences
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.plan.experts import require_rows
from hetero_megatron.schedule import Action, receive_order

Fetch = Callable[[Sequence[int]], Batch]  # global sample indices -> batch on the CPU
DrawsOf = Callable[[int], Draws]  # global index of a micro-batch's first row -> what its dropout draws by
_BACKWARD = {"B", "B_INPUT", "W", "SEND_B", "RECV_B", "REDUCE"}
_AFTER = {"UPDATE", "ALL_GATHER"}  # the optimizer's


class StepWork:
    """Of one rank, for batches of any size."""

    def __init__(self, compiled: CompiledPlan, here: RankStage, comm: Comm) -> None:
        self._compiled, self._here = compiled, here
        self._uploader = Uploader(comm.accelerator, comm.device) if comm.accelerator is not None else None
        self._schedules: dict[tuple[int, bool], tuple[tuple[Action, ...], tuple[Action, ...]]] = {}

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
        make = [
            partial(self._batch, fetch, indices, None if draws is None else draws(indices[0])) if indices else None
            for indices in rows
        ]
        batches: Sequence[Batch | None]
        if self._uploader is None:
            batches = [None if each is None else each() for each in make]
        else:
            batches = UploadedBatches(make, self._uploader)
        actions, receives = self._actions(batch_size, forward_only)
        return StageWork(actions, batches, sizes, receives)

    def _batch(self, fetch: Fetch, indices: Sequence[int], draws: Draws | None) -> Batch:
        return replace(fetch(indices).select(self._here.unit.tokens), draws=draws)

    def sizes(self, batch_size: int) -> frozenset[tuple[int, int]]:
        """(pipeline, sequences of a micro-batch) of all that a batch of this size is cut into; equal on all ranks."""
        plan = self._here.plan
        shares = pipeline_samples(plan, batch_size)
        return frozenset(
            (number, size)
            for number, (pipeline, (start, stop)) in enumerate(zip(plan.pipelines, shares, strict=True))
            for size in micro_batch_sizes(pipeline, stop - start)
        )

    def samples(self, first_sample: int, batch_size: int) -> tuple[tuple[int, ...], list[range]]:
        """(sequences of each micro-batch of the pipeline, the global sample indices of this rank's rows of it)."""
        here = self._here
        start, stop = pipeline_samples(here.plan, batch_size)[here.place.pipeline]
        sizes = micro_batch_sizes(here.plan.pipelines[here.place.pipeline], stop - start)
        rows = []
        for size in sizes:
            a, b = unit_sequences(here.stage, size)[here.place.unit]
            rows.append(range(first_sample + start + a, first_sample + start + b))
            start += size
        return sizes, rows

    def _actions(self, batch_size: int, forward_only: bool) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """This stage's actions up to the update, and its receives in the order of posting; a schedule is validated
        before it first runs."""
        key, here = (batch_size, forward_only), self._here
        if key not in self._schedules:
            require_rows(here.plan, batch_size)
            schedule = self._compiled.schedules(batch_size)[here.place.pipeline]
            left_out = _AFTER | (_BACKWARD if forward_only else set())
            rows = schedule.stages[here.place.stage], receive_order(schedule, here.place.stage)
            actions, receives = (tuple(a for a in row if a.kind not in left_out) for row in rows)
            self._schedules[key] = actions, receives
        return self._schedules[key]
