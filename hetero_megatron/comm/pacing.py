"""Slower links than the one at hand, in user space: a message leaves when the emulated link would have delivered it."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any


class PacedWork:
    """What a transfer's handle waits for: first for the emulated link, then for the transfer itself."""

    def __init__(self, started: Future[Any]) -> None:
        self._started = started

    def is_completed(self) -> bool:
        return self._started.done() and (self._started.exception() is not None or self._started.result().is_completed())

    def wait(self) -> None:
        self._started.result().wait()


class Pacer:
    """Delays this rank's messages.

    Messages to one peer queue up behind each other; a collective starts when its slowest message would have arrived;
    collectives of one group keep their order. Latency delays a message but not the next one behind it.

    Args:
        rate: bytes/s by peer, read at every message; a missing peer or None is not paced.
        latency: seconds by peer.
    """

    def __init__(self, rate: Callable[[], Mapping[int, float]], latency: Mapping[int, float]) -> None:
        self.rate, self.latency = rate, latency
        self._free: dict[int, float] = {}  # when the link to a peer is free again
        self._group_free: dict[tuple[int, ...], float] = {}
        self._queue: list[tuple[float, int, Callable[[], Any], Future[Any]]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="pacer").start()

    def submit(
        self, sizes: Mapping[int, int], start: Callable[[], Any], group: tuple[int, ...] = ()
    ) -> PacedWork | None:
        """Have ``start`` called when all messages (bytes by peer) are through; None: nothing is paced, call it now."""
        rates, now = self.rate(), time.perf_counter()
        due = self._group_free.get(group, 0.0) if group else 0.0
        paced = due > now
        for peer, size in sizes.items():
            rate = rates.get(peer)
            if rate is None or size == 0:
                continue
            paced = True
            free = self._free[peer] = max(now, self._free.get(peer, 0.0)) + size / rate
            due = max(due, free + self.latency.get(peer, 0.0))
        if not paced:
            return None
        if group:
            self._group_free[group] = due
        future: Future[Any] = Future()
        with self._wake:
            heapq.heappush(self._queue, (due, next(self._numbers), start, future))
            self._wake.notify()
        return PacedWork(future)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue or (left := self._queue[0][0] - time.perf_counter()) > 0:
                    self._wake.wait(left if self._queue else None)
                _, _, start, future = heapq.heappop(self._queue)
            try:
                future.set_result(start())
            except BaseException as error:  # it belongs to the rank that waits
                future.set_exception(error)
