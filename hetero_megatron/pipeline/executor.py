"""Runs the actions of one stage on one rank.

The executor knows nothing about schedules: it does what the list says, keeps the tensors that later actions
need, and posts receives ahead of time so that transfers overlap with compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetero_megatron.comm import Comm, Work
from hetero_megatron.data.batch import Batch
from hetero_megatron.ops.gemm import Product, WeightGradients
from hetero_megatron.ops.spec import seeded
from hetero_megatron.pipeline.boundary import Receive
from hetero_megatron.pipeline.stage_work import (
    ActivationMover,
    Key,
    Reducer,
    StageChunk,
    StageWork,
    StepResult,
    WeightGatherer,
)
from hetero_megatron.schedule import Action
from hetero_megatron.schedule.actions import HOST_LOOKAHEAD, LOOKAHEAD, SEND_LAG


@dataclass
class Live:
    """Tensors of one step that are still needed, by micro-batch and chunk."""

    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    products: dict[Key, deque[Product]] = field(default_factory=dict)  # between B_INPUT and W
    receives: dict[Action, Receive] = field(default_factory=dict)
    sends: dict[Key, list[Work]] = field(default_factory=dict)
    old_sends: deque[list[Work]] = field(default_factory=deque)


class PipelineExecutor:
    """One rank's stage.

    Args:
        chunks: of the stage, in the order of the layers.
        gradients: where products of weight gradients wait between B_INPUT and W.
        place: text for diagnosis, e.g. ``pipeline 0 stage 1``.

    Attributes:
        weights: of a stage that divides them; None: they are always there.
        activations: of a stage that has some in host memory; None: they stay where they are.
    """

    def __init__(
        self, comm: Comm, chunks: Sequence[StageChunk], dtype: torch.dtype, place: str, gradients: WeightGradients
    ) -> None:
        self.comm, self.chunks, self.dtype, self.place, self.gradients = comm, chunks, dtype, place, gradients
        self.weights: WeightGatherer | None = None
        self.activations: ActivationMover | None = None

    def run(self, work: StageWork, reducer: Reducer | None = None) -> StepResult:
        """Do all actions. ``reducer`` does the REDUCEs, which may start during the last backwards; without one they are
        left out."""
        live, step_result = Live(), StepResult()
        receives = [a for a in work.actions if a.kind.startswith("RECV")] if work.receives is None else work.receives
        reduces = [a for a in work.actions if a.kind == "REDUCE"]
        posted, receives_done, lookahead = 0, 0, self._lookahead(work)
        last = {a.chunk: i for i, a in enumerate(work.actions) if a.kind in ("B", "W")}
        # A pipeline without samples has no B: its gradients are zero, and its REDUCEs all that begins.
        begin_at, last_of = min(last.values(), default=0), {i: chunk for chunk, i in last.items()}
        clock = self.comm.clock
        clock.restart()
        started = clock.moment()
        clock.settle()
        if self.weights is not None:
            self.weights.begin_step()
        for i, action in enumerate(work.actions):
            if action.kind == "REDUCE" and reducer is None:
                continue
            self.comm.activity = f"{self.place}, action {action}"
            receiving = action.kind.startswith("RECV")
            while posted < len(receives) and (
                posted < receives_done + lookahead or receiving and action not in live.receives
            ):
                self._post(receives[posted], work, live)
                posted += 1
            if reducer is not None:
                if i == begin_at:
                    reducer.begin(reduces)
                if i in last_of:
                    self._last_gradients(action, live, reducer)
            begin = clock.moment()
            if action.kind == "REDUCE":
                assert reducer is not None
                reducer.complete(action)
            else:
                self._handlers[action.kind](self, action, work, live, step_result)
            clock.settle()
            step_result.ran.append((action, begin, clock.moment()))
            receives_done += receiving
        if self.weights is not None:
            self.weights.end_step()
        self.comm.activity = f"{self.place}, waiting for its last sends"
        for handles in [*live.old_sends, *live.sends.values()]:
            _wait(handles)
        step_result.whole = started, clock.moment()
        self.comm.activity = f"{self.place}, after its last action"
        return step_result

    def _lookahead(self, work: StageWork) -> int:
        """How many receives are posted before they are needed."""
        sides = [side for chunk in self.chunks for side in (chunk.before, chunk.after) if side is not None]
        neighbours = {peer for side in sides for peer in side(work.sizes[0]).peers} if work.sizes else ()
        return HOST_LOOKAHEAD if all(map(self.comm.through_host, neighbours)) else LOOKAHEAD

    def rehearse(self, work: StageWork) -> None:
        """Run every chunk forward, and backward unless gradients are off, once for each size of micro-batch, with no
        message under way. Gradients are added up as in a step.

        A device may load a kernel when it is first used, and wait for that until nothing runs on it: if a receive was
        waiting then, for what only a neighbour's kernel can send, neither would ever end.
        """
        self.comm.activity = f"{self.place}, warming up"
        self.comm.clock.restart()
        split = any(a.kind == "W" for a in work.actions)
        for micro_batch in (i for i, size in enumerate(work.sizes) if size not in work.sizes[:i]):
            self._rehearse(work, micro_batch, split)

    def _rehearse(self, work: StageWork, micro_batch: int, split: bool) -> None:
        live, step_result, size = Live(), StepResult(), work.sizes[micro_batch]
        if work.batches[micro_batch] is None:
            return
        for number, chunk in enumerate(self.chunks):
            key = (micro_batch, number)
            if chunk.before is not None:
                x = chunk.before(size).rehearse_receive(False, self.dtype)
                live.inputs[key] = x.requires_grad_(torch.is_grad_enabled())
            self._forward(Action("F", *key), work, live, step_result)
            if chunk.after is not None:
                chunk.after(size).rehearse_send(live.outputs[key].detach(), False)
        for number, chunk in reversed(list(enumerate(self.chunks))) if torch.is_grad_enabled() else ():
            key = (micro_batch, number)
            if chunk.after is not None:
                live.grads[key] = chunk.after(size).rehearse_receive(True, self.dtype)
            if split:
                self._backward_input(Action("B_INPUT", *key), work, live, step_result)
                self._weights(Action("W", *key), work, live, step_result)
            else:
                self._backward(Action("B", *key), work, live, step_result)
            if chunk.before is not None:
                chunk.before(size).rehearse_send(_gradient(live.inputs.pop(key)), True)

    def _last_gradients(self, action: Action, live: Live, reducer: Reducer) -> None:
        products = None
        if action.kind == "W":
            products = [weight for product in live.products.get(_key(action), ()) for weight in product.weights]
        reducer.last_gradients(action.chunk, products)

    def _post(self, action: Action, work: StageWork, live: Live) -> None:
        backward, chunk = action.kind == "RECV_B", self.chunks[action.chunk]
        boundary = chunk.after if backward else chunk.before
        assert boundary is not None, f"{action} on a stage without that neighbour"
        live.receives[action] = boundary(work.sizes[action.micro_batch]).receive(
            backward, self._tag(action, backward, work), self.dtype
        )

    def _tag(self, action: Action, backward: bool, work: StageWork) -> int:
        """One number per message of a pair of ranks, by the chunk before the boundary."""
        outwards = action.kind in ("SEND_F", "RECV_B")
        chunk = action.chunk if outwards else self.chunks[action.chunk].sender
        return 2 * (chunk * len(work.sizes) + action.micro_batch) + int(backward)

    def _receive_input(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        x = live.receives.pop(action).wait()
        live.inputs[_key(action)] = x.requires_grad_() if torch.is_grad_enabled() else x

    def _receive_grad(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        live.grads[_key(action)] = live.receives.pop(action).wait()
        # The gradient proves that the activation arrived, so this does not block; it frees the send buffer.
        _wait(live.sends.pop(_key(action), []))

    def input(self, key: Key, batch: Batch, live: Live) -> torch.Tensor:
        """What a chunk works on: received, or put out by the chunk before on this stage, [b, s, h]; or tokens [b, s]
        int64."""
        chunk, (mb, c) = self.chunks[key[1]], key
        if chunk.local_before:
            previous_key = (mb, c - 1)
            out = live.outputs[previous_key] if torch.is_grad_enabled() else live.outputs.pop(previous_key)
            live.inputs[key] = out.detach().requires_grad_(torch.is_grad_enabled())
        return live.inputs[key] if chunk.local_before or chunk.before is not None else batch.tokens

    def _forward(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        key, chunk = _key(action), self.chunks[action.chunk]
        batch, weights = work.batches[action.micro_batch], self.weights
        if batch is None:
            if weights is not None:
                weights.pass_forward(action.chunk)
            return
        x = self.input(key, batch, live)
        with self.comm.clock.work():
            if weights is not None:
                weights.begin_forward(action.chunk)
            if self.activations is not None:
                self.activations.begin_forward(key)
            out = chunk.model(x, batch)
            if chunk.loss is not None:
                out = chunk.loss(out, batch, work.seed)
            if weights is not None:
                weights.end_forward(action.chunk)
        if chunk.loss is not None:
            result.losses.append(out.detach())
            result.tokens += chunk.loss.count(batch)
        if not torch.is_grad_enabled():
            live.inputs.pop(key, None)
            if chunk.loss is not None:
                return
        live.outputs[key] = out

    def _backward(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        key, chunk, weights = _key(action), self.chunks[action.chunk], self.weights
        if work.batches[action.micro_batch] is None:
            if weights is not None:
                weights.pass_backward(action.chunk)
            return
        out = live.outputs.pop(key)
        if chunk.loss is not None:
            grad = torch.full_like(out, work.seed)
        else:
            grad = self.output_gradient(key, live)
        if not out.requires_grad:  # nothing of what came before is trained
            return
        with self.comm.clock.work():
            if self.activations is not None:
                self.activations.begin_backward(key)
            if weights is not None:
                weights.begin_backward(action.chunk)
            torch.autograd.backward(seeded([out], [grad]))
            if weights is not None:
                weights.end_backward(action.chunk)

    def output_gradient(self, key: Key, live: Live) -> torch.Tensor:
        """Of what a chunk put out, [b, s, h]: received, or made by the chunk after it on this stage."""
        if not self.chunks[key[1]].local_after:
            return live.grads.pop(key)
        return _gradient(live.inputs.pop((key[0], key[1] + 1)))

    def _backward_input(self, action: Action, work: StageWork, live: Live, result: StepResult) -> None:
        self.gradients.deferring = True
        try:
            self._backward(action, work, live, result)
        finally:
            self.gradients.deferring = False
        live.products[_key(action)] = self.gradients.take()

    def _weights(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        with self.comm.clock.work():
            self.gradients.flush(live.products.pop(_key(action)))
            if self.weights is not None:
                self.weights.end_products(action.chunk)

    def _send_output(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        key, boundary = _key(action), self.chunks[action.chunk].after
        assert boundary is not None
        if work.batches[action.micro_batch] is None:
            return
        out = live.outputs[key] if torch.is_grad_enabled() else live.outputs.pop(key)
        handles = boundary(work.sizes[action.micro_batch]).send(out.detach(), False, self._tag(action, False, work))
        if torch.is_grad_enabled():
            live.sends[key] = handles
        else:
            self._keep(handles, live)

    def _send_grad(self, action: Action, work: StageWork, live: Live, _: StepResult) -> None:
        boundary = self.chunks[action.chunk].before
        assert boundary is not None
        x = live.inputs.pop(_key(action))
        if work.batches[action.micro_batch] is None:
            return
        to = boundary(work.sizes[action.micro_batch])
        self._keep(to.send(_gradient(x), True, self._tag(action, True, work)), live)

    @staticmethod
    def _keep(handles: list[Work], live: Live) -> None:
        live.old_sends.append(handles)
        if len(live.old_sends) > SEND_LAG:
            _wait(live.old_sends.popleft())

    _handlers: Mapping[str, Callable[[PipelineExecutor, Action, StageWork, Live, StepResult], None]] = {
        "F": _forward,
        "B": _backward,
        "B_INPUT": _backward_input,
        "W": _weights,
        "SEND_F": _send_output,
        "SEND_B": _send_grad,
        "RECV_F": _receive_input,
        "RECV_B": _receive_grad,
    }


def _key(action: Action) -> Key:
    return action.micro_batch, action.chunk


def _gradient(x: torch.Tensor) -> torch.Tensor:
    """Of [b, s, h]; zeros where nothing depends on it."""
    return x.grad if x.grad is not None else torch.zeros_like(x)


def _wait(handles: list[Work]) -> None:
    for handle in handles:
        handle.wait()
