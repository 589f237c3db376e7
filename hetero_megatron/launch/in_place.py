"""The launcher of an elastic run: starts the ranks once, sees which ones end, and says who goes on under which plan."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hetero_megatron.comm.epochs import Epoch, EpochStore
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import PEER_ERROR, USER_ERROR, Planner, left_without, say_code
from hetero_megatron.monitoring.record import add_event
from hetero_megatron.training.exit import ECHO_SECONDS, handled, note_hang_up
from hetero_megatron.utils.text import plural

LOOK_SECONDS = 0.02


class ElasticJob(Protocol):
    """The processes of a job, by member; ``secret``: of its store."""

    secret: bytes

    def poll(self) -> dict[int, int]:
        """Exit codes of those that have ended, -N for signal N."""

    def end(self, rank: int) -> None:
        """SIGKILL to one."""

    def kill(self) -> None: ...


class InPlaceSupervisor:
    """Runs a job to its end, in epochs; member i is the process that was started as rank i.

    Args:
        start: starts all ranks; given host and port of the store.
        planner: says what the seats that are left run.
        max_losses: epochs after a failure.
        grace: seconds for all members to leave an epoch after its first one failed; who takes longer is killed, and
            counts as lost.
        scratch: folder for the cluster files of what is left.
    """

    def __init__(
        self, setup: Setup, start: Callable[[str, int], ElasticJob], planner: Planner, max_losses: int, grace: float,
        scratch: Path, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.setup, self.planner, self.max_losses, self.grace = setup, planner, max_losses, grace
        self.scratch, self._print = scratch, log
        self._server = JobStore()
        self._job = start(self._server.host, self._server.port)
        self._store = EpochStore(self._server.keys("elastic"), self._job.secret)
        self.members = list(range(len(setup.seats)))  # by rank of the present epoch
        self._number = self._losses = 0
        self._codes: dict[int, int] = {}
        self._gone: dict[int, str] = {}  # members that ended since this epoch began, and how
        self._lost = False  # some of them without a word
        self._left: set[int] = set()  # members of all epochs that take part no more
        self._since: float | None = None  # when the first sign came that this epoch is over
        self._signalled: int | None = None
        self._signalled_at, self._again = 0.0, False

    def log(self, text: str) -> None:
        self._print(f"launcher: {text}")
        with suppress(OSError):
            add_event(self.scratch, "launcher", text)

    def run(self) -> int:
        """Exit code of the job."""
        before = {s: signal.signal(s, self._on_signal) for s in handled(("SIGTERM", "SIGINT", "SIGHUP"))}
        try:
            while (code := self._look()) is None:
                time.sleep(LOOK_SECONDS)
            return code
        finally:
            self._job.kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _alive(self) -> list[int]:
        return [m for m in self.members if m not in self._codes]

    def _on_signal(self, number: int, _: object) -> None:
        note_hang_up(number)
        if self._signalled is None:
            self._signalled, self._signalled_at = number, time.monotonic()
            name = signal.Signals(number).name
            self._store.call_off(name)
            self.log(f"{name}: the ranks stop after this step, and save; a second signal kills them")
        elif time.monotonic() - self._signalled_at > ECHO_SECONDS:
            self._again = True

    def _look(self) -> int | None:
        """Once around: the job's exit code; None: it goes on."""
        if self._again:
            assert self._signalled is not None
            self.log("a second signal: all ranks are killed")
            return 128 + self._signalled
        for member, code in self._job.poll().items():
            if member not in self._codes:
                self._codes[member] = code
                self._ended(member, code)
        refused = [m for m, code in self._codes.items() if code == USER_ERROR]
        if not self._alive or refused and self._overdue():
            return self._end()
        if self._signalled is not None:  # no epoch begins any more
            return self._end() if any(self._codes.values()) and self._overdue() else None
        if refused:
            return None
        stopped = self._store.has_stopped(self._number, self._alive)
        if not stopped and not self._lost:
            return None
        self._since = self._since or time.monotonic()
        if self._lost or any(stopped.values()):
            self._store.break_off(self._number)
        if self._finished():
            return self._end() if self._overdue() else None
        if len(stopped) == len(self._alive):
            return self._next(any(stopped.values()))
        if self._overdue():
            for member in set(self._alive) - stopped.keys():
                self.log(f"rank {self._rank(member)} ({self._where(member)}) did not stop in {self.grace:g} s: killed")
                self._job.end(member)
        return None

    def _overdue(self) -> bool:
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > self.grace

    def _finished(self) -> bool:
        """Whether a member has ended its run, so that there is no step to do."""
        return any(self._codes.get(m) == 0 and not self._store.left(m) for m in self.members)

    def _ended(self, member: int, code: int) -> None:
        if member in self._left:
            return
        rank, where, why = self._rank(member), self._where(member), self._store.left(member)
        if code == 0 and why:
            self._gone[member] = f"rank {rank} ({where}) left: {why}"
            self.log(self._gone[member])
        elif code:
            self._lost = self._lost or code != USER_ERROR
            self._gone[member] = f"lost rank {rank} ({where}): {say_code(code)}"
            self.log(f"rank {rank} ({where}) ended with {say_code(code)}")

    def _end(self) -> int:
        codes = [self._codes.get(m, PEER_ERROR) for m in self.members if not self._store.left(m)]
        own = [c if c > 0 else 128 - c for c in codes if c]
        return USER_ERROR if USER_ERROR in own else own[0] if own else 0

    def _next(self, failed: bool) -> int | None:
        """The next epoch, with all that are left."""
        assert self._since is not None
        notice, begin = time.monotonic() - self._since, time.monotonic()
        if failed or self._lost:
            self._losses += 1
            if self._losses > self.max_losses:
                self.log(f"gave up after {plural(self.max_losses, 'loss', 'losses')}")
                return self._end() or PEER_ERROR
        self._left |= self._gone.keys()
        away = {self.setup.seats[m].node for m in self._left}
        members = [m for m in self._alive if self.setup.seats[m].node not in away]
        for member in set(self._alive) - set(members):
            self._left.add(member)
        seats, cluster = left_without(self.setup, away, self.scratch, f"epoch-{self._number + 1}")
        same = not self._gone
        plan = self.setup.plan if not away else self.planner(seats, cluster) if seats else None
        if plan is None:
            left = plural(len(seats), "rank")
            self.log(f"no plan for the {left} that are left without {', '.join(sorted(away))}; accepted: a "
                     f"--fallback-plan for at most {left}")  # fmt: skip
            return USER_ERROR
        text = "groups were lost, but no rank" if same else "; ".join(self._gone.values())
        self._number += 1
        self.log(f"epoch {self._number}: {plural(len(members), 'rank')} left, plan {plan}")
        took = time.monotonic() - begin
        epoch = Epoch(self._number, members, str(plan), str(cluster or ""), text, notice, took)
        self._store.publish(epoch)
        self.members, self._gone, self._lost, self._since = members, {}, False, None
        return None

    def _rank(self, member: int) -> int:
        return self.members.index(member) if member in self.members else member

    def _where(self, member: int) -> str:
        seat: Seat = self.setup.seats[member]
        return f"{seat.node}, chip {seat.local}"
