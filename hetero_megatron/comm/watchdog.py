"""Detection of device transfers that never end. The library's ``wait`` blocks the device stream, not the host, so that
a dead peer would otherwise show up as a host that hangs elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from hetero_megatron.comm.hooks import TorchWork
from hetero_megatron.comm.work import MessageWorks, Works

LOOK_SECONDS = 1.0  # polling interval; also how long the memory of completed works is kept


@dataclass(frozen=True)
class _Transfer:
    work: TorchWork
    peers: tuple[int, ...]
    activity: str
    started: float


class Pending:
    """Something under way on the host that the watch is to look after as after a transfer."""

    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        """Nothing: it is asked once it has ended."""


class TransferWatch:
    """Keeps the transfers of one rank until they have ended.

    Args:
        timeout: seconds after which a transfer counts as lost.
        failure: (peers, seconds, error, activity) -> the exception to report.
        aside: context with a stream of the watching thread's own, so that polling a work blocks no other stream.
    """

    def __init__(
        self,
        timeout: float,
        failure: Callable[[tuple[int, ...], float, Exception, str], Exception],
        aside: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._timeout, self._failure, self._aside = timeout, failure, aside
        self._transfers: deque[_Transfer] = deque()  # appended to by one thread, emptied under the lock
        self._lock, self._stopped = threading.Lock(), False

    def add(self, work: TorchWork, peers: tuple[int, ...], activity: str) -> None:
        """Called for every started transfer. Messages of gloo, which bring a time-out of their own, are left to whoever
        waits for them: a second wait would be for another message."""
        if isinstance(work, MessageWorks):
            return
        for transfer in work.works if isinstance(work, Works) else (work,):
            self._transfers.append(_Transfer(transfer, peers, activity, time.monotonic()))

    @contextmanager
    def during(self, peers: tuple[int, ...], activity: str) -> Iterator[None]:
        """What is done inside counts as a transfer: a call that waits for peers without a limit of its own."""
        pending = Pending()
        self.add(pending, peers, activity)
        try:
            yield
        finally:
            pending.ended = True

    def look(self) -> Exception | None:
        """The error of the oldest transfer that failed or timed out; None: there is none."""
        with self._lock, self._aside():
            for _ in range(len(self._transfers)):
                transfer = self._transfers.popleft()
                error = self._error(transfer)
                if error is not None:
                    seconds = time.monotonic() - transfer.started
                    return self._failure(transfer.peers, seconds, error, transfer.activity)
        return None

    def _error(self, transfer: _Transfer) -> Exception | None:
        if not transfer.work.is_completed():
            if time.monotonic() - transfer.started > self._timeout:
                return RuntimeError("it has not ended")
            self._transfers.append(transfer)
            return None
        try:
            transfer.work.wait()  # which returns at once now
        except RuntimeError as error:
            return error
        return None

    def start(self, lost: Callable[[Exception], None]) -> None:
        """Poll in a thread; ``lost`` is called there, once."""

        def run() -> None:
            while not self._stopped:
                if (error := self.look()) is not None:
                    return lost(error)
                time.sleep(LOOK_SECONDS)
            self._transfers.clear()

        threading.Thread(target=run, daemon=True, name="watch").start()

    def stop(self) -> None:
        """Nobody wants to know any more: the thread ends when it looks next."""
        self._stopped = True
