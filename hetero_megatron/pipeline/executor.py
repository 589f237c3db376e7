"""Runs the actions of one stage on one rank.

The executor knows nothing about schedules: it does what the list says, keeps the tensors that later actions
need, and posts receives ahead of time so that transfers overlap with compute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from hetero_megatron.comm import Comm, Handle
from hetero_megatron.data.batch import Batch
from hetero_megatron.pipeline.boundary import Boundary, Receive
from hetero_megatron.schedule import Action
from hetero_megatron.schedule.actions import LOOKAHEAD, SEND_LAG

LossFunction = Callable[[torch.Tensor, Batch], torch.Tensor]  # (logits, batch) -> sum of token losses, scalar


class Reducer(Protocol):
    """Who sums gradients: told when the last backward begins, asked for each REDUCE at its place in the list."""

    def begin(self, reduces: Sequence[Action]) -> None: ...

    def complete(self, action: Action) -> None: ...


@dataclass(frozen=True)
class StageWork:
    """What a step gives one rank to do.

    Attributes:
        actions: lowered actions of its stage, and the REDUCEs after them.
        batches: its rows of each micro-batch (None where it has no rows).
        sizes: sequences of each micro-batch (of the whole pipeline, which defines the boundary layouts).
        seed: value with which backward starts at the loss sum.
    """

    actions: Sequence[Action]
    batches: Sequence[Batch | None]
    sizes: Sequence[int]
    seed: float = 1.0


@dataclass(frozen=True, slots=True)
class TimedAction:
    """What an action took on this rank: ``start`` and ``end`` by ``time.perf_counter``, and ``computed``, its seconds
    of compute by the chip's clock (the rest it spent communicating)."""

    action: Action
    start: float
    end: float
    computed: float


@dataclass
class StepResult:
    """Sum of token losses and number of tokens (of this rank's head stage, else 0), and seconds: computing,
    waiting for pipeline neighbours, communicating otherwise (adding up gradients after the last backward included);
    ``actions`` in the order in which they ran."""

    loss_sum: float | torch.Tensor = 0.0  # a tensor [], so that the executor never waits for the device
    tokens: int = 0
    busy_seconds: float = 0.0
    bubble_seconds: float = 0.0
    communication_seconds: float = 0.0
    actions: list[TimedAction] = field(default_factory=list)


