"""The ``tc`` commands that shape a node's link, as text.

One htb class per destination, selected by a u32 filter on its address, below one class for the node, as fast as its
fastest link. Only tbf, htb and u32 are required of the kernel. A packet is at most one MTU (``GSO_BYTES``) and the
burst is small, because bursts are not shaped: at 25 MB/s a message of 64 KiB should take 2.62 ms; measured 2.49 ms with
burst 4k, 2.15 ms with tbf of 16k, 2.10 ms with packets of 64 KiB. Rates are of payload; headers of TCP/IP and Ethernet
are added here.
"""

from __future__ import annotations

from collections.abc import Mapping

MTU = 9000
GSO_BYTES = 9000
BIG_PACKETS = 150e6  # bytes/s; above it packets of 64 KiB: small ones cost more CPU time than such a rate leaves
HEADERS = 52  # IPv4 + TCP with time stamps, inside the MTU
ETHERNET = 14
BURST = 4096  # bytes
BURST_SECONDS = 100e-6  # a timer is up to this late; what it misses has to fit into the burst
DEVICE = "eth0"


def packet_bytes(rate: float) -> int:
    """The largest packet of a node with this rate."""
    return GSO_BYTES if rate <= BIG_PACKETS else 65536


def wire_rate(payload: float) -> int:
    """Bits/s on the wire for ``payload`` bytes/s."""
    return max(1000, round(payload * 8 * (MTU + ETHERNET) / (MTU - HEADERS)))


def class_id(node: int) -> str:
    """The class of traffic to a node."""
    return f"1:{node + 16:x}"


def _class(verb: str, parent: str, name: str, rate: float) -> str:
    burst = max(BURST, round(rate * BURST_SECONDS))
    shape = f"rate {wire_rate(rate)} burst {burst} cburst {burst} quantum {MTU + ETHERNET}"
    return f"class {verb} dev {DEVICE} parent {parent} classid {name} htb {shape}"


def shape_commands(rates: Mapping[int, float], addresses: Mapping[int, str]) -> list[str]:
    """Lines for ``tc -batch`` in the node's namespace.

    Args:
        rates: bytes/s of payload by destination node; other nodes are not shaped.
        addresses: IPv4 address by node.
    """
    if not rates:
        return []
    lines = [f"qdisc add dev {DEVICE} root handle 1: htb", _class("add", "1:", "1:1", max(rates.values()))]
    for node, rate in sorted(rates.items()):
        lines.append(_class("add", "1:1", class_id(node), rate))
        match = f"u32 match ip dst {addresses[node]}/32 flowid {class_id(node)}"
        lines.append(f"filter add dev {DEVICE} parent 1: protocol ip prio 1 {match}")
    return lines


def change_command(node: int, rate: float) -> str:
    """A line for ``tc -batch`` that changes the rate of the link to ``node`` while in use."""
    return _class("change", "1:1", class_id(node), rate)
