"""The launcher of an elastic run: starts the ranks once, sees which ones end, lets hosts join, and says who goes on
under which plan."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from hetero_megatron.cluster import load_cluster
from hetero_megatron.comm.epochs import Epoch, EpochStore
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.launch.admission import Admission
from hetero_megatron.launch.drift import Around, DriftPlanner, DriftWatch
from hetero_megatron.launch.epoch_change import Change, NextEpoch, cut_off
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.plan_search import PlanSearch, Search
from hetero_megatron.launch.supervise import PEER_ERROR, USER_ERROR, Planner, left_without, say_code
from hetero_megatron.monitoring.record import add_event
from hetero_megatron.training.exit import StopSignals
from hetero_megatron.utils.text import plural

LOOK_SECONDS = 0.02
ATTACH_SECONDS = 120.0  # that hosts may take which the first epoch begins with
LINGER_SECONDS = 2.0  # that the store stays after the end of a job which hosts have joined, so that they hear of it


class ElasticJob(Protocol):
    """The processes that this launcher started, by member; ``secret``: of the job's store."""

    secret: bytes

    def poll(self) -> dict[int, int]:
        """Exit codes of those that have ended, -N for signal N."""

    def end(self, rank: int) -> None:
        """SIGKILL to one."""

    def kill(self) -> None: ...


