"""The network of a testbed: one network namespace per node, each with a veth pair to a bridge in another namespace.

The namespaces are anonymous: they are held by file descriptors of the launcher and by the ranks inside, so the kernel
removes them, with every link in them, when the last of these is gone.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.testbed import shaping
from hetero_megatron.testbed.process import inside, new_namespace

FIRST_ADDRESS = ipaddress.IPv4Address("10.77.0.1")
LAUNCHER_ADDRESS = "10.77.255.254"  # of the switch, where a launcher has its store beyond all nodes
PREFIX_BITS = 16
NETWORK = ipaddress.ip_network(f"{FIRST_ADDRESS}/{PREFIX_BITS}", strict=False)
# In every kernel, and fills a link both ways at once; a host's BBR left up to a third of a slow link unused.
CONGESTION_CONTROL = "reno"
BRIDGE = "bridge"


def address(node: int) -> str:
    return str(FIRST_ADDRESS + node)


def port(node: int) -> str:
    """Name of a node's port at the bridge."""
    return f"port{node}"


def tool(name: str, lines: Sequence[str], namespace: int) -> None:
    """Run ``ip -batch`` or ``tc -batch`` in a namespace.

    Raises:
        RuntimeError: it fails; the message is the tool's.
    """
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    with inside(namespace):  # a child begins in the namespace of the thread that starts it
        completed = subprocess.run([name, "-batch", "-"], input=text, capture_output=True, text=True, timeout=60)
    if completed.returncode:
        raise RuntimeError(f"{name}: {completed.stderr.strip()} (commands: {'; '.join(lines)})")


@dataclass
class VirtualNetwork:
    """The namespaces of ``count`` nodes with links between them.

    Args:
        rates: bytes/s by (source node, destination node); missing pairs are not shaped.

    Attributes:
        switch, nodes: file descriptors of the namespaces.
    """

    count: int
    rates: Mapping[tuple[int, int], float]
    switch: int = -1
    nodes: list[int] = field(default_factory=list)

    def open(self) -> None:
        """Make everything; on failure everything is removed.

        Raises:
            OSError, RuntimeError: the kernel or a tool refuses.
        """
        try:
            self.switch = new_namespace()
            tool("ip", [f"link add {BRIDGE} mtu {shaping.MTU} type bridge", f"link set {BRIDGE} up"], self.switch)
            for node in range(self.count):
                self.nodes.append(new_namespace())
                self._connect(node)
            for node in range(self.count):
                rates = {to: rate for (source, to), rate in self.rates.items() if source == node}
                tool("tc", shaping.shape_commands(rates, {n: address(n) for n in range(self.count)}), self.nodes[node])
        except BaseException:
            self.close()
            raise

    def open_to_launcher(self) -> str:
        """Give the switch an address, so that a socket made inside it is reached from all nodes; their links to it are
        not shaped. Returns the address.

        Raises:
            RuntimeError: the kernel refuses.
        """
        tool("ip", ["link set lo up", f"addr add {LAUNCHER_ADDRESS}/{PREFIX_BITS} dev {BRIDGE}"], self.switch)
        return LAUNCHER_ADDRESS

    def _connect(self, node: int) -> None:
        mtu, device = shaping.MTU, shaping.DEVICE
        fastest = max((rate for (source, _), rate in self.rates.items() if source == node), default=float("inf"))
        switch_path = self.path(self.switch)
        lines = [
            "link set lo up",
            f"link add {device} mtu {mtu} type veth peer name {port(node)} mtu {mtu} netns {switch_path}",
            f"link set {device} gso_max_size {shaping.packet_bytes(fastest)}",
            f"link set {device} addrgenmode none",  # no IPv6 address that gloo might take for the node's
            f"addr add {address(node)}/{PREFIX_BITS} dev {device}",
            f"link set {device} up",
            f"route replace {NETWORK} dev {device} src {address(node)} congctl {CONGESTION_CONTROL}",
        ]
        tool("ip", lines, self.nodes[node])
        tool("ip", [f"link set {port(node)} addrgenmode none master {BRIDGE} up"], self.switch)

    @staticmethod
    def path(fd: int) -> str:
        """A path to the namespace for other processes, valid while this one lives: nsenter --net=PATH."""
        return f"/proc/{os.getpid()}/fd/{fd}"

    def close(self) -> None:
        for fd in (*self.nodes, self.switch):
            if fd >= 0:
                os.close(fd)
        self.nodes, self.switch = [], -1

    def latency(self, a: int, b: int, repeats: int = 31) -> float:
        """Measured one-way seconds from ``a`` to ``b``: half the median round trip of one byte over TCP."""
        with inside(self.nodes[b]), socket.socket() as listener:
            listener.bind((address(b), 0))
            listener.listen()
            with inside(self.nodes[a]):
                near = socket.create_connection(listener.getsockname(), timeout=5)
            far = listener.accept()[0]
        seconds = []
        with near, far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(repeats):
                start = time.perf_counter()
                near.sendall(b"a")
                far.recv(1)
                far.sendall(b"b")
                near.recv(1)
                seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) / 2
