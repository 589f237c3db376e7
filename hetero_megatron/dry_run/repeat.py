"""Micro-batches of a dry run that repeat others: what they hold and send, without running their operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.pipeline import PipelineExecutor
from hetero_megatron.pipeline.executor import Live
from hetero_megatron.pipeline.stage_work import Key, Reducer, StageWork, StepResult
from hetero_megatron.schedule import Action
from hetero_megatron.schedule.actions import COMPUTE


@dataclass(frozen=True)
class Trace:
    """What one forward, backward or W did.

    Attributes:
        peak, change: live bytes, at most and at its end, beyond those at its start.
        sent: bytes by rank.
        shape, dtype: of what a forward put out; same: it is what was put in, of a chunk without layers.
        grad: a backward made a gradient of the chunk's input.
        host: bytes of activations in host memory, more at its end than at its start.
    """

    peak: int
    change: int
    sent: Mapping[int, int]
    shape: Sequence[int] = ()
    dtype: torch.dtype = torch.float32
    same: bool = False
    grad: bool = False
    host: int = 0


class RepeatingExecutor(PipelineExecutor):
    """The same as the executor of which it takes over the stage, but most micro-batches only allocate what another did.

    In a step of equal micro-batches all do the same in a chunk, except the first one, which makes what later ones add
    to. (In a real step gradients travel during the last backward; here they wait for its end.) Of each chunk the second
    forward, the second backward and the second W are traced. Others make one tensor as large as all that the traced one
    kept, and go as far beyond the bytes at their start as it did.
    Transfers between stages are always made, as it depends on their place in the schedule how long buffers live.
    """

    def __init__(self, like: PipelineExecutor, memory: MemoryTracker) -> None:
        super().__init__(like.comm, like.chunks, like.dtype, like.place, like.gradients)
        self.memory, self.weights, self.activations = memory, like.weights, like.activations
        self._real: set[int] = set()  # micro-batches that are run
        self._traced: set[Action] = set()  # those actions of them that stand for others
        self._traces: dict[tuple[str, int], Trace] = {}  # by kind and chunk
        self._kept: dict[Key, torch.Tensor] = {}

    def run(self, work: StageWork, reducer: Reducer | None = None) -> StepResult:
        order: dict[tuple[str, int], list[Action]] = {}
        for action in work.actions:
            if action.kind in COMPUTE:
                order.setdefault((action.kind, action.chunk), []).append(action)
        self._real = {a.micro_batch for row in order.values() for a in row}
        alike = len(set(work.sizes)) == 1 and all(batch is not None for batch in work.batches)
        if self.weights is not None:  # what one micro-batch, or chunk, gathers or puts off another one may find there
            alike = alike and self.weights.reshard and not any(kind == "W" or chunk for kind, chunk in order)
        if len(self._real) > 1 and alike:
            # Of divided weights the second backward still makes sums at the owners.
            some = 2 if self.weights is None else 3
            self._real = {a.micro_batch for row in order.values() for a in row[:some]}
            self._traced = {row[some - 1] for row in order.values() if len(row) >= some}
        return super().run(work, reducer)

    def _some(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        """A computing action, run or repeated."""
        if action.micro_batch not in self._real:
            self._repeats[action.kind](self, action, work, live, result)
            return
        memory, sent = self.memory, dict(self.comm.sent_bytes)
        start, peak, host = memory.live, memory.peak, self._host_bytes()
        memory.peak = start
        PipelineExecutor._handlers[action.kind](self, action, work, live, result)
        if self.activations is not None:  # the last ones would otherwise go when another action begins
            self.activations.settle()
        if action in self._traced:
            bytes_by_rank = {r: n - sent.get(r, 0) for r, n in self.comm.sent_bytes.items() if n > sent.get(r, 0)}
            host_bytes = self._host_bytes() - host
            trace = Trace(memory.peak - start, memory.live - start, bytes_by_rank, host=host_bytes)
            self._traces[action.kind, action.chunk] = self._completed(trace, action, live)
        memory.peak = max(memory.peak, peak)

    def _completed(self, trace: Trace, action: Action, live: Live) -> Trace:
        """With what ``action`` put out, or whether it made a gradient."""
        key = (action.micro_batch, action.chunk)
        put_in = live.inputs.get(key)
        if action.kind == "F":
            out = live.outputs[key]
            same_memory = put_in is not None and out.untyped_storage()._cdata == put_in.untyped_storage()._cdata
            return replace(trace, shape=out.shape, dtype=out.dtype, same=same_memory)
        return replace(trace, grad=action.kind != "W" and put_in is not None and put_in.grad is not None)

    def _host_bytes(self) -> int:
        return 0 if self.activations is None else self.activations.host.live

    def _hold_host(self, trace: Trace) -> None:
        if self.activations is not None:
            self.activations.host.hold(trace.host)

    def _repeat_forward(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        trace, batch = self._traces["F", action.chunk], work.batches[action.micro_batch]
        key = (action.micro_batch, action.chunk)
        assert batch is not None
        start = self.memory.live
        out = self.input(key, batch, live)
        if not trace.same:
            out = torch.empty(trace.shape, dtype=trace.dtype, device=self.comm.device)
        self._keep_bytes(key, trace.change - (self.memory.live - start))
        self._go_to(trace.peak - trace.change)
        self._send(trace)
        self._hold_host(trace)
        live.outputs[key] = out
        if self.chunks[action.chunk].loss is not None:
            result.losses.append(out.detach())
            result.tokens += batch.num_loss_tokens()

    def _repeat_backward(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        trace, start = self._traces[action.kind, action.chunk], self.memory.live
        key = (action.micro_batch, action.chunk)
        self._go_to(trace.peak)
        self._send(trace)
        self._hold_host(trace)
        del live.outputs[key], self._kept[key]
        if self.chunks[action.chunk].loss is None:
            self.output_gradient(key, live)
        if trace.grad:
            live.inputs[key].grad = torch.empty_like(live.inputs[key])
        if action.kind == "B_INPUT":
            self._keep_bytes(key, trace.change - (self.memory.live - start))
        assert self.memory.live - start == trace.change, f"{action} does not repeat another"

    def _repeat_weights(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        trace, start = self._traces["W", action.chunk], self.memory.live
        self._go_to(trace.peak)
        del self._kept[action.micro_batch, action.chunk]
        assert self.memory.live - start == trace.change, f"{action} does not repeat another"

    def _keep_bytes(self, key: Key, count: int) -> None:
        self._kept[key] = torch.empty(count, dtype=torch.uint8, device=self.comm.device)

    def _go_to(self, beyond: int) -> None:
        """For a moment, so many live bytes more."""
        if beyond > 0:
            torch.empty(beyond, dtype=torch.uint8, device=self.comm.device)

    def _send(self, trace: Trace) -> None:
        for rank, count in trace.sent.items():
            self.comm.sent_bytes[rank] += count

    _repeats = {"F": _repeat_forward, "B": _repeat_backward, "B_INPUT": _repeat_backward, "W": _repeat_weights}
    _handlers = {**PipelineExecutor._handlers, **dict.fromkeys(COMPUTE, _some)}  # type: ignore[arg-type]
