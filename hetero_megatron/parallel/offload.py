"""Saved activations that are in host memory from a layer's forward to its backward.

What the layers of a plan's choice save goes to host memory when their forward is over, on a stream beside the one that
computes, and comes back on another one before their backward, while the layer after them has its own. Weights stay, as
do a stage's input, which its neighbour's gradient needs, and what all layers of a micro-batch share. Of a storage that
several saved tensors are views of there is one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hetero_megatron.model.gpt import GPTStage, Layer, ResidualStream
from hetero_megatron.model.layers import Context
from hetero_megatron.parallel.divided_weights import Border
from hetero_megatron.parallel.host_memory import HostLink, HostMemory
from hetero_megatron.parallel.recompute import keep_here, take
from hetero_megatron.plans.canonical import ActivationOffload
from hetero_megatron.plans.memory.offloaded import FEW_BYTES

Tensor = torch.Tensor
Key = tuple[int, int]  # micro-batch, chunk


class _Copy:
    """One storage of which something is saved: on the device, in host memory, or on its way.

    Attributes:
        flat: all of it, in the dtype of what was saved first; None: it is in host memory.
    """

    def __init__(self, group: LayerActivations, tensor: Tensor) -> None:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.flat: Tensor | None = tensor.detach().as_strided((count,), (1,), 0)
        self.bytes = count * tensor.element_size()
        self._group, self._dtype, self._count, self._device = group, tensor.dtype, count, tensor.device
        self._version = tensor._version
        self.host: Tensor | None = None

    def to_host(self, memory: Tensor) -> None:
        assert self.flat is not None and self.flat._version == self._version, "a saved activation was written to"
        self.host = memory
        memory.view(self._dtype).copy_(self.flat, non_blocking=True)

    def room(self) -> None:
        """On the device; what it held comes with :meth:`to_device`."""
        self.flat = torch.empty(self._count, dtype=self._dtype, device=self._device)

    def to_device(self) -> None:
        assert self.flat is not None and self.host is not None
        self.flat.copy_(self.host.view(self._dtype), non_blocking=True)

    def whole(self) -> Tensor:
        if self.flat is None:
            self._group.come_back()
        assert self.flat is not None
        return self.flat


class _View:
    """A saved tensor, as a part of a storage."""

    def __init__(self, copy: _Copy, tensor: Tensor) -> None:
        self._copy, self._dtype = copy, tensor.dtype
        self._view = tensor.size(), tensor.stride(), tensor.storage_offset()

    def take(self) -> Tensor:
        return self._copy.whole().view(self._dtype).as_strided(*self._view)


class LayerActivations:
    """What one layer saves of one micro-batch.

    Whoever reads a tensor in backward holds its copy, so that it is gone with the last of them; the layer has all of
    them only until they are back.
    """

    def __init__(self, owner: OffloadedActivations, least: int, stays: set[int]) -> None:
        self._owner, self._least, self._stays = owner, least, stays
        self._copies: dict[int, _Copy] = {}  # by storage
        self._row: list[_Copy] = []
        self._out: Any = None  # moments at which copies are through
        self._back: Any = None
        self.away = self._coming = False

    def keep(self, tensor: Tensor) -> Any:
        """What autograd has of a saved tensor."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        small = size < self._least or size % tensor.element_size() or tensor.device != self._owner.device
        if small or key in self._stays:
            return keep_here(tensor)
        if key not in self._copies:
            self._copies[key] = _Copy(self, tensor)
        return _View(self._copies[key], tensor)

    def leave(self) -> None:
        """The forward is over: begin to copy."""
        self._row, self._copies = list(self._copies.values()), {}
        host, out = self._owner.host, self._owner.out
        out.catch_up()
        with out.current():
            for copy in self._row:
                memory, moment = host.take(copy.bytes)
                out.join(moment)
                copy.to_host(memory)
                out.carry(copy.bytes)
            self._out = out.moment()

    def release(self) -> None:
        """Give up the device's memory: the computing stream goes on when the copies are through."""
        if not self._row:
            return
        self._owner.out.join(self._out)
        for copy in self._row:
            copy.flat = None
        self.away = True

    def stay(self) -> None:
        """Backward comes before the memory was given up: the copies are of no use."""
        out = self._owner.out
        with out.current():
            for copy in self._row:
                assert copy.flat is not None
                out.give(copy.flat)  # backward may be through with it before the copy is
        self._end(self._out)

    def start(self) -> None:
        """Begin to bring everything back."""
        if not self.away or self._coming:
            return
        back_stream = self._owner.back
        for copy in self._row:
            copy.room()
        back_stream.catch_up()
        with back_stream.current():
            back_stream.join(self._out)
            for copy in self._row:
                copy.to_device()
                back_stream.carry(copy.bytes)
            self._back = back_stream.moment()
        self._coming = True

    def come_back(self) -> None:
        """It is all there when the computing stream goes on."""
        self.start()
        if self._coming:
            self._owner.back.join(self._back)
            self._end(self._back)

    def _end(self, moment: Any) -> None:
        for copy in self._row:
            if copy.host is not None:
                self._owner.host.give(copy.host, moment)
                copy.host = None
        self._row, self.away, self._coming = [], False, False


