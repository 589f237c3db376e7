"""Host memory that a device copies from and to, and the streams of these copies."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.parallel.side_stream import SideStream
from hetero_megatron.platform.accelerator import Accelerator

Tensor = torch.Tensor


class PacedStream(SideStream):
    """Of an emulated chip: copies pass its link to the host one after another, beside its work.

    Args:
        clock: of the chip; rate: of the link, bytes/s.
    """

    def __init__(self, clock: Clock, rate: float) -> None:
        super().__init__(None)
        self._clock, self._rate = clock, rate
        self._free, self._inside = 0.0, False

    @contextmanager
    def current(self) -> Iterator[None]:  # type: ignore[override]
        with self._clock.aside():
            self._free, self._inside = max(self._free, time.perf_counter()), True
            try:
                yield
            finally:
                self._inside = False

    def carry(self, size: int) -> None:
        self._free += size / self._rate

    def moment(self) -> Any:
        return self._free

    def join(self, moment: Any) -> None:
        if moment is not None and not self._inside:
            began = self._clock.wait_begins()
            while (seconds_left := moment - time.perf_counter()) > 0:
                time.sleep(seconds_left)
            self._clock.wait_ends(began, collective=True)
        elif moment is not None:
            self._free = max(self._free, moment)

    def wait(self, moment: Any) -> None:
        self.join(moment)


class HostMemory:
    """Pieces of host memory, by size; what is given back serves again.

    Args:
        accelerator: whose device copies from and to it while the host goes on; None: it is the memory of all tensors.

    Attributes:
        live, peak: bytes in use now, and at most so far.
        make: a new piece of so many bytes, [bytes] uint8.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self.live = self.peak = 0
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.make: Callable[[int], Tensor] = (
            partial(torch.empty, dtype=torch.uint8) if accelerator is None else accelerator.host_memory
        )

    def hold(self, size: int) -> None:
        """So many bytes more, or less, are in use."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def take(self, size: int) -> tuple[Tensor, Any]:
        """[size] uint8, and the moment (None: any) from which it may be written to."""
        self.hold(size)
        free = self._free[size]
        return free.pop() if free else (self.make(size), None)

    def give(self, memory: Tensor, moment: Any) -> None:
        """It may be written to after ``moment``."""
        self.hold(-memory.nbytes)
        self._free[memory.nbytes].append((memory, moment))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory, for good."""
        size = math.prod(shape) * dtype.itemsize
        self.hold(size)
        return self.make(size).view(dtype).view(*shape)

    def take_like(self, tensor: Tensor) -> Tensor:
        """Memory of a tensor's shape and dtype, for :meth:`give_back`."""
        memory, moment = self.take(tensor.nbytes)
        assert moment is None, "what is waited for is given with its moment"
        return memory.view(tensor.dtype).view(tensor.shape)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Nobody reads or writes them any more."""
        for tensor in tensors:
            self.give(tensor.view(-1).view(torch.uint8), None)

    def keep(self, values: Tensor) -> Tensor:
        """A copy of ``values`` that lasts."""
        return self.room(values.shape, values.dtype).copy_(values)


class HostLink:
    """Between a device and its host: all copies one way share a stream, as they do the wires. Without a device they are
    made in the order of the calls, those of an emulated chip take the time of its link.

    Attributes:
        accelerator: None: there are no streams. into, out: streams of copies to the device, and from it.
    """

    def __init__(self, comm: Comm) -> None:
        self.accelerator, rate = comm.accelerator, comm.hooks.host_rate
        self.into, self.out = SideStream(comm.accelerator), SideStream(comm.accelerator)
        if comm.accelerator is None and rate is not None:
            self.into, self.out = PacedStream(comm.clock, rate), PacedStream(comm.clock, rate)


class HostRows:
    """The rows that a rank owns of weights that its stage keeps in host memory, and sums of their gradients.

    Attributes:
        memory: that they are in; into, out: streams of the copies to the device, and from it.
    """

    def __init__(self, link: HostLink) -> None:
        self.memory, self.into, self.out = HostMemory(link.accelerator), link.into, link.out
        self._device_streams = link.accelerator is not None

    def load(self, places: Sequence[Tensor], rows: Sequence[Tensor]) -> Any:
        """Begin to copy ``rows`` to ``places`` of the device; the moment at which they are there."""
        self.into.catch_up()
        with self.into.current():
            for place, values in zip(places, rows, strict=True):
                place.copy_(values, non_blocking=True)
                self.into.carry(values.nbytes)
            return self.into.moment()

    def after_load(self) -> AbstractContextManager[None]:
        """Context in which the device does what needs the rows, beside its compute."""
        return self.into.current() if self._device_streams else nullcontext()

    def store(self, tensors: Sequence[Tensor], places: Sequence[Tensor]) -> Any:
        """Begin to copy the device's ``tensors``, which stay until the moment that is returned, to ``places``."""
        self.out.catch_up()
        with self.out.current():
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
                self.out.carry(tensor.nbytes)
            return self.out.moment()
