"""Keeps cores awake while they have nothing to do.

A core of a virtual machine that has nothing to do is given to somebody else by its host. When it comes back its caches
are cold and its clock is low, the more so the longer it slept: the same work then takes 10 % more CPU time in one run
than in another, where ranks pause at other times. So the kernel is told that nobody can wait for a core to wake up, and
lets idle ones look for work themselves. (A process of idle priority on each core does that too, but as one of another
session it delayed every fourth message by the 2 to 4 ms of its time slice.)
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

LATENCY = Path("/dev/cpu_dma_latency")  # the kernel's "PM QoS": a request holds as long as its file is open


def cores_sleep() -> str:
    """Why cores cannot be kept awake here; empty if they can."""
    try:
        os.close(os.open(LATENCY, os.O_WRONLY))  # which asks for nothing so far
    except OSError as error:  # also what a container refuses to root
        return f"{LATENCY}: {error.strerror}"
    return ""


def keep_awake() -> int:
    """All cores, until this file descriptor is closed, or the process that has it has ended, in whatever way."""
    file = os.open(LATENCY, os.O_WRONLY | os.O_CLOEXEC)
    os.write(file, struct.pack("i", 0))  # microseconds
    return file
