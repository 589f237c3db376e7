"""Limits of a search: its time, Ctrl-C, and the work that it may do, which is the same on every machine."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

ShouldStop = Callable[[], bool]
T = TypeVar("T")


def never() -> bool:
    """The ``should_stop`` of work without a limit."""
    return False


class SearchWork:
    """What a search has done, in the time that one action of a schedule takes to be placed (1.6 us on the machine of
    docs/results/planner_search.md). Counted instead of timed, so that equal questions have equal answers everywhere.

    Attributes:
        done: so far; most: what looks for better plans than the first one stops at.
        cut: something was left out for it.
    """

    def __init__(self) -> None:
        self.done, self.most, self.cut = 0.0, math.inf, False

    def add(self, actions: float) -> None:
        self.done += actions

    def left(self, kept: float = 0) -> float:
        """What may still be done if so much is ``kept`` for later."""
        return max(self.most - kept - self.done, 0)

    def over(self, kept: float = 0) -> bool:
        """Whether to stop. The caller must stop when True."""
        over = self.left(kept) <= 0
        self.cut = self.cut or over
        return over


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
        uncaught = copy.copy(self)
        uncaught._catches = False
        return uncaught

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
