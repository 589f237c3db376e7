"""Time limit of a search and handling of Ctrl-C."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

ShouldStop = Callable[[], bool]
T = TypeVar("T")


def never() -> bool:
    """The ``should_stop`` of work without a limit."""
    return False


class TimeBudget:
    """Time limit shared by all searches of one command, so that one limit and one Ctrl-C apply to all of them.

    Attributes:
        interrupted: Ctrl-C was pressed once. A second one is not caught and ends the command.
        cut: the time limit or Ctrl-C made a search leave something out.
        watch: told the seconds since the beginning whenever a search asks whether to stop.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.began = time.monotonic()
        self.deadline = None if time_limit is None else self.began + time_limit
        self.watch: Callable[[float], None] | None = None
        self.interrupted = self.cut = False
        self._catches = True

    def uncaught(self) -> TimeBudget:
        """The same limit for work that Ctrl-C may abort immediately."""
        other = copy.copy(self)
        other._catches = False
        return other

    def over(self) -> bool:
        """Whether to stop now. The caller must stop when True: the result is then marked as cut short."""
        now = time.monotonic()
        if self.watch is not None:
            self.watch(now - self.began)
        if self.interrupted or (self.deadline is not None and now > self.deadline):
            self.cut = True
            return True
        return False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Context in which Ctrl-C leaves the block instead of ending the command."""
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.stop()

    def stop(self) -> None:
        """Call after catching KeyboardInterrupt: mark the search as interrupted, or re-raise for an :meth:`uncaught`
        budget."""
        if not self._catches:
            raise KeyboardInterrupt
        self.interrupted = self.cut = True

    def finish(self, work: Callable[[], T]) -> T:
        """Run ``work``; retry once if Ctrl-C interrupts it, so there is still a plan to print. For short work only."""
        with self.catching():
            return work()
        return work()
