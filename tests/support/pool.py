"""A pool of real rank processes (gloo) that stays alive between tests: starting torch per case is too slow.

A job is a module-level function ``job(comm, *args)``; every rank of the job runs it and its return values come
back in rank order. A failed or silent job ends the pool; the next job starts a fresh one.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.ports import free_port

RANKS = 8
PRELOAD = ["tests.support.preload"]
JOBS = 24  # of a pool with emulated devices, whose jobs leave their groups behind
COMM_TIMEOUT = float(os.environ.get("POOL_COMM_TIMEOUT", "60"))
JOB_TIMEOUT = float(os.environ.get("POOL_TIMEOUT", "240"))  # a busy machine takes longer to start torch 8 times


def _serve(rank: int, world: int, port: int, pipe: Connection, vendor: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from hetero_megatron.comm import start_comm
    from tests.support.vendors import platform

    torch.set_num_threads(1)
    # gloo's thread asks again and again for a lock that the thread it interrupted holds, to the end of its time slice
    # (4 ms where a message takes 0.1): threads of this kind do not interrupt each other.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    comm = start_comm(platform(vendor, rank), COMM_TIMEOUT)
    while True:
        job, args = pipe.recv()
        if job is None:  # every gloo group that a job makes has a thread that wakes up 100 times a second
            comm.destroy_groups()
            gc.collect()  # which is what ends the threads, where garbage holds a group
            continue
        try:
            pipe.send((True, job(comm, *args)))
        except BaseException as error:
            pipe.send((False, (error if isinstance(error, ValueError) else None, traceback.format_exc())))


class JobFailed(AssertionError):
    """Some rank raised; the message holds every rank's traceback."""


class Pool:
    """``vendors``: of each rank, see :mod:`tests.support.vendors`."""

    def __init__(self, vendors: Sequence[str] = ("cpu",) * RANKS) -> None:
        size, self.jobs = len(vendors), 0
        self.emulated = any(vendor.startswith("emulated") for vendor in vendors)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank, vendor in enumerate(vendors):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, there, vendor), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """``job(comm, *args)`` on every rank of the pool; a job for fewer ranks lets the others create groups only."""
        size = len(self.pipes)
        self.jobs += 1
        for pipe in self.pipes:
            pipe.send((job, args))
        results: dict[int, Any] = {}
        failures: dict[int, Any] = {}
        while len(results) + len(failures) < size:
            waiting = [p for r, p in enumerate(self.pipes) if r not in results and r not in failures]
            ready = wait(waiting, timeout=JOB_TIMEOUT)
            if not ready:
                self.close()
                raise JobFailed(f"no answer from ranks {[self.pipes.index(p) for p in waiting]}; failures: {failures}")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = pipe.recv()  # type: ignore[union-attr]
                (results if ok else failures)[rank] = value
        if failures:
            self.close()  # the others may be half-way through a collective
            user_errors = [error for error, _ in failures.values() if error is not None]
            if user_errors and len(failures) == size:
                raise user_errors[0]
            raise JobFailed("\n".join(f"--- rank {r}\n{text}" for r, (_, text) in sorted(failures.items())))
        for pipe in self.pipes if not self.emulated else ():
            pipe.send((None, ()))
        return [results[r] for r in range(size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for vendors in [key for key, pool in _POOLS.items() if pool is self]:
            del _POOLS[vendors]


_POOLS: dict[tuple[str, ...], Pool] = {}


def shared_pool(vendors: tuple[str, ...] = ("cpu",) * RANKS) -> Pool:
    """The pool of such ranks, started on first use; one with emulated devices again after ``JOBS`` jobs."""
    if vendors in _POOLS and _POOLS[vendors].emulated and _POOLS[vendors].jobs >= JOBS:
        _POOLS[vendors].close()
    if vendors not in _POOLS:
        _POOLS[vendors] = Pool(vendors)
        atexit.register(_POOLS[vendors].close)
    return _POOLS[vendors]


def close_special_pools() -> None:
    """All but the one that most tests use."""
    for vendors in [key for key in _POOLS if key != ("cpu",) * RANKS]:
        _POOLS[vendors].close()
