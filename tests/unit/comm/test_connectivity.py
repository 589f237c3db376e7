"""What became of a rank that does not answer, by one connection; which nodes a launcher drops for it."""

from __future__ import annotations

import errno
import itertools
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_megatron.comm import CommError
from hetero_megatron.comm.connectivity import (
    ANSWERS,
    GONE,
    HANGS,
    UNREACHABLE,
    Address,
    Beacon,
    Connectivity,
    dial,
    explain,
    own_address,
)
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Supervisor
from hetero_megatron.monitoring.stragglers import (
    Diagnosis,
    cut_pairs,
    diagnoses_at,
    leave_diagnosis,
    read_diagnoses,
    to_drop,
)
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT
from tests.unit.training.test_drift import Scripted


def _listen(pipe: Connection) -> None:
    pipe.send(Beacon("127.0.0.1").address)
    pipe.recv()


def test_one_connection_tells_what_became_of_a_process() -> None:
    here, there = mp.Pipe()
    peer = mp.get_context("fork").Process(target=_listen, args=(there,), daemon=True)
    peer.start()
    try:
        address = here.recv()
        assert dial(address) == ANSWERS
        assert peer.pid is not None
        os.kill(peer.pid, signal.SIGSTOP)
        threads = [Path(f"/proc/{peer.pid}/task/{t}/stat") for t in os.listdir(f"/proc/{peer.pid}/task")]
        while not all(") T " in thread.read_text() for thread in threads):
            time.sleep(0.01)
        assert dial(address, 0.5) == HANGS
        os.kill(peer.pid, signal.SIGCONT)
        assert dial(address) == ANSWERS
        peer.kill()
        peer.join()
        assert dial(address) == GONE
    finally:
        peer.kill()
        peer.join()
    with socket.create_server((address.host, address.port), reuse_port=False):  # another program, that says nothing
        assert dial(address, 0.5) == HANGS
    stranger = Beacon("127.0.0.1")
    assert dial(Address("127.0.0.1", stranger.address.port, "somebody else"), 2.0) == GONE
    stranger.close()


def test_a_host_that_lets_nothing_through_cannot_be_reached() -> None:
    with socket.socket() as full:  # the kernel drops the first packet of whoever comes when the queue is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            assert dial(Address("127.0.0.1", port, "x"), 0.5) == UNREACHABLE


def test_ranks_that_were_waited_for_are_dialled_and_one_of_every_host() -> None:
    beacons = [Beacon("127.0.0.1") for _ in range(3)]
    gone = Beacon("127.0.0.1")
    gone.close()
    reach = Connectivity(0, [beacons[0].address, beacons[1].address, None, gone.address], beacons[0], lambda: {1})
    assert reach.look([3]) == {1: UNREACHABLE, 3: GONE}  # the emulated link to rank 1 is cut
    assert Connectivity().look([1, 2]) == {}
    known = {r: Address(f"10.0.0.{r // 100}", 1, "") for r in range(300)}
    chosen = Connectivity._choose([7, 205], known)
    assert chosen[:2] == [7, 205] and {0, 100, 200} <= set(chosen) and len(chosen) == 64
    for beacon in beacons:
        beacon.close()


def test_the_clause_says_who_and_leaves_out_those_who_matter_not() -> None:
    assert explain([1], {}) == "the peer died, hangs, or runs another plan"
    assert explain([1], {1: GONE, 2: ANSWERS}) == "rank 1 is gone"
    assert explain([1], {1: ANSWERS, 2: UNREACHABLE}) == "rank 2 cannot be reached; rank 1 answers"
    assert explain([1, 2], {1: HANGS, 2: ANSWERS}) == "rank 1 hangs; rank 2 answers"
    assert "waits for somebody else" in explain([1], {1: ANSWERS})


def test_what_this_host_lacks_tells_nothing_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_files(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", no_more_files)
    assert dial(Address("127.0.0.1", 1, "x"), 0.5) is None
    assert Connectivity(0, [None, Address("127.0.0.1", 1, "x")]).look([1]) == {}


def test_own_address() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


# What the launcher makes of it


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9),
    st.sets(st.frozensets(st.sampled_from("abcdef"), min_size=2, max_size=2), max_size=9),
)
def test_as_few_ranks_are_dropped_as_any_choice_would(nodes: list[str], pairs: set[frozenset[str]]) -> None:
    pairs = {pair for pair in pairs if pair <= set(nodes)}
    dropped = to_drop(pairs, nodes)
    order = list(dict.fromkeys(nodes))

    def ranks(chosen: Sequence[str] | set[str]) -> int:
        return sum(node in chosen for node in nodes)

    covers = [
        set(chosen) for n in range(len(order) + 1) for chosen in itertools.combinations(order, n)
        if all(pair & set(chosen) for pair in pairs)
    ]  # fmt: skip
    best = min(ranks(cover) for cover in covers)
    assert all(pair & dropped for pair in pairs) and ranks(dropped) == best


