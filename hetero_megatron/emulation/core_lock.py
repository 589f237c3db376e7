"""Ranks that share a core compute one after the other.

Left to the kernel they interrupt each other every few milliseconds, the slower a chip the more often, and lose their
caches each time: the same work then costs a slow chip up to a tenth more CPU time than a fast one.
"""

from __future__ import annotations

import os
import select
import struct
from contextlib import suppress
from pathlib import Path

from hetero_megatron.testbed.process import status

PATIENCE = 0.5  # seconds between two looks whether the process that is waited for still runs
LOOKS = 120  # then it is not waited for any more: one that died before it wrote its number down is not on record


class CoreLock:
    """A lock between the processes that share a core. Who waits longest gets it next, as far as the kernel wakes them
    in order: a process that releases it and wants it again comes after those that wait.

    Args:
        path: of its FIFO; others lie beside it.
    """

    def __init__(self, path: Path) -> None:
        self._core, self._next = _Token(path), _Token(path.with_name(f"{path.name}-next"))

    def acquire(self) -> None:
        """Wait for it."""
        self._next.take()
        self._core.take()
        self._next.give()

    def release(self) -> None:
        self._core.give()


class _Token:
    """What one process has at a time: one byte in a FIFO, and beside it the process that took it out last.

    However long that one keeps it, the others wait, unless it has died or is frozen: who finds that goes on with a
    token of its own, and tokens of which there are too many are thrown away as they are given back. Where there is no
    /proc to ask, everybody counts as dead who keeps it for longer than ``PATIENCE``.
    """

    def __init__(self, path: Path) -> None:
        self._holder = os.open(path.with_name(f"{path.name}-holder"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mine = struct.pack("i", os.getpid())
        try:
            os.mkfifo(path, 0o600)
            first = True
        except FileExistsError:
            first = False
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        if first:
            self.give()

    def take(self) -> None:
        looks = 0
        while True:
            if self._poll.poll(1000 * PATIENCE):
                with suppress(BlockingIOError):  # another one was faster
                    if os.read(self._file, 1):
                        break
            elif not self._runs() or looks == LOOKS:
                break
            else:
                looks += 1
        os.pwrite(self._holder, self._mine, 0)

    def give(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 64)
        os.write(self._file, b".")

    def _runs(self) -> bool:
        """Whoever has it; False also before anybody had it."""
        pid = os.pread(self._holder, 4, 0)
        holder = status(struct.unpack("i", pid)[0]) if pid else None
        return holder is not None and holder.state not in "ZXTt"
