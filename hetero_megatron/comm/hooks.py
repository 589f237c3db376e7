"""The seams at which something else takes part in a rank's communication, such as an emulation of slower chips.

Whoever joins a job may pass :class:`Hooks` to ``start_comm``. The defaults change nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


class Work(Protocol):
    """A transfer under way, as torch.distributed's works are."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once; never raises."""

    def wait(self) -> object:
        """Block until it is complete. RuntimeError: it failed, or took too long."""


class Submit(Protocol):
    """Starts a transfer now, or returns a work that starts it later."""

    def __call__(
        self, start: Callable[[], Work | None], sizes: Mapping[int, int], group: tuple[int, ...]
    ) -> Work | None:
        """Called for every transfer in which this rank sends, on the thread that communicates.

        Args:
            start: begins the transfer; called exactly once, on any thread. None: there is nothing to wait for.
            sizes: bytes that go to each other rank.
            group: the ranks of a collective, ascending; empty for a single message. Collectives of one group have to
                start in the order in which they were submitted.
        """


def start_now(start: Callable[[], Work | None], sizes: Mapping[int, int], group: tuple[int, ...]) -> Work | None:
    return start()


class Clock:
    """Times what a rank computes between two communication calls (a *segment*), at the speed of the chip at hand.

    Nothing counts outside :meth:`counting`. Subclasses override :meth:`_begin`, :meth:`_end` and :meth:`_inside`.

    Attributes:
        computed: seconds of all segments so far, by the chip's own clock.
        synchronize: of a device that only queues its work, for as long as segments are to be timed exactly: waits
            until all that was queued is done. Without it a segment's seconds are the host's.
    """

    def __init__(self) -> None:
        self.computed = 0.0
        self.synchronize: Callable[[], None] = lambda: None
        self._counting = self._running = self._working = False
        self._mark = 0.0

    def pause(self) -> None:
        """A segment ends: a transfer is about to be started or waited for. Does nothing between two segments."""
        if self._running:
            self._running = False
            self.computed += self._end()

    def resume(self, waited: float = 0.0) -> None:
        """The next segment begins, where compute is counted; ``waited``: seconds that the call waited for a peer."""
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

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """While this is open, compute is counted."""
        with self._inside():
            self._counting = True
            self.resume()
            try:
                yield
            finally:
                self.pause()
                self._counting = False

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """While this is open, segments are a chip's work, not what its host does between two transfers."""
        self._working = True
        self.settle()
        try:
            yield
        finally:
            self._working = False
            self.settle()

    def _begin(self, waited: float) -> None:
        pass

    def _end(self) -> float:
        """Returns the segment's seconds."""
        self.synchronize()
        return time.perf_counter() - self._mark

    def _inside(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def report(self) -> dict[str, float]:
        """Figures about an emulation; empty for real chips."""
        return {}


@dataclass
class Hooks:
    """Of one rank.

    Attributes:
        clock: timer; it is paused before a transfer is started or waited for, and resumed with the seconds waited.
        submit: called instead of starting a transfer that sends.
        on_other_cores: thread affinity; open around library calls that create threads.
        cut_ranks: ranks that cannot be reached now, whatever the network says.
    """

    clock: Clock = field(default_factory=Clock)
    submit: Submit = start_now
    on_other_cores: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    cut_ranks: Callable[[], Collection[int]] = frozenset
