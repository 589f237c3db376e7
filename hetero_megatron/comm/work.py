"""Transfers under way: what is waited for, in which order, for how long, and what is said where a peer is gone; and
copies of tensors between a device and the host memory that gloo sends from."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from hetero_megatron.comm.hooks import Clock, TorchWork
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Accelerator, Platform


class CommError(RuntimeError):
    """A transfer failed or timed out; the message names this rank, its action and the ranks it waited for.

    Attributes:
        rank: the waiting rank (None: unknown); peers: the ranks it waited for; seconds: how long; activity: its action.
        states: of other ranks, by rank, one of the words of ``comm/connectivity.py``.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        peers: Sequence[int] = (),
        seconds: float = 0.0,
        activity: str = "",
        states: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.peers, self.seconds, self.activity = rank, tuple(peers), seconds, activity
        self.states = dict(states or {})


class Works:
    """Several transfers that are waited for together."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        self.works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class MessageWorks(Works):
    """gloo messages. gloo only reports completion to a thread that waits, so ``is_completed`` starts one."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__(works)
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gloo messages", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            super().wait()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        if self._thread is None:
            super().wait()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error


class Transport(Protocol):
    """The part of :class:`~hetero_megatron.comm.comm.Comm` that groups and handles use."""

    rank: int
    activity: str
    device: torch.device
    accelerator: Accelerator | None
    clock: Clock
    sent_bytes: dict[int, int]
    fence: Callable[[], None]

    def start(
        self,
        peers: tuple[int, ...],
        transfer: Callable[[], TorchWork | None],
        sizes: Mapping[int, int] | None = None,
        group: tuple[int, ...] = (),
    ) -> TorchWork | None:
        """Start a transfer; where this rank sends, ``sizes`` has the bytes by peer."""

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Send a contiguous tensor; the tensor must not change until the handle was waited for."""

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """Receive into a contiguous tensor."""

    def wait_for(self, work: TorchWork) -> None:
        """Until a transfer has ended; RuntimeError: it has failed, or is in vain."""

    def check(self) -> None:
        """CommError where the groups were abandoned."""

    def failure(
        self, peers: tuple[int, ...], seconds: float, error: Exception, activity: str | None = None
    ) -> CommError | UserError:
        """What to raise for a transfer that failed after ``seconds``."""


class Work:
    """A transfer under way; ``wait`` returns the received tensor (None for a send)."""

    def __init__(
        self,
        comm: Transport,
        work: TorchWork | None,
        result: torch.Tensor | None,
        peers: tuple[int, ...],
        keep: object = None,
        collective: bool = False,
    ) -> None:
        self._comm, self._work, self._result, self._peers = comm, work, result, peers
        self._keep, self._collective = keep, collective  # what is being sent must live until then

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return immediately; never raises."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor | None:
        if self._work is not None:
            began, start = self._comm.clock.wait_begins(), time.perf_counter()
            try:
                self._comm.wait_for(self._work)
            except RuntimeError as error:
                raise self._comm.failure(self._peers, time.perf_counter() - start, error) from error
            self._comm.clock.wait_ends(began, self._collective)
            self._work = None
        self._keep = None
        return self._result


class Waiter:
    """Waits for one transfer at a time in a thread of its own, which is left behind when nobody wants it any more: gloo
    never ends the waiting for a message that was half sent when its connection was cut.

    Args:
        over: whether all transfers are in vain.
        accelerator, device: of this rank, whose current stream is to wait, not that of the waiting thread; None: works
            of host memory.
    """

    LOOK_SECONDS = 0.05

    def __init__(self, over: Callable[[], bool], accelerator: Accelerator | None, device: torch.device) -> None:
        self._over, self._accelerator, self._device = over, accelerator, device
        self._works: SimpleQueue[tuple[TorchWork, Any]] = SimpleQueue()
        self._ended: SimpleQueue[RuntimeError | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="waiting").start()

    def wait(self, work: TorchWork) -> None:
        self._works.put((work, self._accelerator.current_stream() if self._accelerator is not None else None))
        while True:
            try:
                error = self._ended.get(timeout=self.LOOK_SECONDS)
            except Empty:
                if self._over():
                    raise RuntimeError("a rank was lost meanwhile") from None
                continue
            if error is not None:
                raise error
            return

    def _run(self) -> None:
        if self._accelerator is not None:
            self._accelerator.use(self._device.index or 0)
        while True:
            error = None
            work, stream = self._works.get()
            try:
                with self._accelerator.on_stream(stream) if self._accelerator is not None else nullcontext():
                    work.wait()
            except RuntimeError as failed:
                error = failed
            self._ended.put(error)


class TorchDevice(Accelerator):
    """A device that torch knows and no plugin."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type  # type: ignore[misc]


