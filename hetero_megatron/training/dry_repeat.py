"""Micro-batches of a dry run that repeat others: what they hold and send, without running their operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hetero_megatron.pipeline import PipelineExecutor
from hetero_megatron.pipeline.executor import Live, Reducer, StageWork, StepResult
from hetero_megatron.schedule import Action
from hetero_megatron.training.memory import MemoryTracker


@dataclass(frozen=True)
class Trace:
    """What one forward or backward did.

    Attributes:
        peak, change: live bytes, at most and at its end, beyond those at its start.
        sent: bytes by rank.
        shape, dtype: of what a forward put out.
        grad: a backward made a gradient of the stage's input.
    """

    peak: int
    change: int
    sent: Mapping[int, int]
    shape: Sequence[int] = ()
    dtype: torch.dtype = torch.float32
    grad: bool = False


class RepeatingExecutor(PipelineExecutor):
    """The same as the executor of which it takes over the stage, but most micro-batches only allocate what another did.

    In a step of equal micro-batches all do the same, except the first one, which makes what later ones add to. (In a
    real step gradients travel during the last backward; here they wait for its end.) The second forward and the second
    backward are traced. Others make one tensor as large as all that the traced forward kept, and go as far beyond the
    bytes at their start as those did.
    Transfers between stages are always made, as it depends on their place in the schedule how long buffers live.
    """

    def __init__(self, like: PipelineExecutor, memory: MemoryTracker) -> None:
        super().__init__(like.comm, like.model, like.loss, like.before, like.after, like.dtype, like.place)
        self.memory = memory
        self._real: set[int] = set()  # micro-batches that are run
        self._traced: dict[str, int] = {}  # and those of them that stand for others, by kind of action
        self._traces: dict[str, Trace] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def run(self, work: StageWork, reducer: Reducer | None = None) -> StepResult:
        order = {kind: [a.micro_batch for a in work.actions if a.kind == kind] for kind in ("F", "B")}
        self._real = set(order["F"])
        if len(self._real) > 1 and len(set(work.sizes)) == 1 and all(batch is not None for batch in work.batches):
            self._real = {*order["F"][:2], *order["B"][:2]}
            self._traced = {kind: row[1] for kind, row in order.items()}
        return super().run(work, reducer)

    def _some_forward(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        mb = action.micro_batch
        if mb not in self._real:
            self._repeat_forward(mb, work, live, result)
            return
        self._run(action, work, live, result)
        if self._traced.get("F") == mb:
            out = live.outputs[mb]
            self._traces["F"] = replace(self._traces["F"], shape=out.shape, dtype=out.dtype)

    def _some_backward(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        mb = action.micro_batch
        if mb not in self._real:
            self._repeat_backward(mb, live)
            return
        self._run(action, work, live, result)
        if self._traced.get("B") == mb:
            made = self.before is not None and live.inputs[mb].grad is not None
            self._traces["B"] = replace(self._traces["B"], grad=made)

    def _run(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        """The action as it is; traced."""
        memory, sent = self.memory, dict(self.comm.sent_bytes)
        start, peak = memory.live, memory.peak
        memory.peak = start
        PipelineExecutor._handlers[action.kind](self, action, work, live, result)
        if self._traced.get(action.kind) == action.micro_batch:
            bytes_by_rank = {r: n - sent.get(r, 0) for r, n in self.comm.sent_bytes.items() if n > sent.get(r, 0)}
            self._traces[action.kind] = Trace(memory.peak - start, memory.live - start, bytes_by_rank)
        memory.peak = max(memory.peak, peak)

    def _repeat_forward(self, mb: int, work: StageWork, live: Live, result: StepResult) -> None:
        trace, batch = self._traces["F"], work.batches[mb]
        assert batch is not None
        start = self.memory.live
        out = torch.empty(trace.shape, dtype=trace.dtype, device=self.comm.device)
        kept = trace.change - (self.memory.live - start)
        self._kept[mb] = torch.empty(kept, dtype=torch.uint8, device=self.comm.device)
        self._go_to(trace.peak - trace.change)
        self._send(trace)
        live.outputs[mb] = out
        if self.loss is not None:
            live.losses.append(out.detach())
            result.tokens += batch.num_loss_tokens()

    def _repeat_backward(self, mb: int, live: Live) -> None:
        trace, start = self._traces["B"], self.memory.live
        self._go_to(trace.peak)
        self._send(trace)
        del live.outputs[mb], self._kept[mb]
        live.grads.pop(mb, None)
        if trace.grad:
            live.inputs[mb].grad = torch.empty_like(live.inputs[mb])
        assert self.memory.live - start == trace.change, f"micro-batch {mb} does not repeat another"

    def _go_to(self, beyond: int) -> None:
        """For a moment, so many live bytes more."""
        if beyond > 0:
            torch.empty(beyond, dtype=torch.uint8, device=self.comm.device)

    def _send(self, trace: Trace) -> None:
        for rank, count in trace.sent.items():
            self.comm.sent_bytes[rank] += count

    _handlers = {**PipelineExecutor._handlers, "F": _some_forward, "B": _some_backward}  # type: ignore[dict-item]
