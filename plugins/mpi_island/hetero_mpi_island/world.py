"""The MPI world of this process: start, the global rank of each of its processes, progress, and the end.

Importing this loads the MPI library without starting it; :meth:`World.open` starts it.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import mpi4py

if "mpi4py.MPI" not in sys.modules:  # else whoever imported it has decided
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
from hetero_megatron.environment.launcher import read_launcher
from hetero_megatron.errors import UserError
from mpi4py import MPI

START_UP_SECONDS = 60.0  # processes need long and unlike times to start
END_SECONDS = 5.0  # for the others to end too, after a failure
PROGRESS_SECONDS = 5e-4
LONGEST_PAUSE = 1e-3
LAUNCH = "python -m hetero_mpi_island.launch, under mpiexec"


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Ask ``done`` again and again, with pauses that grow; False: it was not within so many seconds."""
    deadline, pause = time.monotonic() + seconds, 0.0
    while not done():
        if time.monotonic() > deadline:
            return done()  # this process may have been stopped in between
        time.sleep(pause)
        pause = min(2 * pause + 2e-5, LONGEST_PAUSE)
    return True


def _restore_handlers() -> None:
    """Undo what MPICH's start does to signals: mpiexec sends SIGUSR1 to all others when a rank dies, and its handler
    can end them before they say who is missing; SIGHUP is the training loop's own."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGHUP):
            handler = signal.getsignal(number)  # as Python knows it: before MPICH
            if handler is not None:
                signal.signal(number, handler)


class World:
    """All processes of one ``mpiexec``.

    Attributes:
        comm: of all of them; ranks: the global rank (RANK) of each, in the order of MPI's ranks; rank: this one's.
        lock: held in every MPI call, where the library does not allow calls of several threads at once.
        failed: some transfer of this process has failed.
        longest: the longest time-out of any group so far, in seconds.
    """

    _open: ClassVar[World | None] = None
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, rank: int) -> None:
        self.rank, self.comm = rank, MPI.COMM_WORLD
        self.failed, self.longest = False, START_UP_SECONDS
        several = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if several else threading.RLock()
        self.ranks = self._learn()
        self.progress = Progress()

    @classmethod
    def open(cls) -> World:
        """The world of this process, started by the first call; every process of the world must make one.

        Raises:
            UserError: MPI has ended, or allows calls of one thread only; a process of this world does not come, or two
                have one RANK.
        """
        with cls._opening:
            if cls._open is None:
                if MPI.Is_finalized():
                    raise UserError("MPI has ended in this process and cannot start again", field="mpi_island")
                rank = read_launcher().rank
                if not MPI.Is_initialized():
                    MPI.Init_thread(MPI.THREAD_MULTIPLE)
                    _restore_handlers()
                if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
                    raise UserError(
                        "this MPI library allows calls of one thread only", field="mpi_island",
                        accepted="an MPI library with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE",
                    )  # fmt: skip
                cls._open = cls(rank)
                atexit.register(cls._open.leave)
            return cls._open

    @classmethod
    def close(cls) -> None:
        """End MPI, if it was started by :meth:`open`."""
        with cls._opening:
            if cls._open is not None:
                cls._open.leave()

    def _learn(self) -> tuple[int, ...]:
        """The global rank of every process of this world."""
        mine, every = bytearray(self.rank.to_bytes(4, "little")), bytearray(4 * self.comm.size)
        request = self.comm.Iallgather([mine, MPI.BYTE], [every, MPI.BYTE])
        if not wait_until(request.Test, START_UP_SECONDS):
            raise UserError(
                f"the {self.comm.size} processes of this MPI world did not all start within {START_UP_SECONDS:g} s",
                field="mpi_island", accepted="--platform mpi_host in every process of one mpiexec",
            )  # fmt: skip
        ranks = tuple(int.from_bytes(every[i : i + 4], "little") for i in range(0, len(every), 4))
        if len(set(ranks)) < len(ranks):
            raise UserError(
                "processes of one MPI world have the same rank", field="RANK of each", value=list(ranks),
                accepted=f"different ranks, as {LAUNCH}, sets them",
            )  # fmt: skip
        return ranks

    def leave(self) -> None:
        """End MPI together with the others; without them, after a failure: MPI_Finalize would wait for ever."""
        self.progress.stop()
        if MPI.Is_finalized():
            return
        seconds = END_SECONDS if self.failed or hasattr(sys, "last_value") else self.longest
        try:
            with self.lock:
                request = self.comm.Ibarrier()
            if wait_until(request.Test, seconds):
                MPI.Finalize()
        except MPI.Exception as error:
            print(f"mpi_island: MPI did not end cleanly: {error}", file=sys.stderr)


class Progress:
    """A thread that keeps transfers going, and their tensors alive, while their rank does something else.

    MPI moves long messages only inside of its calls. Without this a rank that waits for gloo would hold up the message
    of MPI that its peer waits for first.
    """

    def __init__(self) -> None:
        self._polls: list[Callable[[], bool]] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def watch(self, poll: Callable[[], bool]) -> None:
        """Call ``poll`` until it says True."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpi progress", daemon=True)
                self._thread.start()
            self._polls.append(poll)
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._polls or self._stopped)
                if self._stopped:
                    return
                polls = list(self._polls)
            finished = {id(poll) for poll in polls if poll()}
            with self._changed:
                self._polls = [poll for poll in self._polls if id(poll) not in finished]
            time.sleep(PROGRESS_SECONDS)
