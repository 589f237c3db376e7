"""Ranks that share a core compute one after the other.

Left to the kernel they interrupt each other every few milliseconds, the slower a chip the more often, and lose their
caches each time: the same work then costs a slow chip up to a tenth more CPU time than a fast one.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 0.5  # seconds; longer than a segment computes


class Turns:
    """The turn of one core: one byte in a FIFO, which a rank takes before it computes and puts back before it sleeps.

    A rank that was killed or frozen in its turn holds nobody up for longer than ``PATIENCE``: who waited that long goes
    on with a turn of its own, and turns of which there are too many are thrown away as they are given back. So nobody
    has to put in the first one either.

    Args:
        path: of the FIFO, which the first one makes.
    """

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def take(self) -> None:
        """Wait for the turn."""
        end = time.monotonic() + PATIENCE
        while (left := end - time.monotonic()) > 0:
            with suppress(BlockingIOError):  # another rank was faster
                if os.read(self._file, 1):
                    return
            self._poll.poll(1000 * left)

    def give(self) -> None:
        """Let another rank have it."""
        with suppress(BlockingIOError):
            os.read(self._file, 64)
        os.write(self._file, b".")