@dataclass
class Live:
    """Tensors of one step that are still needed, by micro-batch."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[int, torch.Tensor] = field(default_factory=dict)
    receives: dict[Action, Receive] = field(default_factory=dict)
    sends: dict[int, list[Handle]] = field(default_factory=dict)
    old_sends: deque[list[Handle]] = field(default_factory=deque)
    losses: list[torch.Tensor] = field(default_factory=list)


class PipelineExecutor:
    """One rank's stage.

    Args:
        model: the stage; called as ``model(x, batch)``.
        loss: on the head stage, maps logits to the sum of token losses; None elsewhere.
        boundaries: ``before(size)`` and ``after(size)`` give the boundary with the neighbour stages.
        place: text for diagnosis, e.g. ``pipeline 0 stage 1``.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        loss: LossFunction | None,
        before: Callable[[int], Boundary] | None,
        after: Callable[[int], Boundary] | None,
        dtype: torch.dtype,
        place: str,
    ) -> None:
        self.comm, self.model, self.loss, self.dtype, self.place = comm, model, loss, dtype, place
        self.before, self.after = before, after

    def run(self, work: StageWork, reducer: Reducer | None = None) -> StepResult:
        """Do all actions. ``reducer`` does the REDUCEs, which may start during the last B; without one they are left
        out."""
        live, result = Live(), StepResult()
        receives = [a for a in work.actions if a.kind.startswith("RECV")]
        reduces = [a for a in work.actions if a.kind == "REDUCE"]
        posted, taken = 0, 0
        # A pipeline without samples has no B: its gradients are zero, and its REDUCEs all that begins.
        begin_at = max((i for i, a in enumerate(work.actions) if a.kind == "B"), default=0)
        clock, start, waited = self.comm.clock, time.perf_counter(), self.comm.seconds.neighbours
        clock.settle()
        for i, action in enumerate(work.actions):
            if action.kind == "REDUCE" and reducer is None:
                continue
            self.comm.activity = f"{self.place}, action {action}"
            while posted < min(taken + LOOKAHEAD, len(receives)):
                self._post(receives[posted], work, live)
                posted += 1
            if i == begin_at and reducer is not None:
                reducer.begin(reduces)
            begin, done = time.perf_counter(), clock.computed
            if action.kind == "REDUCE":
                assert reducer is not None
                reducer.complete(action)
            else:
                self._handlers[action.kind](self, action, work, live, result)
            clock.settle()
            spent = clock.computed - done
            result.actions.append(TimedAction(action, begin, time.perf_counter(), spent))
            result.busy_seconds += spent if action.kind != "REDUCE" else 0.0
            taken += action.kind.startswith("RECV")
        self.comm.activity = f"{self.place}, waiting for its last sends"
        for handles in [*live.old_sends, *live.sends.values()]:
            _wait(handles)
        if live.losses:
            result.loss_sum = torch.stack([x.double() for x in live.losses]).sum()
        result.bubble_seconds = self.comm.seconds.neighbours - waited
        result.communication_seconds = time.perf_counter() - start - result.busy_seconds - result.bubble_seconds
        self.comm.activity = f"{self.place}, after its last action"
        return result

    def _post(self, action: Action, work: StageWork, live: Live) -> None:
        backward = action.kind == "RECV_B"
        boundary = self.after if backward else self.before
        assert boundary is not None, f"{action} on a stage without that neighbour"
        live.receives[action] = boundary(work.sizes[action.micro_batch]).receive(
            backward, _tag(action.micro_batch, backward), self.dtype
        )

    def _receive_input(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        x = live.receives.pop(action).wait()
        live.inputs[action.micro_batch] = x.requires_grad_() if torch.is_grad_enabled() else x

    def _receive_grad(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        live.grads[action.micro_batch] = live.receives.pop(action).wait()
        # The gradient proves that the activation arrived, so this does not block; it frees the send buffer.
        _wait(live.sends.pop(action.micro_batch, []))

    def _forward(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        mb = action.micro_batch
        batch = work.batches[mb]
        if batch is None:
            return
        x = live.inputs[mb] if self.before is not None else batch.tokens
        with self.comm.clock.work():
            out = self.model(x, batch)
            if self.loss is not None:
                out = self.loss(out, batch)
        if self.loss is not None:
            live.losses.append(out.detach())
            result.tokens += batch.num_loss_tokens()
        if not torch.is_grad_enabled():
            live.inputs.pop(mb, None)
            if self.loss is not None:
                return
        live.outputs[mb] = out

    def _backward(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        mb = action.micro_batch
        if work.batches[mb] is None:
            return
        out = live.outputs.pop(mb)
        grad = torch.full_like(out, work.seed) if self.loss is not None else live.grads.pop(mb)
        with self.comm.clock.work():
            torch.autograd.backward(out, grad)

    def _send_output(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        mb = action.micro_batch
        assert self.after is not None
        if work.batches[mb] is None:
            return
        out = live.outputs[mb] if torch.is_grad_enabled() else live.outputs.pop(mb)
        handles = self.after(work.sizes[mb]).send(out.detach(), False, _tag(mb, False))
        if torch.is_grad_enabled():
            live.sends[mb] = handles
        else:
            self._keep(handles, live)

    def _send_grad(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        mb = action.micro_batch
        assert self.before is not None
        x = live.inputs.pop(mb)
        if work.batches[mb] is None:
            return
        grad = x.grad if x.grad is not None else torch.zeros_like(x)
        self._keep(self.before(work.sizes[mb]).send(grad, True, _tag(mb, True)), live)

    @staticmethod
    def _keep(handles: list[Handle], live: Live) -> None:
        live.old_sends.append(handles)
        if len(live.old_sends) > SEND_LAG:
            _wait(live.old_sends.popleft())

    _handlers: Mapping[str, Callable[[PipelineExecutor, Action, StageWork, Live, StepResult], None]] = {
        "F": _forward,
        "B": _backward,
        "SEND_F": _send_output,
        "SEND_B": _send_grad,
        "RECV_F": _receive_input,
        "RECV_B": _receive_grad,
    }


def _tag(micro_batch: int, backward: bool) -> int:
    return 2 * micro_batch + int(backward)


def _wait(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()
