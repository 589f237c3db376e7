"""Decoder layers as device graphs, applied to a model stage from outside: one launch forward, one backward.

Each micro-batch in flight has graphs and memory of its own, for activations must live until its backward. A layer takes
a free set of them in forward and gives it back in backward; what is missing is captured when it is needed, so that
there are as many as the schedule has in flight. Parameters and gradients stay where they are.

A device graph is launches that are recorded once and then started together, on the same memory every time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.captured import CapturedTransfers
from hetero_megatron.errors import UserError
from hetero_megatron.model.gpt import GPTStage, Layer, ResidualStream
from hetero_megatron.model.layers import Context
from hetero_megatron.ops.dropout import ADAPTER, Draws, TabledDraws, draw_keys
from hetero_megatron.parallel.grad_sync.gradients import GradientSync
from hetero_megatron.parallel.recompute import keep_inputs
from hetero_megatron.platform.accelerator import Accelerator
from hetero_megatron.spec.lora import EVERY_TARGET

Result = TypeVar("Result")


class Graph(Protocol):
    """What was captured: it reads and writes where the launches did."""

    def replay(self) -> None:
        """Start it on the current stream."""


class GraphPool:
    """Graphs of one device that share memory.

    What is released during a capture is free for this and later graphs of the pool; what lives on is theirs until all
    of them are gone. So they run one at a time, and what one leaves in released memory is lost when the next one runs.
    """

    def __init__(self, accelerator: Accelerator, stream: Any = None) -> None:
        """``stream``: that captures, not the default one; None: a new one. Backward has to be captured on the stream
        of its forward, where autograd runs it."""
        self._accelerator, self._stream = accelerator, accelerator.stream() if stream is None else stream
        self._memory: Any = None

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """The launches of ``run`` as a graph, and what it returns, which has values when the graph has run.

        Raises:
            RuntimeError: something that no graph can hold, such as a wait of the host.
        """
        stream = self._accelerator.current_stream()
        self._stream.wait_stream(stream)
        try:
            with self._accelerator.on_stream(self._stream):
                graph = self._accelerator.begin_capture(self._memory)
                try:
                    returned = run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # which says once more that there is none
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            stream.wait_stream(self._stream)
        self._memory = graph.pool()
        return graph, returned


Tensor = torch.Tensor
Forward = Callable[..., ResidualStream]  # (x, context, added)
SITES = ADAPTER + len(EVERY_TARGET)  # where a layer may drop elements


class LayerGraphs:
    """Those of a stage's layers, which run as they are until ``warmed_up`` and where there is no backward.

    Every micro-batch must have the same shape, positions and kernels, and nothing in a layer may depend on values that
    the host knows, be sent by it, or hold it up: ``cli/flags/training.py`` refuses what would. Collectives of the
    device's library are launches as others are. What dropout
    draws by depends on step and sample, and so is copied to where a layer's graphs read it (``Draws.table``).

    Args:
        chunks: numbers of the layers that a micro-batch passes at once, half-open.
        sync: takes the gradients of the layers' parameters.
        eager_steps: of training that come before graphs.
    """

    def __init__(
        self, stage: GPTStage, chunks: Sequence[tuple[int, int]], comm: Comm, sync: GradientSync, eager_steps: int
    ) -> None:
        accelerator = comm.accelerator
        assert accelerator is not None, "there are no graphs of a processor"
        self.comm, self._eager_steps = comm, eager_steps
        self.accelerator, self.stream, self.sync, self.warmed_up = accelerator, accelerator.stream(), sync, False
        # Backward leaves nothing but the gradients of its layer's input, which the next graph that runs uses up.
        self.backward = GraphPool(accelerator, self.stream)
        self._keys: tuple[tuple[int, int], Tensor] | None = None  # of (seed, step)
        self._forward: dict[tuple[int, int], GraphPool] = {}
        self.anchor: Tensor | None = None  # needs a gradient, so that backward comes whatever is trained
        keep_inputs(stage)  # of modules that are recomputed: what backward's graph reads is not to be released
        self.layers: list[GraphedLayer] = []
        for layer in stage.layers():
            chunk = next(i for i, (a, b) in enumerate(chunks) if a <= layer.number < b)
            self.layers.append(GraphedLayer(self, layer, chunk, len(self.layers)))

    def begin_step(self) -> None:
        """A step of training begins."""
        self.warmed_up = self._eager_steps == 0
        self._eager_steps = max(self._eager_steps - 1, 0)

    def forward(self, chunk: int, place: int) -> GraphPool:
        """Of a chunk's layers for one of the micro-batches in flight. Their graphs run in the order in which they were
        captured, and not again before backward: so activations of one may lie where an earlier one worked. Those of
        other micro-batches may not."""
        if (chunk, place) not in self._forward:
            self._forward[chunk, place] = GraphPool(self.accelerator, self.stream)
        return self._forward[chunk, place]

    def draws(self, seed: int, step: int, sample: int) -> Draws:
        """Those of a micro-batch of this stage."""
        if not self.warmed_up:
            return Draws(seed, step, sample)
        if self._keys is None or self._keys[0] != (seed, step):
            self._keys = (seed, step), draw_keys(seed, step, [layer.number for layer in self.layers], SITES)
        keys = self._keys[1]
        return Draws(seed, step, sample, torch.cat([keys.new_full((len(keys), 1), sample), keys], 1))

    def __len__(self) -> int:
        """How many graphs there are."""
        return sum(slot.graphs for layer in self.layers for slot in layer.slots)


class GraphedLayer:
    def __init__(self, graphs: LayerGraphs, layer: Layer, chunk: int, place: int) -> None:
        self.graphs, self.number, self.chunk, self.run = graphs, layer.number, chunk, layer.forward
        self.place = place  # in the table of random numbers
        self.params = [param for param in layer.parameters() if param.requires_grad]
        self.slots: list[Slot] = []
        self.free: list[Slot] = []
        layer.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, x: Tensor, context: Context, added: Tensor | None = None) -> ResidualStream:
        if not self.graphs.warmed_up or not torch.is_grad_enabled():
            return self.run(x, context, added)
        assert context.documents is None, "what the host knows is not the same every time"
        draws = self._row(context)
        if not self.free:
            self.slots.append(Slot(self, x, added, context, draws))
            self.free.append(self.slots[-1])
        slot = self.free.pop()
        if self.graphs.anchor is None:
            self.graphs.anchor = x.new_empty(0).requires_grad_()
        slot.load_draws(draws)
        return ResidualStream(*_Replay.apply(slot, self.graphs.anchor, x, added))

    def _row(self, context: Context) -> Tensor | None:
        """This layer's random numbers of the micro-batch, on the device; None: it has no dropout."""
        if context.draws is None:
            return None
        assert isinstance(context.draws, Draws) and context.draws.table is not None, "dropout is drawn by the host"
        return context.draws.table[self.place]

    def capture(self, pool: GraphPool, run: Callable[[], Any]) -> tuple[Graph, Any]:
        transfers = CapturedTransfers(self.graphs.comm)
        try:
            with transfers.recorded():
                graph, returned = pool.capture(run)
            return LayerGraph(graph, transfers), returned
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
            raise UserError(
                f"layer {self.number} cannot be captured as a graph: {problem}", field="--cuda-graph-impl",
                value="local", accepted="none, or other kernels (--kernels)",
            ) from error  # fmt: skip


