"""Keeps cores awake while others compute on them now and then.

A core of a virtual machine that has nothing to do is given to somebody else by its host. When it comes back its caches
are cold and its clock is low, the more so the longer it slept: the same work then takes 10 % more CPU time in one run
than in another, where ranks pause at other times. So a process of idle priority computes whenever nobody else does.

    python -m hetero_megatron.testbed.awake CORE
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import repeat
from pathlib import Path

from hetero_megatron.testbed.process import die_with_parent

POSSIBLE = hasattr(os, "SCHED_IDLE") and hasattr(os, "sched_setaffinity")


def keep_awake(cores: Iterable[int], environment: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    """A process for each core, until its parent has ended; none where the system has no idle priority."""
    parent = os.getpid()
    return [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(core)], env=environment, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        for core in sorted(set(cores) if POSSIBLE else ())
    ]  # fmt: skip


def main(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # where sessions share a core evenly, priorities count inside of them only
        Path("/proc/self/autogroup").write_text("19")
    deque(repeat(None), maxlen=0)  # for ever, in a loop that touches no memory


if __name__ == "__main__":
    main(int(sys.argv[1]))
