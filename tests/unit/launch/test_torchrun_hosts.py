"""What hosts under torchrun are told and refused, and how the other workers hear of their agent's end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_megatron.cluster import load_cluster
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.launch import torchrun
from hetero_megatron.launch.jobs import Seat
from hetero_megatron.launch.torchrun import HostOffer, HostRecords, Meeting, TorchrunAgents, attach, own_address
from hetero_megatron.launch.waiting_workers import AgentEnd, await_agent

CLUSTER = "nodes:\n  - {name: a, chip: A100-80-SXM, chips_per_node: 2}\n  - {name: b, chip: A100-80-SXM}\n"


class Offered(TorchrunAgents):
    """Agents of hosts that have said this."""

    def __init__(self, *offers: HostOffer) -> None:
        self._offers, self.address = list(offers), None

    def offers(self) -> list[HostOffer]:
        return self._offers


def launcher(node: str | None, world: int, rank: int = 0, **more: object) -> LauncherEnvironment:
    return LauncherEnvironment(rank, world, 0, 1, "127.0.0.1", node=node, **more)  # type: ignore[arg-type]


def test_hosts_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    a, b = HostOffer("a", 0, 2), HostOffer("b", 2, 1)
    for offers, file, ranks, said in (
        ([a, HostOffer("c", 2, 1)], cluster, 3, "HETERO_NODE = c: the cluster file has no such node"),
        ([HostOffer("a", 0, 1), b], cluster, 3, "gives a 2 chips, and torchrun has started 1 worker there"),
        ([a], cluster, 3, "torchrun has started no workers on b"),
        ([a, HostOffer("a", 2, 2)], None, 3, "HETERO_NODE = a: two hosts of torchrun have this name"),
        ([a, b], None, 4, "the plan is for 4 ranks, and torchrun has started 3"),
    ):
        with pytest.raises(UserError) as error:
            attach(launcher("a", 3), Offered(*offers), file, ranks, None)
        assert said in str(error.value) and "\n" not in str(error.value), (said, str(error.value))


def test_who_starts_which_ranks(tmp_path: Path) -> None:
    """With a cluster file its order counts, not torchrun's; the launcher is the host of torchrun's rank 0."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    b, a = HostOffer("b", 0, 1), HostOffer("a", 1, 2)
    found = attach(launcher("b", 3), Offered(b, a), load_cluster(tmp_path / "cluster.yaml"), 3, None)
    assert found.seats == (Seat("a", 0), Seat("a", 1), Seat("b", 0))
    assert (found.here, found.elsewhere, found.agents.address) == (range(2, 3), {"a": [0, 1]}, "127.0.0.1")
    found = attach(launcher("b", 3), Offered(b, a), None, 3, "10.0.0.1")
    assert found.seats == (Seat("b", 0, 0), Seat("a", 0, 0), Seat("a", 1, 1))
    assert (found.here, found.elsewhere, found.agents.address) == (range(1), {"a": [1, 2]}, "10.0.0.1")
    found = attach(launcher("b", 2), Offered(HostOffer("b", 0, 2)), None, 2, None)
    assert found.seats == (Seat("rank0", 0, 0), Seat("rank1", 0, 1))
    assert (found.here, found.elsewhere, found.agents.address) == (range(2), {}, None)


def test_what_passes_through_the_store_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = JobStore()
    monkeypatch.setattr(torchrun, "OLD_SECONDS", 0.0)

    def records(rank: int, secret: str = "s") -> HostRecords:
        one = launcher(None, 3, rank, port=store.port, agent_store=True, secret=16 * secret.encode())
        return HostRecords(one)

    first, second, met = records(0), records(2), list[Meeting]()
    thread = threading.Thread(target=lambda: met.append(second.meet(HostOffer("b", 2, 1))))
    thread.start()
    first.offer(HostOffer("a", 0, 2))
    assert first.offers() == [HostOffer("a", 0, 2), HostOffer("b", 2, 1)]
    agents = TorchrunAgents(first)
    agents.open("127.0.0.1", store.port, "s")
    agents.close("too late")
    thread.join(10)
    assert met == [Meeting("127.0.0.1", store.port, "s", "")] and agents.lost() == {}
    second.fail("b", "it has no launcher")
    agents._looked = 0.0
    assert agents.lost() == {"b": 2} and agents.lost() == {}
    assert capsys.readouterr().err == "launcher: b cannot begin: it has no launcher\n"
    with pytest.raises(UserError, match="HETERO_JOB_SECRET"):
        records(2, "t").meet(HostOffer("b", 2, 1))

    monkeypatch.setattr(torchrun, "MEET_SECONDS", 0.1)
    monkeypatch.setattr(torchrun, "PATIENCE", 0.1)
    again = records(0)  # torchrun has started its workers again: nobody has offered anything to this one
    with pytest.raises(UserError, match="the same command on all hosts"):
        again.offers()
    with pytest.raises(UserError, match="the worker of rank 0, says nothing"):
        second.meet(HostOffer("b", 2, 1))
    TorchrunAgents(again).close("no plan")
    with pytest.raises(UserError, match="the launcher, on the host of rank 0, refused: no plan"):
        second.meet(HostOffer("b", 2, 1))


def test_the_address_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"

    def fails(*_: object, **__: object) -> None:
        raise OSError(2, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        own_address("no.such.host.invalid")


def worker(run: Callable[[], int]) -> int:
    """Pid of a child that runs it."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        code = run()
    finally:
        os._exit(code)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux")
def test_the_other_workers_end_as_their_agent_does() -> None:
    def agent() -> int:
        AgentEnd(7, 2).tell(5)
        return 5

    def dies() -> int:
        AgentEnd(8, 1)
        time.sleep(60)
        return 0

    waiting = [worker(lambda: await_agent(7, 3)) for _ in range(2)]
    time.sleep(0.05)
    os.kill(waiting[0], signal.SIGCONT)
    assert [code_of(pid) for pid in (worker(agent), *waiting)] == [5, 5, 5]
    killed, waits = worker(dies), worker(lambda: await_agent(8, 3))
    time.sleep(0.3)
    os.kill(waits, signal.SIGTERM)  # which the agent gets, too
    os.kill(killed, signal.SIGKILL)
    assert code_of(killed) == -9 and code_of(waits) == 3
