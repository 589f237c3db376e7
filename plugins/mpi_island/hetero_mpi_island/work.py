"""A transfer of MPI under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

from hetero_mpi_island.world import World, wait_until


@dataclass(frozen=True)
class Part:
    """One MPI request. ``peers``: global ranks that it needs; ``size``: bytes that must come, None: not checked."""

    request: MPI.Request
    peers: tuple[int, ...]
    size: int | None = None


class MpiWork(dist.Work):
    """What an operation of the group returns; may be asked and waited for from any thread.

    Args:
        what: the operation, for messages.
        parts: its requests.
        seconds: time-out of :meth:`wait`.
        keep: tensors that MPI reads and writes until then.
        result: tensors of the operation.
        finish: called once when all parts are complete.
    """

    def __init__(
        self,
        world: World,
        what: str,
        parts: Sequence[Part],
        seconds: float,
        keep: object,
        result: Sequence[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._world, self._what, self._parts, self._seconds = world, what, list(parts), seconds
        self._keep, self._result, self._finish = keep, list(result), finish
        self._lock = threading.RLock()  # MPI forbids two threads to test one request
        self._error = ""
        if not self._poll():
            world.progress.watch(self._poll)

    def _poll(self) -> bool:
        """Whether MPI is done with all buffers; notes what went wrong."""
        with self._lock:
            if self._parts:
                self._parts = [part for part in self._parts if not self._complete(part)]
                if not self._parts:
                    self._end()
            elif self._keep is not None:
                self._end()
            return not self._parts

    def _complete(self, part: Part) -> bool:
        status = MPI.Status()
        try:
            with self._world.lock:
                if not part.request.Test(status):
                    return False
                size = status.Get_count(MPI.BYTE)
        except MPI.Exception as error:
            self._fail(f"{_names(part.peers)}: {error.Get_error_string()}")
            return True
        if part.size is not None and size != part.size:
            self._fail(f"{_names(part.peers)} sent {size} bytes, {part.size} were expected")
        return True

    def _end(self) -> None:
        if self._finish is not None and not self._error:
            with torch.inference_mode():
                self._finish()
        self._keep = self._finish = None

    def _fail(self, problem: str) -> None:
        self._world.failed = True
        self._error = self._error or f"mpi_island: {self._what} failed: {problem}"

    def is_completed(self) -> bool:
        return self._poll() or bool(self._error)

    def is_success(self) -> bool:
        return self._poll() and not self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is complete.

        Args:
            timeout: in place of the group's; zero: the group's.

        Raises:
            RuntimeError: it failed, or a peer did not come in time; says which. The tensors stay in use.
        """
        seconds = timeout.total_seconds() if timeout else self._seconds
        if not wait_until(self.is_completed, seconds):
            with self._lock:
                missing = sorted({peer for part in self._parts for peer in part.peers})
                if missing:  # else the last part has come just now
                    self._fail(f"{_names(missing)} did not answer within {seconds:g} s")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
