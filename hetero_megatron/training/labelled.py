"""What a step on labelled answers begins with: the reference's log-probabilities, where they are computed in each step;
and KTO's estimate of how far the model is from the reference, over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import torch

from hetero_megatron.data.batch import Batch
from hetero_megatron.pipeline.preference import LabelLoss
from hetero_megatron.pipeline.stage_work import StepResult
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.training.runtime import Runtime


def mismatched(fetch: Fetch) -> Fetch:
    """The same prompts with others' answers."""

    def others(samples: Sequence[int]) -> Batch:
        batch = fetch(samples).mismatched
        assert batch is not None, "rows that are no labelled answers"
        return batch

    return others


class LabelledSteps:
    """Of a runtime whose loss is one of labelled answers; built on every rank, and asked before each step."""

    def __init__(self, runtime: Runtime) -> None:
        preference = runtime.options.preference
        assert preference is not None and preference.unpaired
        self._runtime, self._preference = runtime, preference
        self._loss = cast(LabelLoss | None, runtime.pairs)

    def record(self, fetch: Fetch, first: int, size: int) -> list[StepResult]:
        """What the reference says of the examples, and of prompts with others' answers where that is needed."""
        record, loss = self._runtime.record_reference, self._loss
        results = [record(fetch, first, size)]
        if self._preference.estimates_kl:
            into = nullcontext() if loss is None else loss.record(loss.beside)
            results.append(record(mismatched(fetch), first, size, into))
        return results

    def recorded(self) -> dict[int, tuple[float, float]]:
        """What :meth:`record` found, by example: of its own answer, and of another one's (0 where that is not needed).
        """
        if self._loss is None:
            return {}
        own_logps, other_logps = self._loss.reference.recorded(), self._loss.beside.recorded()
        return {number: (value, other_logps.get(number, (0.0,))[0]) for number, (value,) in own_logps.items()}

    def use(self, logps: Mapping[int, tuple[float, float]]) -> None:
        """What the reference says of all examples that a run needs."""
        if self._loss is not None:
            self._loss.reference.logps = {number: (own_logp,) for number, (own_logp, _) in logps.items()}
            self._loss.beside.logps = {number: (other_logp,) for number, (_, other_logp) in logps.items()}
            self._loss.reference.begin_step()
            self._loss.beside.begin_step()

    def before_forward(self, fetch: Fetch, first: int, size: int) -> StepResult | None:
        """See :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        results = self.record(fetch, first, size) if self._preference.in_step else []
        if self._preference.estimates_kl:
            results.append(self._speak(mismatched(fetch), first, size))
            self._estimate()
        if not results:
            return None
        for later in results[1:]:
            results[0].busy_seconds += later.busy_seconds
            results[0].bubble_seconds += later.bubble_seconds
            results[0].communication_seconds += later.communication_seconds
        return results[0]

    @torch.no_grad()
    def _speak(self, fetch: Fetch, first: int, size: int) -> StepResult:
        runtime = self._runtime
        with self._loss.speak() if self._loss is not None else nullcontext():
            step_result = runtime.executor.run(runtime.work(fetch, first, size, forward_only=True))
        runtime.numbers.reader.read()  # the clock is used again
        step_result.read(runtime.comm.clock)
        return step_result

    def _estimate(self) -> None:
        is_first_rank = self._runtime.here.place.tp_rank == 0  # the ranks of a TP group know the same answers
        summed = self._loss.apart() if self._loss is not None and is_first_rank else (0.0, 0)
        total, count = self._runtime.world.gather_vectors(torch.tensor(summed, dtype=torch.float64)).sum(0).tolist()
        if self._loss is not None:
            self._loss.divergence = max(total / max(count, 1), 0.0)
