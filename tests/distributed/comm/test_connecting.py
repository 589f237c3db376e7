"""A rank that dies while ranks connect is noticed at once, not after five time-outs, as gloo's own waiting would."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier

import pytest

from hetero_megatron.comm import Comm, CommError
from hetero_megatron.comm.work import with_timeout, within
from tests.support.pool import PRELOAD
from tests.support.ports import free_port

RANKS, VICTIM = 3, 2
# Far more than the test waits; a group of devices is made where no thread can be left behind, and takes its time-out.
TIMEOUT = {"cpu": 600.0, "emulated": 15.0}


def _rank(rank: int, port: int, vendor: str, moment: str, pipe: Connection, started: Barrier) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from hetero_megatron.comm import start_comm
    from tests.support.vendors import platform

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == VICTIM and moment == "joining":
        Comm.join = die  # type: ignore[method-assign, assignment]
    def lost(error: Exception) -> None:
        pipe.send(str(error))
        os._exit(0)

    try:
        comm = start_comm(platform(vendor, rank), TIMEOUT[vendor], lost=lost)
        started.wait(100)  # on a busy machine a rank may still be in there when another one is through
        if rank == VICTIM:
            die()
        if moment == "a group":
            comm.create_groups([range(RANKS)])
        else:
            comm.background_group(range(RANKS))
        pipe.send(None)
    except CommError as error:
        pipe.send(str(error))
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vendor", "moment"),
    [("cpu", "joining"), ("cpu", "a group"), ("cpu", "a background group"), ("emulated", "a group")],
)
def test_a_rank_that_dies_while_others_connect_to_it_is_named(vendor: str, moment: str) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, started = free_port(), context.Barrier(RANKS)
    pipes, ranks = [], []
    for rank in range(RANKS):
        mine, theirs = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_rank, args=(rank, port, vendor, moment, theirs, started), daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        for rank, pipe in enumerate(pipes):
            if rank != VICTIM:
                assert wait([pipe], 120), f"rank {rank} still waits"
                said = pipe.recv()
                assert said is not None and f"rank {rank}," in said and "is gone" in said
                assert vendor == "cpu" or "has not ended" in said  # by the watch, not by gloo
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_a_call_has_its_time_and_no_more() -> None:
    assert with_timeout(60, lambda: 3) == 3
    with pytest.raises(KeyError):
        with_timeout(60, lambda: {}[1])
    never = threading.Event()
    with pytest.raises(RuntimeError, match="not connected after 0.01 s"):
        with_timeout(0.01, never.wait)
    assert within(0.01, never.wait) is None
    never.set()
