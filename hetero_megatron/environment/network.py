"""This host's network interfaces: which one leads to the other hosts, and which CPUs are near its card.

Linux tells the latter in ``/sys/class/net/INTERFACE/device/local_cpulist``: those of the card's NUMA node, from which
memory and card are reached without another processor. Interfaces without a card (loopback, veth, bridges) have no such
file, and a card that is as near to all CPUs lists them all: then nothing is pinned.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from hetero_megatron.environment.launcher import is_loopback

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
INTERFACES = Path("/sys/class/net")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def interface_of(address: str) -> str | None:
    """The name of this host's interface with an IPv4 address; None: none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def address_towards(host: str) -> str:
    """This host's address on the way to another. OSError: there is no way."""
    kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def gloo_towards(host: str) -> dict[str, str]:
    """The variable by which gloo listens where the ranks of other hosts reach this one, unless it is set."""
    if GLOO_INTERFACE in os.environ or is_loopback(host):
        return {}
    with suppress(OSError):
        if name := interface_of(address_towards(host)):
            return {GLOO_INTERFACE: name}
    return {}


def near_card(host: str) -> Callable[[], AbstractContextManager[None]]:
    """Context in which threads start that move data to other hosts: on the CPUs near the card on the way to ``host``,
    or that gloo's variable names."""
    variables = {**gloo_towards(host), **os.environ}
    return partial(on_cpus, network_cpus(variables.get(GLOO_INTERFACE, "").split(",")[0]))


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