class OffloadedActivations:
    """Those of one rank's stage; told when forwards and backwards of micro-batches begin.

    Args:
        offload: which layers', and how many layers' copies may be under way at once.
        device: that computes; link: of it to its host.

    Attributes:
        host: the memory that they are in.
        out, back: streams of the copies.
    """

    def __init__(self, model: GPTStage, offload: ActivationOffload, device: torch.device, link: HostLink) -> None:
        self._model, self._layers, self._ahead, self.device = model, offload.layers, offload.ahead, device
        self.host, self.out, self.back = HostMemory(link.accelerator), link.out, link.into
        self._rows: dict[Key, list[LayerActivations]] = {}
        self._row: list[LayerActivations] = []
        self._open: LayerActivations | None = None
        self._leaving: deque[LayerActivations] = deque()

    def keep(self, tensor: Tensor) -> Any:
        """What is kept of a tensor that the layer that runs saves."""
        return keep_here(tensor) if self._open is None else self._open.keep(tensor)

    def apply(self) -> None:
        """Around the layers, as recompute has left them."""
        for place, layer in enumerate(self._model.layers()):
            layer.forward = partial(self._forward, layer, place < self._layers, layer.forward)  # type: ignore[method-assign]

    def begin_forward(self, key: Key) -> None:
        if torch.is_grad_enabled():
            self._row = self._rows[key] = []

    def begin_backward(self, key: Key) -> None:
        """What is still on the device stays, of the micro-batch; the last layers begin to come back."""
        row = self._rows.pop(key)
        for group in self._leaving:
            if group in row:
                group.stay()
            else:
                group.release()
        self._leaving.clear()
        for group in row[-self._ahead :]:
            group.start()

    def settle(self) -> None:
        """Give up the device's memory of all layers whose forward is over."""
        while self._leaving:
            self._leaving.popleft().release()

    def _forward(
        self, layer: Layer, offloaded: bool, run: Callable[..., ResidualStream], x: Tensor, context: Context,
        added: Tensor | None = None,
    ) -> ResidualStream:  # fmt: skip
        stream_args = () if added is None else (added,)
        if not torch.is_grad_enabled():
            return run(x, context, *stream_args)
        row = self._row
        if offloaded:
            first_layer = row or (self._model.has_embed and layer is next(iter(self._model.layers())))
            stays = {t.untyped_storage()._cdata for t in self._shared(layer, context, () if first_layer else (x,))}
            group = self._open = LayerActivations(self, FEW_BYTES * x[..., 0].numel(), stays)
            try:
                with saved_tensors_hooks(group.keep, take):
                    out = run(x, context, *stream_args)
            finally:
                self._open = None
            group.leave()
        else:
            group, out = LayerActivations(self, 0, set()), run(x, context, *stream_args)
        self._leaving.append(group)  # also of a layer that keeps its own: meanwhile copies of those before it go on
        while len(self._leaving) > self._ahead:
            self._leaving.popleft().release()
        row.append(group)
        return ResidualStream(*Border.apply(partial(self._come_back, row, len(row) - 1), *out))

    @staticmethod
    def _shared(layer: Layer, context: Context, given: Sequence[Tensor]) -> Iterator[Tensor]:
        """What is there anyway."""
        yield from given
        yield from layer.parameters()
        yield from layer.buffers()
        for tables in context.ropes.values():
            yield from tables
        for tensor in (context.counted, context.positions, context.tokens, context.inside):
            if tensor is not None:
                yield tensor

    def _come_back(self, row: Sequence[LayerActivations], place: int) -> None:
        """Backward comes to a layer."""
        row[place].come_back()
        for group in row[max(place - self._ahead, 0) : place][::-1]:
            group.start()
