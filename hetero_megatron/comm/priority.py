"""Compute that the other ranks of a core do not interrupt.

Several emulated ranks share a core. Where the kernel lets them interrupt each other, caches are lost, and the slower a
chip, the more often that happens to it: the same work took slow ranks 4 to 11 % more CPU time than fast ones.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

COMPUTE, TRANSFERS = 1, 2  # real-time priorities: a message may interrupt compute, as the network card of a chip does
_TASKS = Path("/proc/self/task")


def may_hold_core() -> bool:
    """Whether this process may ask for a real-time priority (Linux, CAP_SYS_NICE)."""
    if not hasattr(os, "SCHED_FIFO"):
        return False
    try:
        with hold_core():
            return True
    except PermissionError:
        return False


@contextlib.contextmanager
def hold_core() -> Iterator[None]:
    """This thread keeps its core until it sleeps or waits; gloo's threads go before it.

    Raises:
        PermissionError: see :func:`may_hold_core`.
    """
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(COMPUTE))
    try:
        for task in _TASKS.iterdir():
            if int(task.name) != threading.get_native_id() and "gloo" in _name(task):
                os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(TRANSFERS))
        yield
    finally:
        os.sched_setscheduler(0, policy, parameter)


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it ended
        return ""
