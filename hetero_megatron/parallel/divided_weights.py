"""Weights that the ranks of a stage divide: whole while they are used, and elsewhere only with their owners.

Between uses the memory of a layer's weights is given back, and every rank has the masters of its own rows; with an
optimizer in host memory it has them there, so that of a stage's weights the device holds two layers. Before the
layer's forward, and again before its backward, the rows of all ranks are gathered, those of the next layer meanwhile;
after its backward gradients go to the owners (``grad_sync/divided_sums.py``). Tensors stay the same objects throughout:
only their storage comes and goes, so that what autograd keeps of them is whole again when backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.model.gpt import GPTStage, Layer, ResidualStream
from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.parallel.grad_sync.divided_sums import DividedSums
from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.flat_memory import FlatTensors, flatten_parameters
from hetero_megatron.parallel.grad_sync.routes import HopRoutes, OwnedPiece
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.canonical import Stage, WeightSharding
from hetero_megatron.utils.out_of_memory import memory_for
from hetero_megatron.utils.text import format_bytes

if TYPE_CHECKING:
    from hetero_megatron.parallel.host_memory import HostRows

Step = int | str  # of a micro-batch through a chunk: "embed", the number of a layer, "head"
_NAMES: Mapping[Step, str] = {"embed": "the embedding", "head": "norm and head"}


class GatheredPart:
    """Divided weights that are gathered at once: of the embedding, a layer, or norm and head.

    Args:
        exchanges: of its buckets, for gathering only.
        params: of the rank, by logical name; those of the buckets are moved to one piece of memory per dtype. Where
            they have none, neither do they get any before they are gathered.
        resized: called with such memory when its size has changed.
        name: such as ``layer 3``; roomier: the plan's choice that needs less memory, for when there is none.
        host: where the masters are, if in host memory.

    Attributes:
        buckets: their indices, in backward order; trained: whether they have gradients.
        memories: of all its weights.
        masters: by bucket, values of the rows that this rank owns; until there are some, the weights stay whole.
    """

    def __init__(
        self, exchanges: Sequence[BucketExchange], params: Mapping[str, torch.nn.Parameter],
        resized: Callable[[torch.Tensor], None], name: str, roomier: str, host: HostRows | None = None,
    ) -> None:  # fmt: skip
        self._exchanges, self._resized, self._host = exchanges, resized, host
        self._loaded: Any = None  # the moment at which rows of host memory are here
        self.buckets, self.trained = [e.bucket.index for e in exchanges], exchanges[0].bucket.trained
        bucket_params = [params[name] for e in exchanges for name in e.bucket.names]
        self._whole = all(param.untyped_storage().nbytes() or not param.numel() for param in bucket_params)
        self._flat: dict[int, FlatTensors] = {}
        self.memories: list[torch.Tensor] = []
        for dtype in dict.fromkeys(params[e.bucket.names[0]].dtype for e in exchanges):
            dtype_buckets = [e.bucket for e in exchanges if params[e.bucket.names[0]].dtype == dtype]
            self._flat |= flatten_parameters(params, dtype_buckets, together=True)
            self.memories.append(self._flat[dtype_buckets[0].index].memory)
        self._bytes = [memory.untyped_storage().nbytes() for memory in self.memories]
        purpose = f"gathering the weights of {name} ({format_bytes(sum(self._bytes))}), which its stage divides"
        self._memory = partial(memory_for, purpose, roomier)
        if not self._whole:
            self._resize([0] * len(self._bytes))
        # Not the parameters: what is gathered would be a change of what autograd has kept.
        self._views = {name: view for flat in self._flat.values() for name, view in flat.views.items()}
        self.masters: Mapping[int, Sequence[torch.Tensor]] = {}
        self._users, self._coming = 0, False

    def release(self) -> None:
        """Give the memory back."""
        if self.masters:
            self._resize([0] * len(self._bytes))
            self._whole = False

    def _resize(self, sizes: Sequence[int]) -> None:
        for memory, size in zip(self.memories, sizes, strict=True):
            memory.untyped_storage().resize_(size)
            self._resized(memory)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather, unless the weights are whole or under way."""
        if self._whole or self._coming:
            return
        with self._memory():
            self._resize(self._bytes)
            owned = {e.bucket.index: [self._views[x.name][x.slices] for x in e.pieces] for e in self._exchanges}
            views, rows = ([x for index in self.buckets for x in of[index]] for of in (owned, self.masters))
            if self._host is not None:
                self._loaded = self._host.load(views, rows)
                with self._host.after_load():
                    self._start_spread(owned)
            else:
                if views:  # one launch, however many pieces
                    torch._foreach_copy_(views, rows)
                self._start_spread(self.masters)
        self._coming = True

    def _start_spread(self, rows: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Send what this rank owns, on the device, by bucket and piece."""
        for exchange in self._exchanges:
            index = exchange.bucket.index
            flat = self._flat[index] if exchange.bucket.dense else None
            exchange.start_spread(0, rows[index], self._views, self._views[exchange.bucket.names[0]].dtype, flat)

    @torch.no_grad()
    def use(self) -> None:
        """The weights are whole when this returns, until :meth:`end` has been called as often."""
        self._users += 1
        self.start()
        if self._coming:
            if self._host is not None:
                self._host.into.join(self._loaded)
            with self._memory():
                for exchange in self._exchanges:
                    exchange.finish_spread(0, self._views)
            self._whole, self._coming = True, False

    def end(self) -> None:
        """One use less."""
        self._users -= 1
        assert self._users >= 0, "ended without use"
        if not self._users:
            self.release()


class DividedWeights:
    """One rank's divided weights, told what executor and model come to.

    The parts of a step are in use until the next one begins, and those of the next one are under way meanwhile. All
    ranks of the stage come to the same steps in the same order, those without rows of a micro-batch too
    (:meth:`pass_forward`, :meth:`pass_backward`).

    Args:
        tied: the head has the embedding's matrix.
        buckets: that this rank has a part of; params: of the rank, by logical name.
        sums: of the gradients; None: none of these weights is trained.
        gradients: of the kernel plan, which knows whether products wait for their W.
        host: where what this rank keeps is, if in host memory.

    Attributes:
        parts: of the weights, by step; names: logical ones of all of them.
        pieces: what this rank owns, by bucket.
        reshard: weights are given up between forward and backward.
    """

    def __init__(
        self, stage: Stage, tied: bool, buckets: Iterable[Bucket], params: Mapping[str, torch.nn.Parameter],
        sums: DividedSums | None, comm: Comm, boxes: Mapping[str, Box], gradients: WeightGradients,
        host: HostRows | None = None,
    ) -> None:  # fmt: skip
        assert stage.weights is not None
        self._gather, self.reshard = stage.weights.gather, stage.weights.reshard_after_forward
        self._gradients, self._sums, self._host = gradients, sums, host
        self._resized: Callable[[torch.Tensor], None] = lambda memory: None
        routes: dict[tuple[object, ...], HopRoutes] = {}
        exchanges: dict[Step, list[BucketExchange]] = {}
        for bucket in buckets:
            assert bucket.segment is not None
            exchanges.setdefault(bucket.segment, []).append(BucketExchange(bucket, comm, boxes, routes))
        self.parts = {
            step: GatheredPart(
                step_exchanges, params, lambda x: self._resized(x), _NAMES.get(step, f"layer {step}"),
                _roomier(stage.weights),
            ) for step, step_exchanges in exchanges.items()
        }
        self.pieces = {e.bucket.index: e.pieces for step_exchanges in exchanges.values() for e in step_exchanges}
        self.names = {
            piece for step_exchanges in exchanges.values() for e in step_exchanges for piece in e.bucket.names
        }
        self._chunks = [self._steps(stage, number, tied) for number in range(len(stage.chunks))]
        self._chunk_of = {step: number for number, steps in enumerate(self._chunks) for step in steps}
        self._open: list[GatheredPart] = []  # in use by the step that runs
        self._pending: list[GatheredPart] = []  # of the backward that runs: whose gradients have not been sent

    def _steps(self, stage: Stage, number: int, tied: bool) -> dict[Step, list[GatheredPart]]:
        """What each step of a chunk uses."""
        a, b = stage.chunks[number]
        steps: dict[Step, list[Step]] = {"embed": ["embed"]} if stage.embed and number == 0 else {}
        steps |= {layer: [layer] for layer in range(a, b)}
        if stage.head and number + 1 == len(stage.chunks):
            steps["head"] = ["head", "embed"] if tied else ["head"]
        return {step: [self.parts[s] for s in step_names if s in self.parts] for step, step_names in steps.items()}

    def attach(
        self, kept: Mapping[int, Sequence[torch.Tensor]], frozen: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Give up the weights: from now on these have their values, of the owned pieces by bucket, ``kept`` by the
        optimizer or ``frozen``."""
        if self._host is not None:
            frozen = {bucket: [self._host.memory.keep(x) for x in values] for bucket, values in frozen.items()}
        for part in self.parts.values():
            part.masters = {bucket: kept[bucket] if part.trained else frozen[bucket] for bucket in part.buckets}
            part.release()

    def owned(self) -> Iterator[tuple[OwnedPiece, torch.Tensor]]:
        """What this rank keeps."""
        for part in self.parts.values():
            for bucket, masters in part.masters.items():
                yield from zip(self.pieces[bucket], masters, strict=True)

    def observe(self, resized: Callable[[torch.Tensor], None]) -> None:
        """Have ``resized`` called with the memory of each part, and again whenever it is given back or there again."""
        self._resized = resized
        for part in self.parts.values():
            for memory in part.memories:
                resized(memory)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which all weights can be read; all ranks of the stage enter it."""
        self._use(self.parts.values())
        try:
            yield
        finally:
            self._end(self.parts.values())

    def begin_step(self) -> None:
        if self._gather == "step":
            self._use(self.parts.values())

    def end_step(self) -> None:
        if self._gather == "step":
            self._end(self.parts.values())

    def begin_forward(self, chunk: int) -> None:
        if self._gather == "micro-batch":
            self._use(self._used(chunk))
        if "embed" in self._chunks[chunk]:
            self.come_to("embed")

    def come_to(self, step: Step) -> None:
        """In forward: what the step before used is not used any more, and weights of this one are whole."""
        steps = self._chunks[self._chunk_of[step]]
        order = list(steps)
        self._turn_to(steps[step], steps.get(order[order.index(step) + 1]) if step != order[-1] else None)
        if step != "embed" and torch.is_grad_enabled() and not self.reshard:
            self._use(steps[step])  # until its backward

    def end_forward(self, chunk: int) -> None:
        self._turn_to()
        if self._gather == "micro-batch":
            self._end(self._used(chunk))

    def begin_backward(self, chunk: int) -> None:
        steps = self._chunks[chunk]
        if self._gather == "micro-batch":
            self._use(self._used(chunk, backward=True))
        self._pending = [] if self._gradients.deferring else self._summed(chunk)
        if "head" in steps:
            self.come_back_to("head")

    def come_back_to(self, step: Step) -> None:
        """The same in backward, and gradients of the steps behind are complete."""
        steps = self._chunks[self._chunk_of[step]]
        order = [s for s in reversed(steps) if s != "embed"]  # whose backward needs no weights
        while self._pending and self._pending[0] is not self.parts.get(step):
            self._reduce(self._pending.pop(0))
        self._turn_to(steps[step], steps.get(order[order.index(step) + 1]) if step != order[-1] else None)

    def end_backward(self, chunk: int) -> None:
        self._turn_to()
        while self._pending:
            self._reduce(self._pending.pop(0))
        if self._gather == "micro-batch":
            self._end(self._used(chunk, backward=True))
        if not self.reshard:
            for step, step_parts in self._chunks[chunk].items():
                self._end(step_parts if step != "embed" else ())

    def end_products(self, chunk: int) -> None:
        """A W has brought the gradients that B_INPUT had put off."""
        for part in self._summed(chunk):
            self._reduce(part)

    def _reduce(self, part: GatheredPart) -> None:
        assert self._sums is not None
        self._sums.reduce(part.buckets)

    def pass_forward(self, chunk: int) -> None:
        """Of a micro-batch of which this rank has no rows."""
        self.begin_forward(chunk)
        for step in self._chunks[chunk]:
            if step != "embed":
                self.come_to(step)
        self.end_forward(chunk)

    def pass_backward(self, chunk: int) -> None:
        self.begin_backward(chunk)
        for step in reversed(self._chunks[chunk]):
            if isinstance(step, int):
                self.come_back_to(step)
        self.end_backward(chunk)

    def _used(self, chunk: int, backward: bool = False) -> list[GatheredPart]:
        """All that a forward or backward of the chunk uses, in its order."""
        rows = [step_parts for step, step_parts in self._chunks[chunk].items() if step != "embed" or not backward]
        return list(dict.fromkeys(part for step_parts in (reversed(rows) if backward else rows) for part in step_parts))

    def _summed(self, chunk: int) -> list[GatheredPart]:
        """Parts of which a backward of the chunk brings gradients, in the order in which they are complete."""
        steps = self._chunks[chunk]
        parts = dict.fromkeys(self.parts[s] for s in reversed(steps) if s in self.parts and s != "embed")
        ends = dict.fromkeys(part for step_parts in steps.values() for part in step_parts if part not in parts)
        return [part for part in (*parts, *ends) if part.trained]  # the embedding's come last, a tied head's among them

    def _turn_to(self, used: Sequence[GatheredPart] = (), following: Sequence[GatheredPart] | None = None) -> None:
        used_before, self._open = self._open, list(used)
        for part in used:
            part.start()
        self._end(part for part in used_before)
        for part in used:
            part.use()
        for part in following or ():
            part.start()

    @staticmethod
    def _use(parts: Iterable[GatheredPart]) -> None:
        """All of them, one under way while another one arrives."""
        row = list(parts)
        for i, part in enumerate(row):
            for gathered in row[i : i + 2]:
                gathered.start()
            part.use()

    @staticmethod
    def _end(parts: Iterable[GatheredPart]) -> None:
        for part in parts:
            part.end()


def _roomier(weights: WeightSharding) -> str:
    """The choice of a plan that has less weights whole at once."""
    if not weights.reshard_after_forward:
        return "reshard_after_forward: true in the stage's weights"
    if weights.gather != "layer":
        return "gather: layer in the stage's weights"
    return "a smaller share for this rank in the stage's weights (shard), fewer rows for it, or recompute: full"


def apply_divided_weights(model: GPTStage, weights: DividedWeights) -> None:
    """Have the layers and the head of a stage say when they come to their weights."""
    for layer in model.layers():
        layer.register_forward_pre_hook(partial(_come_to, weights, layer.number))
        layer.register_forward_hook(partial(_leave, weights))
    if model.has_head:
        model.model["norm"].register_forward_pre_hook(partial(_come_to, weights, "head"))


def _come_to(weights: DividedWeights, step: Step, *_: Any) -> None:
    weights.come_to(step)


def _leave(weights: DividedWeights, layer: Layer, _: Any, out: ResidualStream) -> ResidualStream:
    if not torch.is_grad_enabled():
        return out
    return ResidualStream(*Border.apply(partial(weights.come_back_to, layer.number), *out))


class Border(torch.autograd.Function):
    """Between two layers: passes everything on, and in backward says that the gradients of the later one are there and
    that the earlier one is next. Autograd runs what was made later first, so all of the later layer has run by then."""

    @staticmethod
    def forward(ctx: Any, reach: Callable[[], None], *stream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reach = reach
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in stream)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.reach()
        return (None, *grads)
