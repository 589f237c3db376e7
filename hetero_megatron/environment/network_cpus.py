"""CPUs near the network card: of its NUMA node, from which memory and card are reached without another processor.

Linux tells which they are in ``/sys/class/net/INTERFACE/device/local_cpulist``. Interfaces without a card (loopback,
veth, bridges) have no such file, and a card that is as near to all CPUs lists them all: then nothing is pinned.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

INTERFACES = Path("/sys/class/net")


def network_cpus(interface: str, interfaces: Path = INTERFACES) -> frozenset[int]:
    """The CPUs near an interface's card, of those that this process may use; empty: all are, or nobody knows."""
    if not interface or not hasattr(os, "sched_getaffinity"):
        return frozenset()
    try:
        text = (interfaces / interface / "device" / "local_cpulist").read_text(encoding="ascii")
    except (OSError, ValueError):
        return frozenset()
    allowed = os.sched_getaffinity(0)
    near = cpu_list(text) & allowed
    return frozenset() if near == allowed else near


def cpu_list(text: str) -> frozenset[int]:
    """Of the kernel's form, ``0-3,8,10-11``; what is not of this form is no CPU."""
    ranges = (re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip()) for part in text.split(","))
    return frozenset(cpu for m in ranges if m for cpu in range(int(m[1]), int(m[2] or m[1]) + 1))


@contextmanager
def on_cpus(cpus: Collection[int]) -> Iterator[None]:
    """The calling thread runs on these, and threads that it starts in here stay there; none: where it is."""
    if not cpus:
        yield
        return
    earlier = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, earlier)
