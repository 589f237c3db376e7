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
        """The same limit for work that Ctrl-C ends at once."""
        other = copy.copy(self)
        other._catches = False
        return other

    def over(self) -> bool:
        """Whether to stop; who asks also does, so that what was found is not all."""
        if self.interrupted or (self.deadline is not None and time.monotonic() > self.deadline):
            self.cut = True
            return True
        return False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Ctrl-C ends no more than the work in here."""
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.stop()

    def stop(self) -> None:
        """For who catches a KeyboardInterrupt itself; raises it again where it is to go through."""
        if not self._catches:
            raise KeyboardInterrupt
        self.interrupted = self.cut = True

    def finish(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, begun again where Ctrl-C ends it: for short work without which there is no plan."""
        with self.catching():
            return work()
        return work()
