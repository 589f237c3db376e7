"""The launcher of an elastic job whose processes are played by a thread, over its own store."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from hetero_megatron.comm.epochs import SCOPE, Drifted, EpochStore, JoinAnswer, JoinRequest, Speed
from hetero_megatron.comm.job_store import connect_store
from hetero_megatron.launch import in_place
from hetero_megatron.launch.drift import DriftPlanner
from hetero_megatron.launch.in_place import InPlaceSupervisor
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Planner
from hetero_megatron.training.agreement import program_facts


@pytest.fixture(autouse=True)
def _nobody_listens_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "LINGER_SECONDS", 0.0)


class Played:
    """See :class:`~hetero_megatron.launch.in_place.ElasticJob`: one process, and hosts that join."""

    secret = b""

    def __init__(self, script: Callable[[Played], None]) -> None:
        self.codes: dict[int, int] = {}
        self.failed: list[Exception] = []
        self._script = script

    def start(self, host: str, port: int) -> Played:
        self.store = EpochStore(connect_store(host, port, timedelta(seconds=30), SCOPE), b"")
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self._script(self)
        except Exception as error:  # the launcher must not wait for ever
            self.failed.append(error)
            self.codes[0] = 1

    def join(self, node: str, cluster: str = "") -> int:
        """A host asks; its member."""
        number = self.store.ask_to_join(JoinRequest(node, node, 1, cluster, program_facts()))
        until(lambda: self.store.join_answer(number) is not None)
        answer = self.store.join_answer(number)
        assert answer is not None and not answer.refused, answer
        return answer.members[0]

    def poll(self) -> dict[int, int]:
        return dict(self.codes)

    def end(self, rank: int) -> None:
        self.codes[rank] = -9

    def kill(self) -> None: ...


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def run(script: Callable[[Played], None], directory: Path) -> tuple[int, list[str]]:
    """(exit code of the job, what the launcher said)."""
    job, said = Played(script), list[str]()
    one = InPlaceSupervisor(
        Setup(directory / "plan", (Seat("first", 0),)), job.start, lambda seats, _: directory / f"{len(seats)}", 10,
        60.0, directory, said.append, wait=60.0,
    )  # fmt: skip
    code = one.run()
    assert job.failed == []
    return code, said


def test_a_host_that_is_lost_before_it_joins_does_not_end_a_job_that_waits(tmp_path: Path) -> None:
    def script(job: Played) -> None:
        one = job.join("one")
        job.store.ready(one, Speed("cpu", 1.0))
        until(lambda: job.store.paused(0))
        job.store.ended(one, -9)  # both at once
        job.codes[0] = -9
        other = job.join("other")
        job.store.ready(other, Speed("cpu", 1.0))
        until(lambda: job.store.first_epoch(other) == 1)
        epoch = job.store.find(1)
        assert epoch is not None and (epoch.members, epoch.joined) == ([other], [other])
        job.store.ended(other, 0)

    code, said = run(script, tmp_path)
    assert code == 0 and any("no rank is left" in line for line in said), said


def test_all_that_were_told_to_leave_end_the_job_well_when_nobody_comes(tmp_path: Path) -> None:
    def script(job: Played) -> None:
        job.store.leave(0, "all were told to leave")
        job.codes[0] = 0

    job, said = Played(script), list[str]()
    setup = Setup(tmp_path / "plan", (Seat("first", 0),))
    one = InPlaceSupervisor(setup, job.start, lambda *_: None, 10, 60.0, tmp_path, said.append, wait=0.5)
    assert one.run() == 0 and job.failed == [] and "waiting 0.5 s" in "".join(said)


def test_a_host_for_which_no_plan_is_better_is_a_spare(tmp_path: Path) -> None:
    """The job goes on under its plan, and takes the host when a rank is lost."""

    def script(job: Played) -> None:
        member = job.join("one")
        job.store.ready(member, Speed("cpu", 1.0))
        until(lambda: any("one, chip 0: spare" in line for line in said))
        assert not job.store.paused(0)
        job.codes[0] = -9
        until(lambda: job.store.first_epoch(member) == 1)
        job.store.ended(member, 0)

    job, said = Played(script), list[str]()
    plan = tmp_path / "plan"
    setup = Setup(plan, (Seat("first", 0),))
    one = InPlaceSupervisor(setup, job.start, lambda *_: plan, 10, 60.0, tmp_path, said.append, wait=60.0)
    assert one.run() == 0 and job.failed == []


def test_the_cluster_file_that_a_host_brings_counts_from_then_on(tmp_path: Path) -> None:
    small = "nodes:\n  - {name: first, chip: A100-80-SXM}\n"
    (tmp_path / "cluster.yaml").write_text(small)

    def script(job: Played) -> None:
        member = job.join("one", small + "  - {name: one, chip: A100-80-SXM}\n")
        job.store.ready(member, Speed("cpu", 1.0))
        until(lambda: job.store.paused(0))
        job.store.stopped(0, 0, by_failure=False)
        until(lambda: job.store.first_epoch(member) == 1)
        job.codes[0] = -9
        job.store.stopped(1, member, by_failure=True)
        until(lambda: (epoch := job.store.find(2)) is not None and epoch.members == [member])
        job.store.ended(member, 0)

    job, said = Played(script), list[str]()
    setup = Setup(tmp_path / "plan", (Seat("first", 0),), tmp_path / "cluster.yaml")
    fits = lambda seats, _: tmp_path / f"{len(seats)}"  # noqa: E731
    one = InPlaceSupervisor(setup, job.start, fits, 10, 60.0, tmp_path, said.append)
    assert one.run() == 0 and job.failed == [], said


def test_the_launcher_looks_after_ranks_while_a_plan_is_searched(tmp_path: Path) -> None:
    """The search for two takes for ever: a host that asks meanwhile is answered, and a rank that is lost counts; each
    time the search begins anew for those who are there."""

    def script(job: Played) -> None:
        one = job.join("one")
        job.store.ready(one, Speed("cpu", 1.0))
        until(lambda: (tmp_path / "two").exists())
        other = job.join("other")
        job.store.ready(other, Speed("cpu", 1.0))
        until(lambda: job.store.paused(0))
        job.store.stopped(0, 0, by_failure=False)
        until(lambda: (epoch := job.store.find(1)) is not None and epoch.members == [0, one, other])
        (tmp_path / "two").unlink()
        job.codes[0] = -9
        for member in (one, other):
            job.store.stopped(1, member, by_failure=True)
        until(lambda: (tmp_path / "two").exists())
        job.store.ended(one, -9)
        until(lambda: (epoch := job.store.find(2)) is not None and epoch.members == [other])
        job.store.ended(other, 0)

    def fits(seats: Sequence[Seat], _: object) -> Path:
        if len(seats) == 2:
            (tmp_path / "two").touch()
            time.sleep(600)
        return tmp_path / f"{len(seats)}.yaml"

    job, said, before = Played(script), list[str](), set(multiprocessing.active_children())
    setup = Setup(tmp_path / "plan", (Seat("first", 0),))
    one = InPlaceSupervisor(setup, job.start, fits, 1, 60.0, tmp_path, said.append)
    assert one.run() == 0 and job.failed == [], said
    assert set(multiprocessing.active_children()) <= before  # the search's process is gone


def test_a_host_that_came_in_time_is_not_left_while_its_plan_is_searched(tmp_path: Path) -> None:
    """The search takes longer than the job waits for hosts."""

    def script(job: Played) -> None:
        member = job.join("one")
        job.store.ready(member, Speed("cpu", 1.0))
        until(lambda: (tmp_path / "searched").exists())
        job.codes[0] = -9
        until(lambda: job.store.first_epoch(member) == 1)
        job.store.ended(member, 0)

    def fits(seats: Sequence[Seat], _: object) -> Path:
        (tmp_path / "searched").touch()
        time.sleep(1.0)
        return tmp_path / f"{len(seats)}.yaml"

    job, said = Played(script), list[str]()
    setup = Setup(tmp_path / "plan", (Seat("first", 0),))
    one = InPlaceSupervisor(setup, job.start, fits, 1, 60.0, tmp_path, said.append, wait=0.3)
    assert one.run() == 0 and job.failed == [], said


def test_a_job_that_is_to_stop_does_not_wait_for_a_rank_that_hangs(tmp_path: Path) -> None:
    """The rank beside it has seen a failure, and saves after a step without it."""

    def script(job: Played) -> None:
        until(lambda: signal.getsignal(signal.SIGTERM) != before)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: bool(job.store.called_off()))
        job.store.stopped(0, 0, by_failure=True)
        until(lambda: (epoch := job.store.find(1)) is not None and epoch.members == [0])
        job.codes[0] = 0

    before = signal.getsignal(signal.SIGTERM)
    job, said = Played(script), list[str]()
    setup = Setup(tmp_path / "plan", (Seat("first", 0), Seat("second", 0)))
    one = InPlaceSupervisor(setup, job.start, lambda *_: tmp_path / "1", 1, 0.2, tmp_path, said.append)
    assert one.run() == 0 and job.failed == [], said
    assert any("rank 1 (second, chip 0) did not stop in 0.2 s: killed" in line for line in said)


def test_a_search_that_fails_says_why_and_the_job_goes_on(tmp_path: Path) -> None:
    def script(job: Played) -> None:
        for node in ("one", "two"):
            job.store.ready(job.join(node), Speed("cpu", 1.0))
            until(lambda node=node: any(f"{node}, chip 0: spare" in line for line in said))  # type: ignore[misc]
        job.store.leave(0, "all were told to leave")
        job.codes[0] = 0

    def fails(seats: Sequence[Seat], _: object) -> None:
        if len(seats) == 2:
            raise ValueError("no such chip")
        os._exit(3)

    job, said = Played(script), list[str]()
    setup = Setup(tmp_path / "plan", (Seat("first", 0),))
    InPlaceSupervisor(setup, job.start, fails, 1, 60.0, tmp_path, said.append).run()
    assert job.failed == [], said
    assert [line for line in said if "search" in line] == [
        "launcher: the search for a plan failed: ValueError: no such chip",
        "launcher: the search for a plan ended with exit code 3",
    ]


def test_a_slow_rank_is_planned_around_by_the_same_members(tmp_path: Path) -> None:
    """Where another plan is better for the rates that it has now; told again, it is looked for again."""
    file, other, found = tmp_path / "cluster.yaml", tmp_path / "other", dict[str, float]()
    file.write_text("nodes:\n  - {name: first, chip: A100-80-SXM}\n  - {name: second, chip: A100-80-SXM}\n")

    def script(job: Played) -> None:
        job.store.tell_drift(0, Drifted("fp32", {"1": 1.7}))
        until(lambda: any("second takes 1.70 times as long; the plan stays" in line for line in said))
        assert not job.store.paused(0)
        job.store.tell_drift(0, Drifted("fp32", {"1": 6.0}))
        until(lambda: job.store.paused(0))
        for member in (0, 1):
            job.store.stopped(0, member, by_failure=False)
        until(lambda: job.store.find(1) is not None)
        epoch = job.store.find(1)
        assert epoch is not None and epoch.members == [0, 1] and epoch.event == "second takes 6.00 times as long"
        assert epoch.plan == str(other) and epoch.cluster == str(tmp_path / "cluster-drifted-0.yaml")
        job.codes |= {0: 0, 1: 0}

    def slow(from_file: Path, to: Path, factors: Mapping[str, float], dtype: str) -> None:
        found.update(factors)
        to.write_text(from_file.read_text())

    def better(present: Setup, number: int) -> Planner:
        return lambda seats, cluster: other if found["second"] > 2 else present.plan

    job, said = Played(script), list[str]()
    setup = Setup(tmp_path / "plan", (Seat("first", 0), Seat("second", 0)), file)
    one = InPlaceSupervisor(
        setup, job.start, lambda *_: None, 1, 60.0, tmp_path, said.append, drift=DriftPlanner(slow, better, 1)
    )
    assert one.run() == 0 and job.failed == [], said
    assert any("not looked for any more: planned again 1 time" in line for line in said)


def begin(script: Callable[[Played], None], directory: Path) -> tuple[int, list[str]]:
    """A job that begins with this process and the two of another host."""
    job, said = Played(script), list[str]()
    seats = (Seat("first", 0), Seat("other", 0, 0), Seat("other", 1, 1))
    one = InPlaceSupervisor(
        Setup(directory / "3", seats), job.start, lambda seats, _: directory / f"{len(seats)}", 10, 60.0, directory,
        said.append, attached={"other": [1, 2]},
    )  # fmt: skip
    code = one.run()
    assert job.failed == []
    return code, said


def ask(job: Played, node: str, chips: int) -> JoinAnswer:
    number = job.store.ask_to_join(JoinRequest(node, node, chips, "", program_facts()))
    until(lambda: job.store.join_answer(number) is not None)
    answer = job.store.join_answer(number)
    assert answer is not None
    return answer


def test_a_host_that_the_first_epoch_begins_with(tmp_path: Path) -> None:
    """Its agent says how its processes end; with one of them goes the host."""

    def script(job: Played) -> None:
        assert ask(job, "other", 2) == JoinAnswer("", [1, 2], 3)
        job.store.stopped(0, 0, by_failure=True)
        job.store.stopped(0, 2, by_failure=True)
        job.store.ended(1, -9)
        until(lambda: job.store.find(1) is not None)
        epoch = job.store.find(1)
        assert epoch is not None and epoch.members == [0] and epoch.plan == str(tmp_path / "1")
        job.store.ended(2, 3)
        job.codes[0] = 0

    code, said = begin(script, tmp_path)
    assert code == 0 and "rank 1 (other, chip 0) ended with SIGKILL" in "".join(said), said


def test_a_host_that_does_not_fit_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    code, said = begin(lambda job: None if ask(job, "other", 1).refused else job.end(0), tmp_path)
    assert code == 2 and said == [
        "launcher: other (1 chip) asks to begin: refused: it has 1 chip, and is to run 2 ranks"
    ]


def test_a_host_that_does_not_come_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(job: Played) -> None:
        job.codes[1] = -9

    assert begin(lost, tmp_path) == (137, ["launcher: other: not there to begin, SIGKILL"])
    monkeypatch.setattr(in_place, "ATTACH_SECONDS", 0.1)
    assert begin(lambda _: None, tmp_path) == (3, ["launcher: other: not there to begin after 0.1 s"])


def test_hosts_that_cannot_reach_each_other(tmp_path: Path) -> None:
    """As few ranks as will do leave, with their hosts: here the one of the first host, not the two of the other."""

    def script(job: Played) -> None:
        ask(job, "other", 2)
        job.store.cannot_reach(0, 2, [0])
        for member in range(3):
            job.store.stopped(0, member, by_failure=True)
        until(lambda: job.store.find(1) is not None)
        epoch = job.store.find(1)
        assert epoch is not None and epoch.members == [1, 2]
        assert epoch.event == "rank 0 (first, chip 0) and other cannot reach each other"
        job.codes[0] = 3
        for member in (1, 2):
            job.store.ended(member, 0)

    code, said = begin(script, tmp_path)
    assert code == 0, said