class DeviceCopies:
    """See :class:`~hetero_megatron.comm.bridge.Copies`."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self.accelerator, self._device, self._aside = accelerator, device, None

    def buffer(self, size: int) -> torch.Tensor:
        return self.accelerator.host_memory(size)

    def now(self) -> Any:
        event = self.accelerator.event()
        event.record(self.accelerator.current_stream())
        return event

    def join(self, event: Any) -> None:
        self.accelerator.current_stream().wait_event(event)

    def stream(self) -> Any:
        self.accelerator.use(self._device.index or 0)  # of a new thread, the first one is current
        return self.accelerator.stream()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A stream of its own is the current one, for a thread that only looks."""
        self._aside = self._aside or self.stream()
        with self.accelerator.on_stream(self._aside):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any) -> Any:
        with self.accelerator.on_stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            event = self.accelerator.event()
            event.record(stream)
        return event


def copies_of(platform: Platform) -> DeviceCopies | None:
    """None: the platform computes in host memory."""
    if platform.device.type == "cpu":
        return None
    return DeviceCopies(platform.accelerator or TorchDevice(platform.device.type), platform.device)


LOOK_SECONDS = 2.0  # interval between looks at the peers; connecting usually takes milliseconds
T = TypeVar("T")


def with_timeout(seconds: float, call: Callable[[], T], gone: Callable[[], Collection[int]] = tuple) -> T:
    """What ``call`` returns or raises. It runs in a thread, which is left behind when the time is over.

    Args:
        gone: the ranks that ``call`` waits for whose processes have ended; asked every ``LOOK_SECONDS``.

    Raises:
        RuntimeError: it takes longer than ``seconds``, or waits for a rank that is gone.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(call())
        except Exception as error:  # of any kind: raised again by whoever waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="connecting")
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (seconds_left := end - time.monotonic()) > 0:
        thread.join(min(seconds_left, LOOK_SECONDS))
        if thread.is_alive() and gone():
            raise RuntimeError("it has not connected")
    if errors:
        raise errors[0]
    if not answers:
        raise RuntimeError(f"not connected after {seconds:g} s")
    return answers[0]


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """The same; None if it fails or takes longer."""
    with suppress(RuntimeError, UserError):
        return with_timeout(seconds, call)
    return None


FULL = 0.05  # share of a device's memory that is left, below which it may be the reason why a rank is stuck
FULL_SECONDS = 2.0  # to find that out: a driver may be stuck as well


def full_memory(accelerator: Accelerator | None, rank: int) -> str:
    """A device that has no memory left gives back what it has cached, and waits for that until all that was started has
    ended: then a transfer that never ends hides that this rank is out of memory. A clause that says so, where it may
    be; else empty."""
    free_and_total = within(FULL_SECONDS, accelerator.free_memory) if accelerator is not None else None
    if free_and_total is None or free_and_total[0] > FULL * free_and_total[1]:
        return ""
    mib = [round(size / 2**20) for size in free_and_total]
    return f"; the device of rank {rank} has {mib[0]} of {mib[1]} MiB left: perhaps it waits for memory"


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
