"""Handles of transfers under way, and accounting of the time that a rank is blocked in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.hooks import Clock, Work
from hetero_megatron.errors import UserError
from hetero_megatron.platform.accelerator import Accelerator


class Works:
    """Several transfers that are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class MessageWorks(Works):
    """gloo messages. gloo only reports completion to a thread that waits, so ``is_completed`` starts one."""

    def __init__(self, works: Sequence[Work]) -> None:
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

    def start(
        self,
        peers: tuple[int, ...],
        transfer: Callable[[], Work | None],
        sizes: Mapping[int, int] | None = None,
        group: tuple[int, ...] = (),
    ) -> Work | None:
        """Start a transfer; where this rank sends, ``sizes`` has the bytes by peer."""

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Handle:
        """Send a contiguous tensor; the tensor must not change until the handle was waited for."""

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Handle:
        """Receive into a contiguous tensor."""

    def failure(
        self, peers: tuple[int, ...], seconds: float, error: Exception, activity: str | None = None
    ) -> CommError | UserError:
        """What to raise for a transfer that failed after ``seconds``."""


class Handle:
    """A transfer under way; ``wait`` returns the received tensor (None for a send)."""

    def __init__(
        self,
        comm: Transport,
        work: Work | None,
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
                self._work.wait()
            except RuntimeError as error:
                raise self._comm.failure(self._peers, time.perf_counter() - start, error) from error
            self._comm.clock.wait_ends(began, self._collective)
            self._work = None
        self._keep = None
        return self._result
