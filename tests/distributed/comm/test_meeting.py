"""Ranks meet in a store where strangers' records do not count, and which on one host nobody else reaches."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hetero_megatron.comm import Comm, CommError
from hetero_megatron.comm.connectivity import Address, Beacon
from hetero_megatron.comm.job_store import JobStore, Records, open_listener
from hetero_megatron.comm.rendezvous import RankRecord, Rendezvous
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from tests.support.pool import shared_pool

SECRET = b"of this job, and of no other"


def launched(store: JobStore, rank: int, world: int = 2, **more: Any) -> LauncherEnvironment:
    return LauncherEnvironment(rank, world, address=store.host, port=store.port, agent_store=True, **more)


def meet(launchers: Sequence[LauncherEnvironment], seconds: float = 8.0, positions: Sequence[int] = ()) -> list[Any]:
    """What comes of it for each: all members' numbers, or what it raised."""
    found: list[Any] = [None] * len(launchers)

    def join(index: int) -> None:
        launcher = launchers[index]
        rank = positions[index] if positions else launcher.rank
        try:
            _, members = Rendezvous(launcher, rank, timedelta(seconds=seconds)).join(Address("127.0.0.1", 1, f"{rank}"))
            found[index] = [(m.rank, m.launched_as, m.address and m.address.greeting) for m in members]
        except (UserError, CommError) as error:
            found[index] = error

    threads = [threading.Thread(target=join, args=(i,), daemon=True) for i in range(len(launchers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def write(store: JobStore, key: str, value: bytes | str, round_: int = 0) -> None:
    """What a stranger does who reaches the store."""
    client = dist.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=10))
    client.set(f"round/{round_}/{key}", value)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_all_ranks_meet_under_the_numbers_of_the_plan(secret: bytes) -> None:
    store = JobStore()
    ranks = [launched(store, rank, 3, secret=secret) for rank in range(3)]
    assert meet(ranks, positions=(2, 0, 1)) == [[(0, 1, "0"), (1, 2, "1"), (2, 0, "2")]] * 3
    again = [replace(rank, restarts=1) for rank in ranks]  # the same store serves the next round
    assert meet(again) == [[(r, r, str(r)) for r in range(3)]] * 3


def test_two_processes_with_one_rank_are_both_told() -> None:
    store = JobStore()
    for error in meet([launched(store, 1), launched(store, 1)]):
        assert isinstance(error, UserError) and error.field == "RANK"
        assert str(error).count(f"process {os.getpid()} on {socket.gethostname()}") == 2 and "both rank 1" in str(error)
    (first, second) = meet([launched(store, 0, restarts=1), launched(store, 1, restarts=1)], positions=(1, 1))
    assert any("of the cluster file" in str(error) for error in (first, second))


def test_ranks_that_expect_unlike_numbers_are_told() -> None:
    store = JobStore()
    for error in meet([launched(store, 0, 2), launched(store, 1, 3)]):
        assert isinstance(error, UserError) and error.field == "WORLD_SIZE"
        assert "of 2" in str(error) and "of 3" in str(error)
    assert "rank 1 never came" in str(meet([launched(store, 0, restarts=1)], seconds=2)[0])


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_from_a_second_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:  # listens, and never answers
        port = other.getsockname()[1]
        (error,) = meet([LauncherEnvironment(0, 2, address="127.0.0.1", port=port)])
    assert isinstance(error, UserError) and error.field == "MASTER_PORT", error
    assert "another program listens there" in str(error)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second = meet([LauncherEnvironment(0, 2, address="127.0.0.1", port=port)] * 2)
    assert isinstance(first, UserError) and isinstance(second, UserError), (first, second)
    assert "has rank 0 as well" in f"{first}{second}" and "both rank 0" in f"{first}{second}"


# Strangers


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def _forged(kind: str, mark: Path) -> bytes:
    member = RankRecord(1, 1, 2, "evil", 1, "token", Address("10.9.9.9", 22, ""))
    sealed = Records(None, b"another secret of a stranger", "round/0")  # type: ignore[arg-type]
    return {
        "pickle": pickle.dumps(_Bomb(mark)),
        "garbage": os.urandom(64),
        "nothing": b"",
        "wrong types": b'- {"rank": "1", "launched_as": [], "world_size": null}',
        "deep": b"- " + b"[" * 100_000,
        "without the secret": sealed.seal("hetero_megatron/member/1", member).encode().replace(b" ", b"", 0)[64:],
        "another secret": sealed.seal("hetero_megatron/member/1", member).encode(),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["pickle", "garbage", "nothing", "wrong types", "deep", "without the secret", "another secret"]
)
@pytest.mark.parametrize("secret", [b"", SECRET], ids=["no secret", "secret"])
def test_what_strangers_write_is_refused_by_name_and_never_run(secret: bytes, kind: str, tmp_path: Path) -> None:
    store, mark = JobStore(), tmp_path / "run"
    write(store, "hetero_megatron/member/1", _forged(kind, mark))
    (error,) = meet([launched(store, 0, secret=secret)])
    assert isinstance(error, UserError) and "member/1" in str(error) and "rendezvous store" in str(error)
    assert not mark.exists() and "another secret" not in str(error) and SECRET.decode() not in str(error)


def test_a_record_counts_only_where_it_was_written() -> None:
    """One of an earlier round, or of another rank, is no proof in this one."""
    store, member = JobStore(), RankRecord(1, 1, 2, "host", 1, "token", None)
    for scope, key in (("round/1", "hetero_megatron/member/1"), ("round/0", "hetero_megatron/member/0")):
        record = Records(None, SECRET, scope).seal(key, member)  # type: ignore[arg-type]
        write(store, "hetero_megatron/member/1", record)
        (error,) = meet([launched(store, 0, secret=SECRET)])
        assert isinstance(error, UserError) and "HETERO_JOB_SECRET" in str(error)
        store = JobStore()


def test_ranks_with_unlike_secrets_refuse() -> None:
    store = JobStore()
    found = meet([launched(store, 0, secret=SECRET), launched(store, 1)])
    assert any(isinstance(error, UserError) and "HETERO_JOB_SECRET" in str(error) for error in found), found


# Where a job of one host listens


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, as /proc writes them: of IPv4, and of IPv6."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                found.add(local.partition(":")[0])
    return found


LOOPBACK = "0100007F"


def _listening(comm: Comm) -> set[str]:
    comm.create_groups([tuple(range(8)), (0, 1), (2, 3, 4)])
    comm.group(tuple(range(8))).gather_objects(0, int)
    return listening(os.getpid())


def test_ranks_of_one_host_listen_to_nobody_else() -> None:
    """The store of rank 0, every rank's beacon, and gloo's connections."""
    found = shared_pool().run(_listening)
    assert found == [{LOOPBACK}] * 8


def test_stores_and_beacons_listen_on_the_loopback_interface() -> None:
    before = listening(os.getpid())
    stores = [JobStore(), Beacon("127.0.0.1")]
    for launcher in (
        LauncherEnvironment(0, 2, address="localhost"), LauncherEnvironment(0, 2, None, 2, socket.gethostname()),
        LauncherEnvironment(0, 2, address="127.0.0.1"),
    ):  # fmt: skip
        stores.append(open_listener(launcher))  # type: ignore[arg-type]
    assert listening(os.getpid()) - before <= {LOOPBACK} and len(stores) == 5
    with open_listener(LauncherEnvironment(0, 2, None, 1, "10.9.9.9")) as everywhere:  # other hosts are to reach it
        assert everywhere.getsockname()[0] in ("::", "0.0.0.0")