@dataclass
class InPlaceSupervisor:
    """Runs a job to its end, in epochs; member i is the process that was started as rank i. Those that join have
    numbers of their own, and the agents of their hosts say how they end.

    Args:
        setup: what the job begins with.
        start: starts all ranks; given host and port of the store.
        planner: says what the seats that are there run.
        max_losses: epochs after a failure.
        grace: seconds for all members to leave an epoch after its first one failed; who takes longer is killed, and
            counts as lost.
        scratch: folder for the cluster files of who is there.
        open_to: called with the store's address and the secret, once ranks can join; None: none can.
        address: of this host, for others; None: only processes of this host take part.
        least_speed: of devices that join, as a share of what others of their kind compute.
        wait: seconds that the job outlives its last rank, for hosts to come and go on from its checkpoint.
        search: has the planner begin to look for a plan.
        serve: makes the job's store; None: one at ``address``.
        drift: how to plan again where ranks drift from their rates; None: they stay as they are.
        attached: by node, members of the first epoch that the agent of that host starts, once it has asked.
    """

    setup: Setup
    start: Callable[[str, int], ElasticJob]
    planner: Planner
    max_losses: int
    grace: float
    scratch: Path
    print: Callable[[str], None]
    open_to: Callable[[str, int, bytes], None] | None = None
    address: str | None = None
    least_speed: float = 0.5
    wait: float = 0.0
    search: Callable[[Planner, Sequence[Seat], Path | None], Search] = PlanSearch
    serve: Callable[[], JobStore] | None = None
    drift: DriftPlanner | None = None
    attached: Mapping[str, Sequence[int]] = field(default_factory=dict)
    members: list[int] = field(init=False)  # by rank of the present epoch

    def __post_init__(self) -> None:
        self._server = self.serve() if self.serve is not None else JobStore(self.address or "127.0.0.1")
        self._job = self.start(self._server.host, self._server.port)
        self._store = EpochStore(self._server.keys("elastic"), self._job.secret)
        self._seats: dict[int, Seat] = dict(enumerate(self.setup.seats))  # of all members of all epochs
        self._cluster = self.setup.cluster
        self.members = list(self._seats)
        self._admission = Admission(self._store, len(self._seats), self.least_speed, self.scratch, self.attached)
        self._begun = time.monotonic()
        self._number = self._losses = 0
        self._codes: dict[int, int] = {}
        self._gone: dict[int, str] = {}  # members that ended since this epoch began, and how
        self._new: set[int] = set()  # members that were in no epoch before this one
        self._lost = False  # some of them without a word
        self._killed: set[int] = set()
        self._left: set[int] = set()  # members of all epochs that take part no more
        self._since: float | None = None  # when the first sign came that this epoch is over
        self._plan: Path | None = self.setup.plan  # of the present epoch
        self._present = self.setup.cluster  # its cluster file, of those there
        search = self.search
        self._drift = DriftWatch(self._store, self.drift, self.scratch, search, self.log) if self.drift else None
        self._around: Around | None = None  # for which the members pause
        self._asked: tuple[list[int], list[int]] | None = None  # who was there when a plan was asked, and who ready
        self._deserted = False  # no rank is left, and that was said
        self._prepared: NextEpoch | None = None  # with those that are about to join
        self._sought: tuple[list[int], NextEpoch, Search | None] | None = None  # for whom a plan is, or was, looked for
        self._change: Change | None = None
        self._signals = StopSignals(self._on_signal)
        if self.open_to is not None:
            self.open_to(self._server.host, self._server.port, self._job.secret)

    def log(self, text: str) -> None:
        self.print(f"launcher: {text}")
        with suppress(OSError):
            add_event(self.scratch, "launcher", text)

    def run(self) -> int:
        """Exit code of the job."""
        code: int | None = None
        with self._signals:
            try:
                while (code := self._look()) is None:
                    time.sleep(LOOK_SECONDS)
                return code
            finally:
                self._forget_search()
                self._store.end_job(PEER_ERROR if code is None else code)
                self._job.kill()
                if self._admission.admitted:
                    time.sleep(LINGER_SECONDS)

    @property
    def _alive(self) -> list[int]:
        return [m for m in self.members if m not in self._codes]

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        self._store.call_off(name)
        self.log(f"{name}: the ranks stop after this step, and save; a second signal kills them")

    def _look(self) -> int | None:
        """Once around: the job's exit code; None: it goes on."""
        if self._signals.again:
            assert self._signals.number is not None
            self.log("a second signal: all ranks are killed")
            return 128 + self._signals.number
        if self._admission.awaited and (refusal := self._await_hosts()) is not None:
            return refusal
        elsewhere = self._store.exit_codes([*self._admission.waiting, *(m for m in self._alive if self._remote(m))])
        for member, code in {**self._job.poll(), **elsewhere}.items():
            if member not in self._codes:
                self._codes[member] = code
                self._ended(member, code)
        refusing = [m for m in self.members if self._codes.get(m) == USER_ERROR and m not in self._new]
        if not self._alive and not refusing and self._waits():
            if not self._admission.ready():
                self._prepared = None  # they were lost before they joined
            self._let_join()
            return self._next(self._lost) if self._prepared is not None else None
        if not self._alive or refusing and self._overdue():
            return self._end()
        stopped = self._store.has_stopped(self._number, self._alive)
        if self._signals.number is not None and not stopped:  # they end; where some wait, all do one more step
            return self._end() if any(self._codes.get(m) for m in self.members) and self._overdue() else None
        if refusing:
            return None
        if self._signals.number is None:
            self._let_join()
            self._plan_around()
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
            for member in set(self._alive) - stopped.keys() - self._killed:
                self.log(f"rank {self._rank(member)} ({self._where(member)}) did not stop in {self.grace:g} s: killed")
                self._kill(member)
        return None

    def _await_hosts(self) -> int | None:
        """Those that the first epoch begins with: the job's exit code where one does not fit, or does not come."""
        for line in self._admission.look({self._seats[m].node for m in self._alive}, self._cluster):
            self.log(line)
        awaited = ", ".join(sorted(self._admission.awaited))
        if self._admission.unfit:
            return USER_ERROR
        ended = self._job.poll()
        if code := next((ended[m] for ms in self._admission.awaited.values() for m in ms if m in ended), 0):
            self.log(f"{awaited}: not there to begin, {say_code(code)}")
            return code if code > 0 else 128 - code
        if awaited and time.monotonic() - self._begun > ATTACH_SECONDS:
            self.log(f"{awaited}: not there to begin after {ATTACH_SECONDS:g} s")
            return PEER_ERROR
        return None

    def _remote(self, member: int) -> bool:
        return member >= len(self.setup.seats) or self.setup.seats[member].node in self.attached

    def _kill(self, member: int) -> None:
        """What another host runs is left to it; the next epoch's keys are not those that it knows."""
        self._killed.add(member)
        if not self._remote(member):
            self._job.end(member)
        elif member not in self._codes:
            self._codes[member] = -signal.SIGKILL
            self._ended(member, -signal.SIGKILL)

    def _overdue(self) -> bool:
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > self.grace

    def _waits(self) -> bool:
        """Whether the job, whose last rank is gone, waits for hosts that join, or for the plan of those there."""
        if self._finished() or self._signals.number is not None:
            return False
        if self._since is None:
            self._since = time.monotonic()
        if not self._deserted and (self.wait or any(self._codes.get(m) for m in self.members)):
            self.log("no rank is left" + (f"; waiting {self.wait:g} s for hosts to join" if self.wait else ""))
        self._deserted = True
        searches = self._sought is not None and self._sought[2] is not None and bool(self._admission.ready())
        return self.wait > 0 and (searches or time.monotonic() - self._since < self.wait)

    def _finished(self) -> bool:
        """Whether a member has ended its run, so that there is no step to do."""
        return any(self._codes.get(m) == 0 and not self._store.left(m) for m in self.members)

    def _ended(self, member: int, code: int) -> None:
        if member in self._left:
            return
        if member not in self.members:
            self._admission.drop(member)
            self.log(f"{self._where(member)} does not join: its process ended with {say_code(code)}")
            return
        rank, place, why = self._rank(member), self._where(member), self._store.left(member)
        if code == 0 and why:
            self._gone[member] = f"rank {rank} ({place}) left: {why}"
            self.log(self._gone[member])
        elif code:
            self._lost = self._lost or code != USER_ERROR or member in self._new
            self._gone[member] = f"lost rank {rank} ({place}): {say_code(code)}"
            self.log(f"rank {rank} ({place}) ended with {say_code(code)}")

    def _end(self) -> int:
        codes = [self._codes.get(m, PEER_ERROR) for m in self.members if not self._store.left(m)]
        failed_codes = [c if c > 0 else 128 - c for c in codes if c]
        return USER_ERROR if USER_ERROR in failed_codes else failed_codes[0] if failed_codes else 0

    def _let_join(self) -> None:
        """Hosts that ask. Once all processes of one are ready, its plan is made, and the others pause after a step; or
        it is a spare for as long as no plan uses it."""
        present = {self._seats[m].node for m in self._alive}
        for line in self._admission.look(present, self._cluster):
            self.log(line)
        self._seats |= self._admission.seats
        ready, alive = self._admission.ready(), self._alive
        stopping = self._since is not None and bool(alive)
        if self._prepared is not None or stopping or not ready or (alive, ready) == self._asked:
            return
        for line in self._admission.leave_out_slow(alive):
            self.log(line)
        if not (ready := self._admission.ready()):
            return
        if (prepared := self._who_goes_on([*alive, *ready])) is None:
            return
        self._asked = alive, ready
        if prepared.plan is None or alive and prepared.plan == self._plan:
            self.log(f"{', '.join(self._where(m) for m in ready)}: spare, as no plan is better for it")
        else:
            self._prepared = prepared
            self._store.pause(self._number)

    def _plan_around(self) -> None:
        """Where ranks drifted from their rates, and another plan is better now, the same members pause for it."""
        if self._drift is None or self._prepared is not None or self._since is not None or self._plan is None:
            return
        seats = tuple(self._seats[m] for m in self.members)
        present = replace(self.setup, plan=self._plan, seats=seats, cluster=self._present)
        self._around = around = self._drift.look(self._number, present, self._cluster)
        if around is not None:
            self._prepared = NextEpoch(list(self.members), around.plan, around.cluster, around.whole)
            self._store.pause(self._number)

    def _who_goes_on(self, members: list[int]) -> NextEpoch | None:
        """Their order, plan and cluster file: those of the cluster file's ranks, or as they came. None: the plan is
        still being looked for; a search for other members ends here."""
        if self._sought is None or self._sought[0] != members:
            self._forget_search()
            self._sought = (members, *self._look_for(members))
        _, next_epoch, search = self._sought
        if search is None:
            return next_epoch
        if not search.done():
            return None
        if search.problem:
            self.log(f"the search for a plan {search.problem}")
        self._sought = members, replace(next_epoch, plan=search.plan), None
        return self._sought[1]

    def _look_for(self, members: list[int]) -> tuple[NextEpoch, Search | None]:
        """(all but the plan, which is looked for; None: it is there, too)."""
        nodes = {self._seats[m].node for m in members}
        file = self._admission.cluster_with(nodes) or self._cluster
        seats = tuple(self._seats[m] for m in members)
        names = {r.node for r in load_cluster(file).ranks} if file is not None else nodes
        setup, name = replace(self.setup, seats=seats, cluster=file), f"epoch-{self._number + 1}"
        seats_left, cluster = left_without(setup, names - nodes, self.scratch, name)
        if cluster is not None:
            by_seat = {(self._seats[m].node, self._seats[m].local): m for m in members}
            members = [by_seat[rank.node, rank.local] for rank in load_cluster(cluster).ranks]
            seats_left = [self._seats[m] for m in members]
        if tuple(seats_left) == self.setup.seats and file == self.setup.cluster:
            return NextEpoch(members, self.setup.plan, file, file), None
        next_epoch = NextEpoch(members, None, cluster, file)
        return next_epoch, self.search(self.planner, seats_left, cluster) if seats_left else None

    def _forget_search(self) -> None:
        if self._sought is not None and self._sought[2] is not None:
            self._sought[2].abandon()
        self._sought = None
        if self._drift is not None:
            self._drift.forget()

    def _next(self, failed: bool) -> int | None:
        """The next epoch, with all that are there, once its plan is found. Called again and again until then: members
        may be lost meanwhile, and hosts become ready."""
        if self._change is None:
            assert self._since is not None
            self._change = Change(time.monotonic() - self._since, time.monotonic())
            self._leave_out_cut_off()
        change = self._change
        if (failed or self._lost) and not change.failed:
            change.failed, self._losses = True, self._losses + 1
        if self._losses > self.max_losses:
            self.log(f"gave up after {plural(self.max_losses, 'loss', 'losses')}")
            return self._end() or PEER_ERROR
        if change.failed:
            self._around = None
        lost_nodes = self.setup.lost_with({self._seats[m].node for m in self._gone})
        ready = [m for m in self._admission.ready() if m not in change.spare and self._around is None]
        members = [*(m for m in self._alive if self._seats[m].node not in lost_nodes), *ready]
        next_epoch = self._prepared
        if next_epoch is None or set(next_epoch.members) != set(members):
            next_epoch = self._who_goes_on(members)
        if next_epoch is None:
            return None
        if next_epoch.plan is None and ready:  # as well as it goes without those that join
            change.spare |= set(ready)
            return None
        if next_epoch.plan is None:
            ranks_left = plural(len(members), "rank")
            self.log(f"no plan for the {ranks_left} that are left without {', '.join(sorted(lost_nodes))}; accepted: a "
                     f"--fallback-plan for at most {ranks_left}")  # fmt: skip
            return USER_ERROR
        self._left |= {*self._gone, *self.members} - {*members}
        self._publish(next_epoch, ready, change.notice, time.monotonic() - change.begin)
        return None

    def _leave_out_cut_off(self) -> None:
        ranks, seats = [self._rank(m) for m in self._alive], [self._seats[m] for m in self.members]
        for member, other in cut_off(self._store, self._number, seats, ranks, self.members).items():
            place = self._where(member)
            self._gone[member] = f"rank {self._rank(member)} ({place}) and {other} cannot reach each other"
            self.log(self._gone[member])

    def _publish(self, chosen: NextEpoch, joined: list[int], notice: float, took: float) -> None:
        messages = [*self._gone.values(), *self._admission.take(joined)]
        messages += [self._around.text] if self._around is not None and chosen.plan == self._around.plan else []
        text = "; ".join(messages) or "groups were lost, but no rank"
        self._number += 1
        self.log(f"epoch {self._number}: {plural(len(chosen.members), 'rank')} there, plan {chosen.plan}")
        cluster = str(chosen.cluster or "")
        epoch = Epoch(self._number, chosen.members, str(chosen.plan), cluster, joined, text, notice, took)
        self._store.publish(epoch)
        for member in joined:
            self._store.admit(member, self._number)
        self.members, self._new, self._plan, self._cluster = chosen.members, set(joined), chosen.plan, chosen.whole
        self._gone, self._lost, self._since, self._prepared, self._deserted = {}, False, None, None, False
        self._change, self._around, self._present = None, None, chosen.cluster
        self._forget_search()

    def _rank(self, member: int) -> int:
        return self.members.index(member) if member in self.members else member

    def _where(self, member: int) -> str:
        seat = self._seats[member]
        return f"{seat.node}, chip {seat.local}"