def test_of_two_the_later_goes_and_many_are_dropped_one_by_one() -> None:
    assert to_drop([frozenset("ab")], "abc") == {"b"}
    assert to_drop([frozenset("ab")], "abbc") == {"a"}  # fewer ranks
    names = [f"n{i:02d}" for i in range(40)]
    halves = [frozenset((a, b)) for a in names[:20] for b in names[20:]]  # a switch between two racks
    assert to_drop(halves, names) in (set(names[:20]), set(names[20:]))


def test_diagnoses_are_left_and_read(tmp_path: Path) -> None:
    error = CommError("text", 2, (0, 1), 6.0, "the optimizer step", {0: UNREACHABLE, 1: GONE})
    leave_diagnosis(error, None)  # no launcher
    leave_diagnosis(CommError("no rank"), str(tmp_path / "d"))
    leave_diagnosis(error, str(tmp_path / "d"))
    (tmp_path / "d" / "rank-7.json").write_text("{half")
    (found,) = read_diagnoses(tmp_path / "d")
    assert found == Diagnosis(2, (0, 1), 6.0, "the optimizer step", (0,))
    assert cut_pairs([found], ["a", "a", "b"]) == {frozenset("ab")}
    assert cut_pairs([found], ["a", "a", "b"], {"a"}) == set()
    assert cut_pairs([found], ["b", "a", "b"]) == set()  # on one node
    assert read_diagnoses(tmp_path / "nothing") == []


@pytest.mark.parametrize("policy", ["replan", "restart"])
def test_the_launcher_drops_what_is_cut_off(policy: str, tmp_path: Path) -> None:
    """All ranks ended by themselves, so nothing but what they say tells that a node cannot go on."""
    said: list[str] = []
    started: list[Any] = []
    seats = tuple(Seat(name, 0) for name in "abc")

    def launch(setup: Setup, words: Sequence[str], number: int) -> Scripted:
        started.append((setup.plan.name, [s.node for s in setup.seats]))
        if number == 0:
            for rank, unreachable in ((0, {2: UNREACHABLE, 1: GONE}), (1, {2: UNREACHABLE}), (2, {0: UNREACHABLE})):
                error = CommError("", rank, (1,), 6.0, "a step", unreachable)
                leave_diagnosis(error, str(diagnoses_at(tmp_path, 0)))
            return Scripted({0: 3, 1: 3, 2: 3})
        return Scripted(dict.fromkeys(range(len(setup.seats)), 0))

    (tmp_path / "diagnoses-round-1").mkdir()
    (tmp_path / "diagnoses-round-1" / "rank-0.json").write_text("of an earlier job")
    planner = lambda seats, cluster: Path("fallback")  # noqa: E731
    setup = Setup(Path("plan"), seats)
    supervisor = Supervisor(setup, [], policy, planner, 2, 1.0, tmp_path, said.append, launch=launch)
    assert supervisor.run() == 0
    assert started[1] == (("fallback", ["a", "b"]) if policy == "replan" else ("plan", ["a", "b", "c"]))
    assert "launcher: a and c cannot reach each other" in said and "launcher: b and c cannot reach each other" in said
    assert any(text.startswith("launcher: rank 2, in a step, waited 6.0 s for rank 1") for text in said)
    assert not list((tmp_path / "diagnoses-round-1").glob("*"))


# Joining


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named() -> None:
    code = "import os, sys; from datetime import timedelta; from hetero_megatron.comm import rendezvous; "
    code += "rendezvous.START_UP = timedelta(seconds=3); from hetero_megatron.cli.pretrain import main; "
    code += "os._exit(main(sys.argv[1:]))"
    flags = "--model tiny --mock-data --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3"
    flags += " --tensor-model-parallel-size 2 --distributed-timeout-minutes 0.05"
    store = JobStore()  # as a launcher has it
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    alone["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [sys.executable, "-c", code, *flags.split()]
    done = subprocess.run(command, cwd=ROOT, env={**ENVIRONMENT, **alone}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "rank 0, joining the job, waited" in done.stderr and "rank 1 never came" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_of_many_peers_all_are_asked_in_turn_whether_they_are_gone() -> None:
    beacon = Beacon("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = Address("127.0.0.1", probe.getsockname()[1], "")
    addresses = [beacon.address] * 100
    addresses[97] = closed
    peers = [rank for rank in range(100) if rank != 3]
    found = [Connectivity(3, addresses).gone(peers, turn) for turn in range(4)]
    assert [97] in found and all(gone in ([], [97]) for gone in found)
    beacon.close()
