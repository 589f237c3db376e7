"""Transfers under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from hetero_megatron.comm.hooks import Work
from hetero_megatron.comm.transport import Transport


class Works:
    """Several transfers waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Messages(Works):
    """Messages over gloo, which says that one has come only to who waits for it: a thread waits where that is asked."""

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


class Handle:
    """A transfer under way. ``wait`` returns the received tensor (None for a send)."""

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
        """Whether :meth:`wait` would return at once; never raises."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor | None:
        if self._work is not None:
            self._comm.clock.pause()
            start = time.perf_counter()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._comm.failure(self._peers, time.perf_counter() - start, error) from error
            seconds = time.perf_counter() - start
            self._comm.seconds.add(seconds, self._collective)
            self._comm.clock.resume(seconds)
            self._work = None
        self._keep = None
        return self._result
