"""Slower links than the one at hand, in user space: a message leaves when the emulated link would have delivered it.

A link of rate 0 is cut: its messages, and what must come after them, are held until it is mended.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from hetero_megatron.comm.hooks import TorchWork

MENDED_EVERY = 0.2  # seconds between two looks whether a cut link is mended


class PacedWork:
    """What a transfer's handle waits for: first for the emulated link, then for the transfer itself.

    Args:
        timeout: seconds for the link; None: for ever.
    """

    def __init__(self, started: Future[TorchWork | None], timeout: float | None = None) -> None:
        self._started, self._timeout = started, timeout

    def is_completed(self) -> bool:
        if not self._started.done():
            return False
        work = None if self._started.exception() is not None else self._started.result()
        return work is None or work.is_completed()

    def wait(self) -> None:
        """Raises RuntimeError when the link did not carry it in time, or the transfer failed."""
        try:
            work = self._started.result(self._timeout)
        except TimeoutError:
            raise RuntimeError(f"timed out after {self._timeout:g} s: the emulated link carries nothing") from None
        if work is not None:
            work.wait()


@dataclass(order=True)
class _Message:
    due: float
    number: int
    start: Callable[[], TorchWork | None] = field(compare=False)
    future: Future[TorchWork | None] = field(compare=False)
    peers: frozenset[int] = field(compare=False)
    group: tuple[int, ...] = field(compare=False)

    def begin(self) -> None:
        try:
            self.future.set_result(self.start())
        except BaseException as error:  # it belongs to the rank that waits
            self.future.set_exception(error)


class NodeLanes:
    """What the chips of a node share: its link to each other node, and the card that all of these links go through,
    which is as fast as the fastest of them. Messages take each in the order in which they were sent.

    Args:
        path: a file that the node's ranks share: when each lane is free again, in seconds of ``perf_counter``, which
            counts alike in all processes.
        node: this rank's; node_of: by rank.
        fastest: bytes/s.
    """

    _FREE = Struct("d")

    def __init__(self, path: Path, node: int, node_of: Sequence[int], fastest: float) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._node, self._node_of, self._fastest = node, node_of, fastest

    def book(self, now: float, peer: int, size: int, seconds: float) -> float:
        """When a message of ``size`` bytes is through that takes so many seconds on its link."""
        peer_node = self._node_of[peer]
        if peer_node == self._node:
            return now
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            return max(self._queue(now, peer_node, seconds), self._queue(now, self._node, size / self._fastest))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _queue(self, now: float, lane: int, seconds: float) -> float:
        offset = self._FREE.size * lane
        stored = os.pread(self._file, self._FREE.size, offset)
        free = max(now, self._FREE.unpack(stored)[0] if stored else 0.0) + seconds
        os.pwrite(self._file, self._FREE.pack(free), offset)
        return free


class Pacer:
    """Delays this rank's messages.

    Messages to one peer queue up behind each other, and behind what other chips of the node send; a collective starts
    when its slowest message would have arrived; collectives of one group keep their order. Latency delays a message
    but not the next one behind it.

    Args:
        rate: bytes/s by peer, read at every message; a missing peer or None is not paced; 0: the link is cut.
        latency: seconds by peer.
        timeout: seconds that a message may wait for its link; None: for ever.
        shared: with the other chips of the node; None: nothing is.
    """

    def __init__(
        self,
        rate: Callable[[], Mapping[int, float]],
        latency: Mapping[int, float],
        timeout: float | None = None,
        shared: NodeLanes | None = None,
    ) -> None:
        self.rate, self.latency, self.timeout, self.shared = rate, latency, timeout, shared
        self._free: dict[int, float] = {}  # when the link to a peer is free again
        self._group_free: dict[tuple[int, ...], float] = {}
        self._queue: list[_Message] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="pacer").start()

    def submit(
        self, start: Callable[[], TorchWork | None], sizes: Mapping[int, int], group: tuple[int, ...] = ()
    ) -> TorchWork | None:
        """``start`` is called when all messages (bytes by peer) are through: now, where none is paced."""
        rates, now = self.rate(), time.perf_counter()
        due = self._group_free.get(group, 0.0) if group else 0.0
        paced = due > now
        for peer, size in sizes.items():
            rate = rates.get(peer)
            if rate is None or size == 0:
                continue
            paced = True
            seconds = size / rate if rate else 0.0
            free = self._free[peer] = max(now, self._free.get(peer, 0.0)) + seconds
            if rate and self.shared is not None:
                free = max(free, self.shared.book(now, peer, size, seconds))
            due = max(due, free + self.latency.get(peer, 0.0))
        if not paced:
            return start()
        if group:
            self._group_free[group] = due
        future: Future[TorchWork | None] = Future()
        peers = frozenset(peer for peer, size in sizes.items() if size)
        with self._wake:
            heapq.heappush(self._queue, _Message(due, next(self._numbers), start, future, peers, group))
            self._wake.notify()
        return PacedWork(future, self.timeout)

    def _run(self) -> None:
        held: list[_Message] = []  # by cut links, in order
        while True:
            with self._wake:
                while (due_in := self._seconds_left()) is None or due_in > 0:
                    wait = min((s for s in (due_in, MENDED_EVERY if held else None) if s is not None), default=None)
                    if not self._wake.wait(wait) and held:
                        break
                if self._seconds_left() == 0:
                    held.append(heapq.heappop(self._queue))
            held = self._begin(held)

    def _seconds_left(self) -> float | None:
        """Until the first message is through; None: there is none."""
        return max(0.0, self._queue[0].due - time.perf_counter()) if self._queue else None

    def _begin(self, messages: list[_Message]) -> list[_Message]:
        """Start what its links carry; returns the rest. Nothing passes a message that it must come after."""
        rates, stuck, rest = self.rate(), set(), []  # type: Mapping[int, float], set[object], list[_Message]
        for message in messages:
            lanes: set[object] = {*message.peers, message.group} - {()}
            if lanes & stuck or any(rates.get(peer) == 0 for peer in message.peers):
                stuck |= lanes
                rest.append(message)
            else:
                message.begin()
        return rest
