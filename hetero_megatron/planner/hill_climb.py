"""Hill climbing: from a solution to the first neighbour that is better, until none is or the effort is spent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class HillClimb(Generic[T]):
    """One local search that never evaluates the same solution twice. ``effort``: number of neighbours that may still be
    evaluated."""

    def __init__(self, effort: int) -> None:
        self.effort = effort
        self._seen: set[T] = set()

    def run(self, start: T, neighbours: Callable[[T], Iterable[T]], improves: Callable[[T], bool]) -> Iterator[T]:
        """Yield ever better solutions.

        Args:
            neighbours: small changes to a solution, most promising first.
            improves: whether a solution is better than ``start`` and all that were yielded before.
        """
        self._seen.add(start)
        current: T | None = start
        while current is not None:
            current = self._first_better(neighbours(current), improves)
            if current is not None:
                yield current

    def _first_better(self, solutions: Iterable[T], improves: Callable[[T], bool]) -> T | None:
        for other in solutions:
            if other in self._seen:
                continue
            if self.effort <= 0:
                return None
            self.effort -= 1
            self._seen.add(other)
            if improves(other):
                return other
        return None