class LayerGraph:
    """A graph with the transfers that it holds."""

    def __init__(self, graph: Graph, transfers: CapturedTransfers) -> None:
        self._graph, self._transfers = graph, transfers

    def replay(self) -> None:
        """See :class:`Graph`."""
        self._graph.replay()
        self._transfers.started()


class Slot:
    """The graphs of one layer for one micro-batch in flight, and what they read and write."""

    def __init__(
        self, layer: GraphedLayer, x: Tensor, added: Tensor | None, context: Context, draws: Tensor | None
    ) -> None:
        self.layer, self.draws = layer, None if draws is None else draws.clone()
        if self.draws is not None:
            context = replace(context, draws=TabledDraws(self.draws))
        self.context = context  # whose tensors the graphs read
        inputs = [tensor for tensor in (x, added) if tensor is not None]
        # What another layer's graph puts out is read where it lies.
        static = {tensor.data_ptr() for peer in layer.graphs.layers for slot in peer.slots for tensor in slot.outputs}
        self.chained = [tensor.data_ptr() in static for tensor in inputs]
        self.inputs = [
            (tensor if chained else torch.empty_like(tensor)).data.requires_grad_(tensor.requires_grad)
            for tensor, chained in zip(inputs, self.chained, strict=True)
        ]
        self.outputs: Sequence[Tensor] = ()
        self._load(inputs)

        def run() -> ResidualStream:
            with torch.enable_grad():
                return layer.run(self.inputs[0], self.context, *self.inputs[1:])

        self.forward, self._outputs = layer.capture(layer.graphs.forward(layer.chunk, len(layer.slots)), run)
        self.outputs = [tensor.detach() for tensor in self._outputs]
        self.backward: Graph | None = None
        self.names: Sequence[str] = ()  # of the parameters whose gradients backward adds
        self.grads: list[Tensor] = []  # of the outputs
        self.input_grads: Sequence[Tensor | None] = ()

    @property
    def graphs(self) -> int:
        return 1 + (self.backward is not None)

    def _load(self, given: Sequence[Tensor]) -> None:
        for static, tensor, chained in zip(self.inputs, given, self.chained, strict=True):
            assert static.shape == tensor.shape, "all micro-batches have one shape"
            if not chained:
                static.data.copy_(tensor)  # not a change that autograd would see: the graph reads it anew
            else:
                assert static.data_ptr() == tensor.data_ptr(), "layers follow one another as when they were captured"

    def load_draws(self, draws: Tensor | None) -> None:
        """The random numbers of the micro-batch that comes, until its backward."""
        if self.draws is not None:
            assert draws is not None, "all micro-batches have dropout, or none"
            self.draws.copy_(draws)

    def run_forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        self._load(given)
        self.forward.replay()
        return tuple(tensor.detach() for tensor in self.outputs)

    def run_backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs, where the next layer's graph reads them, or else copies."""
        sync = self.layer.graphs.sync
        if self.backward is None:
            self._capture_backward(grads)
        assert self.backward is not None
        for static, grad in zip(self.grads, grads, strict=True):
            if static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        sync.before_graph(self.names)
        self.backward.replay()
        sync.after_graph(self.names)
        self.layer.free.append(self)
        return [
            grad if grad is None or chained else grad.clone()
            for grad, chained in zip(self.input_grads, self.chained, strict=True)
        ]

    def _capture_backward(self, grads: Sequence[Tensor]) -> None:
        graphs, params = self.layer.graphs, self.layer.params
        static = {
            grad.data_ptr() for layer in graphs.layers for slot in layer.slots
            for grad in slot.input_grads if grad is not None
        }  # fmt: skip
        copies: dict[int, Tensor] = {}  # a sum has one gradient for both
        for grad in grads:
            key = grad.data_ptr()
            copies[key] = grad if key in static else copies[key] if key in copies else torch.empty_like(grad)
            self.grads.append(copies[key])
        wanted_inputs = [tensor for tensor in self.inputs if tensor.requires_grad]

        def run() -> list[Tensor | None]:
            # Kept, though nobody goes through it again: what it saved is what the graph reads.
            gradients = torch.autograd.grad(
                self._outputs, [*wanted_inputs, *params], self.grads, retain_graph=True, allow_unused=True
            )
            for param, grad in zip(params, gradients[len(wanted_inputs) :], strict=True):
                if grad is not None:  # its product was not taken
                    graphs.sync.add(param, grad)
            gradients_left = iter(gradients)
            return [next(gradients_left) if tensor.requires_grad else None for tensor in self.inputs]

        with graphs.sync.captured() as names:
            self.backward, self.input_grads = self.layer.capture(graphs.backward, run)
        self.names = tuple(dict.fromkeys(names))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, anchor: Tensor, x: Tensor, added: Tensor | None) -> tuple[Tensor, ...]:
        ctx.slot, ctx.both = slot, added is not None
        return slot.run_forward(x, added) if added is not None else slot.run_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients = ctx.slot.run_backward(grads)
        return None, None, *gradients, *(() if ctx.both else (None,))
