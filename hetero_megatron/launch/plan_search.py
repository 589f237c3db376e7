"""A plan sought in a process of its own: meanwhile the launcher looks after its ranks, and ends the search when the
answer is wanted no more."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from hetero_megatron.launch.jobs import Seat
from hetero_megatron.launch.supervise import Planner
from hetero_megatron.training.exit import end_with_parent


class Search(Protocol):
    """Attributes:
    plan: the answer, once it is there; None: no plan fits.
    problem: why there is no answer; empty: there is one.
    """

    plan: Path | None
    problem: str

    def done(self) -> bool:
        """Whether it is over."""

    def abandon(self) -> None: ...


class PlanSearch:
    """See :class:`Search`.

    Args:
        planner: is called in a copy of this process (fork), as it has all modules, and what the words of the command
            line became.
    """

    def __init__(self, planner: Planner, seats: Sequence[Seat], cluster: Path | None) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, answer = context.Pipe(duplex=False)
        self._process = context.Process(target=_search, args=(planner, seats, cluster, answer), daemon=True)
        self._process.start()
        answer.close()
        self.plan: Path | None = None
        self.problem = ""
        self._done = False

    def done(self) -> bool:
        if not self._done and self._answer.poll():
            self._done = True
            try:
                self.plan, self.problem = self._answer.recv()
            except EOFError:
                self._process.join()
                self.problem = f"ended with exit code {self._process.exitcode}"
            self.abandon()
        return self._done

    def abandon(self) -> None:
        self._process.kill()
        self._process.join()
        self._answer.close()


def _search(planner: Planner, seats: Sequence[Seat], cluster: Path | None, answer: Connection) -> None:
    """In the process: signals are the launcher's affair."""
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        plan, problem = planner(seats, cluster), ""
    except Exception as error:
        plan, problem = None, f"failed: {type(error).__name__}: {error}"
    with suppress(OSError):
        answer.send((plan, problem))
