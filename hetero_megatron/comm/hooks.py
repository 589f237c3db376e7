"""Hooks into a rank's communication, used to emulate slower chips and links.

:class:`Hooks` are passed to ``start_comm``; the defaults do nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class TorchWork(Protocol):
    """A transfer under way, with the interface of torch.distributed's works."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once; never raises."""

    def wait(self) -> object:
        """Block until complete; raises RuntimeError if it failed or timed out."""


class Capture(Protocol):
    """Takes the transfers that are started while a device graph is captured."""

    def start(self, peers: tuple[int, ...], transfer: Callable[[], TorchWork | None]) -> TorchWork | None:
        """Begin one, with ``peers``; RuntimeError: no graph can hold it."""


class Submit(Protocol):
    """Starts a transfer now, or returns a work that starts it later."""

    def __call__(
        self, start: Callable[[], TorchWork | None], sizes: Mapping[int, int], group: tuple[int, ...]
    ) -> TorchWork | None:
        """Called for every transfer in which this rank sends, on the communicating thread.

        Args:
            start: begins the transfer; must be called exactly once, on any thread. Returns None if there is nothing to
                wait for.
            sizes: bytes to each other rank.
            group: ranks of a collective, ascending; empty for a message. Collectives of one group must start in the
                order in which they were submitted.
        """


def start_now(
    start: Callable[[], TorchWork | None], sizes: Mapping[int, int], group: tuple[int, ...]
) -> TorchWork | None:
    return start()


@dataclass
class WaitSeconds:
    """Seconds blocked so far: in point-to-point transfers (pipeline neighbours) and in collectives."""

    neighbours: float = 0.0
    collectives: float = 0.0

    def add(self, seconds: float, collective: bool) -> None:
        if collective:
            self.collectives += seconds
        else:
            self.neighbours += seconds


class Span(NamedTuple):
    """What passed between two moments: seconds by a clock of this rank, and of these the seconds of compute and of
    waiting for pipeline neighbours (the rest is communication)."""

    start: float
    end: float
    computed: float
    neighbours: float


class HostMoment(NamedTuple):
    """A moment of the host: seconds of ``time.perf_counter``, and what was computed and waited for until then."""

    at: float
    computed: float
    neighbours: float


class Clock:
    """Times what a rank computes between two communication calls (a *segment*) at the speed of the real chip.

    Only counts inside :meth:`counting`. Subclasses override :meth:`_begin`, :meth:`_end` and :meth:`_inside`.

    Attributes:
        computed: seconds of all segments so far.
        waited: seconds blocked in transfers so far.
        synchronize: waits for all work queued on the device, for exact timing of segments; without it segments measure
            host time.
    """

    def __init__(self) -> None:
        self.computed = 0.0
        self.waited = WaitSeconds()
        self.synchronize: Callable[[], None] = lambda: None
        self._counting = self._running = self._working = False
        self._mark = 0.0

    def pause(self) -> None:
        """End the segment, because a transfer is about to be started or waited for. No-op between segments."""
        if self._running:
            self._running = False
            self.computed += self._end()

    def resume(self, waited: float = 0.0) -> None:
        """Begin the next segment; ``waited``: seconds that the call waited for a peer."""
        if not self._counting:
            return
        self._running = True
        self.synchronize()
        self._mark = time.perf_counter()
        self._begin(waited)

    def settle(self) -> None:
        """End the segment, so that :attr:`computed` is up to date, and begin another."""
        if self._running:
            self.pause()
            self.resume()

    def restart(self) -> None:
        """A step begins: moments of earlier ones are not asked for any more."""

    def moment(self) -> Any:
        """Now, for :meth:`span`."""
        return HostMoment(time.perf_counter(), self.computed, self.waited.neighbours)

    def span(self, begin: Any, end: Any) -> Span:
        """What passed between two moments since :meth:`restart`; on a device, once it has passed them."""
        return Span(begin.at, end.at, end.computed - begin.computed, end.neighbours - begin.neighbours)

    def wait_begins(self) -> Any:
        """A transfer is going to be waited for; returns what :meth:`wait_ends` takes."""
        self.pause()
        return time.perf_counter()

    def wait_ends(self, began: Any, collective: bool) -> None:
        """The transfer has come."""
        seconds = time.perf_counter() - began
        self.waited.add(seconds, collective)
        self.resume(seconds)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which compute is counted."""
        with self._inside():
            self._counting = True
            self.resume()
            try:
                yield
            finally:
                self.pause()
                self._counting = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which what runs is not the chip's work: an emulated chip goes on meanwhile."""
        running = self._running
        self.pause()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._forget(time.perf_counter() - began)
            if running:
                self.resume()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Context in which segments are the chip's work, not the host's between two transfers."""
        self._working = True
        self.settle()
        try:
            yield
        finally:
            self._working = False
            self.settle()

    def _forget(self, seconds: float) -> None:
        """What ran for ``seconds`` since the last segment is in none."""

    def _begin(self, waited: float) -> None:
        pass

    def _end(self) -> float:
        """Returns the segment's seconds."""
        self.synchronize()
        return time.perf_counter() - self._mark

    def _inside(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def report(self) -> dict[str, float]:
        """Statistics of an emulation; empty for real chips."""
        return {}


@dataclass
class Hooks:
    """Attributes:
        clock: timer, paused while a transfer is started or waited for.
        submit: called instead of starting a transfer that sends.
        on_other_cores: context for library calls that create threads; sets their CPU affinity.
        cut_ranks: ranks that are currently unreachable by emulation.
        host_rate: bytes/s of an emulated link between chip and host memory; None: none is emulated."""

    clock: Clock = field(default_factory=Clock)
    submit: Submit = start_now
    on_other_cores: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    cut_ranks: Callable[[], Collection[int]] = frozenset
    host_rate: float | None = None
