"""When a search ends before it is done: at its time limit, or when the user presses Ctrl-C."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Late = Callable[[], bool]  # whether to stop
T = TypeVar("T")


def never() -> bool:
    """For work without a limit."""
    return False


class TimeBudget:
    """Shared by all searches of one command, so that the limit and one Ctrl-C hold for them together.

    Attributes:
        interrupted: Ctrl-C came. A second one is not caught and ends the command.
        cut: something was left out because of either.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.deadline = None if time_limit is None else time.monotonic() + time_limit
        self.interrupted = self.cut = False
        self._catches = True

    def uncaught(self) -> TimeBudget:
        """The same limit, for work that Ctrl-C may end at once."""
        other = copy.copy(self)
        other._catches = False
        return other

    def over(self) -> bool:
        """Whether to stop. A caller that is told so must stop: the result then counts as cut short."""
        if self.interrupted or (self.deadline is not None and time.monotonic() > self.deadline):
            self.cut = True
            return True
        return False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """In this block Ctrl-C ends the block, not the command."""
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.stop()

    def stop(self) -> None:
        """Call after catching a KeyboardInterrupt: end the search here, or re-raise where the budget does not catch."""
        if not self._catches:
            raise KeyboardInterrupt
        self.interrupted = self.cut = True

    def finish(self, work: Callable[[], T]) -> T:
        """Run ``work``; retry once if Ctrl-C interrupts it, so there is still a plan to print. For short work only."""
        with self.catching():
            return work()
        return work()
