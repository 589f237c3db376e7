"""Clusters: chips of nodes and links between them (read by :mod:`~hetero_megatron.cluster.cluster_file`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hetero_megatron.cluster.catalogue import Chip
from hetero_megatron.cluster.hosts import (
    HostSettings,
    LaunchSettings,
)
from hetero_megatron.errors import UserError

DIRECT, BRIDGE, STAGED = TRANSPORTS = ("direct", "bridge", "host-staged")
# Most bytes that the bridge copies and sends at a time: smaller ones cost gloo more (benchmarks/bench_bridge.py).
BRIDGE_CHUNK = 4 << 20
BRIDGE_STRIPES = 4  # gloo groups that it sends over at a time, between hosts
# Bytes/s of one of them: one connection and one thread, which reach 15 to 25 Gb/s (pytorch issue 9389).
BRIDGE_STRIPE_RATE = 2e9
BRIDGE_RATE = BRIDGE_STRIPES * BRIDGE_STRIPE_RATE  # of all of them between two ranks
BRIDGE_SMALLEST_CHUNK = 512 << 10  # of a message that is no smaller
MAX_RANKS = 1 << 17  # of a cluster or a plan


@dataclass(frozen=True)
class NodeGroup:
    """``count`` equal nodes. ``settings``: how launchers reach them; ``host_memory``: bytes of a node that jobs may use
    beside their chips', 0: not known."""

    name: str
    count: int
    chip: str
    chips_per_node: int
    settings: HostSettings = field(default=HostSettings(), compare=False)
    host_memory: int = 0

    @property
    def host_memory_per_chip(self) -> float:
        """Bytes of a node's memory for each of its chips; inf: not known, and taken to be enough."""
        return self.host_memory / self.chips_per_node if self.host_memory else math.inf

    def node(self, index: int) -> str:
        """Name of a node: the group's name if it has a single node, else ``name-index``."""
        return self.name if self.count == 1 else f"{self.name}-{index}"


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Attributes:
        bandwidth, latency: bytes/s, seconds.
        emulated, emulated_latency: the values that the testbed emulates, if different.
        transport: one of ``TRANSPORTS``; None: the bridge between chips of unlike vendors, else direct
            (:meth:`Cluster.transport`).
    """

    bandwidth: float
    latency: float = 0.0
    emulated: float | None = None
    emulated_latency: float | None = None
    transport: str | None = None


@dataclass(frozen=True)
class Rank:
    """The chip of a rank: its node, node group, chip type, and index inside the node."""

    rank: int
    node: str
    group: str
    chip: str
    local: int


@dataclass(frozen=True)
class Cluster:
    """A cluster.

    Attributes:
        pairs: links by unordered pair of node groups.
        launch: settings of launchers for all hosts.
        ranks: in file order of the nodes.
    """

    nodes: tuple[NodeGroup, ...]
    chips: Mapping[str, Chip]
    intra_node: Link | None = None
    inter_node: Link | None = None
    pairs: Mapping[frozenset[str], Link] = field(default_factory=dict)
    rates: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    launch: LaunchSettings = field(default=LaunchSettings(), compare=False)
    ranks: tuple[Rank, ...] = field(init=False)

    def __post_init__(self) -> None:
        ranks: list[Rank] = []
        for group in self.nodes:
            for index in range(group.count):
                node = group.node(index)
                for local in range(group.chips_per_node):
                    ranks.append(Rank(len(ranks), node, group.name, group.chip, local))
        object.__setattr__(self, "ranks", tuple(ranks))

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def chip_of(self, rank: int) -> Chip:
        return self.chips[self.ranks[rank].chip]

    def emulated_vendor(self, rank: int | None) -> str:
        """The vendor of a rank's emulated chip, which selects the platform of the rank."""
        return "" if rank is None or self.chip_of(rank).speed is None else self.chip_of(rank).vendor

    def link(self, a: int, b: int) -> Link | None:
        """The link from rank ``a`` to ``b``; None if neither the file nor the catalogue has it."""
        first, second = self.ranks[a], self.ranks[b]
        same_node = first.node == second.node
        return self.link_inside(first.group) if same_node else self.link_between(first.group, second.group)

    def link_inside(self, group: str) -> Link | None:
        """The link between chips of a node of a group; None if neither the file nor the catalogue has it."""
        bandwidth = self.chips[self.groups[group].chip].link_bandwidth
        return self.intra_node or (Link(bandwidth) if bandwidth is not None else None)

    def link_between(self, group: str, other: str) -> Link | None:
        """The link between nodes of two groups, or of one; None if the file does not have it."""
        return self.pairs.get(frozenset((group, other)), self.inter_node)

    @property
    def forces_bridge(self) -> bool:
        """Whether a link of the file has ``transport: bridge``; a run then uses the bridge between all islands."""
        return any(link is not None and link.transport == BRIDGE for link in (*self.pairs.values(), self.inter_node))

    @cached_property
    def groups(self) -> Mapping[str, NodeGroup]:
        """The node groups by name."""
        return {group.name: group for group in self.nodes}

    def group_of(self, rank: int) -> NodeGroup:
        return self.groups[self.ranks[rank].group]

    def library_of(self, rank: int) -> int:
        """Index of the communication library that connects a rank's chip with others; chips of unlike vendors with a
        direct link share one."""
        return self._libraries[self.ranks[rank].group]

    @cached_property
    def _libraries(self) -> dict[str, int]:
        """By name of a node group, the index of its library."""
        library = list(range(len(self.nodes)))
        for i, a in enumerate(self.nodes):
            for j, b in enumerate(self.nodes[:i]):
                link = self.link_between(a.name, b.name)
                if self.one_library(a, b) or (link is not None and link.transport == DIRECT):
                    library = [library[j] if x == library[i] else x for x in library]
        return dict(zip(self.groups, library, strict=True))

    def transport(self, link: Link, a: NodeGroup, b: NodeGroup) -> str:
        """Transport of messages between chips of ``a`` and ``b``: ``direct``: from device to device by a common
        library; ``bridge``: through host memory in chunks, as our runtime does without one; ``host-staged``: copied to
        host memory whole, sent, and copied to the device."""
        if link.transport is not None:
            return link.transport
        return DIRECT if self.one_library(a, b) else BRIDGE

    def one_library(self, a: NodeGroup, b: NodeGroup) -> bool:
        """Whether chips of both groups have the same vendor; unknown vendors count as the only known one."""
        vendor_a, vendor_b = self.chips[a.chip].vendor, self.chips[b.chip].vendor
        return vendor_a == vendor_b or len({chip.vendor for chip in self.chips.values() if chip.vendor}) == 1

    def seconds_per_byte(
        self, link: Link, a: NodeGroup, b: NodeGroup, shared: bool, rate: float | None = None, share: float = 1.0
    ) -> float:
        """Seconds per byte of messages from ``a`` to ``b``.

        Args:
            shared: all chips of a node send at the same time, each over its own host link.
            rate: bytes/s of the link itself; None: its bandwidth.
            share: achieved share of host links' bandwidth.
        """
        way, wire = self.transport(link, a, b), 1 / (rate or link.bandwidth)
        if way == DIRECT:
            return wire
        if way == BRIDGE and link.emulated is None:  # what several connections and threads of the host reach
            wire = max(wire, 1 / BRIDGE_RATE / (a.chips_per_node if shared else 1))
        copies = []
        for group in (a, b):
            host_bandwidth = self.chips[group.chip].host_bandwidth
            assert host_bandwidth, "refused where the file is read"
            copies.append(1 / host_bandwidth / share / (group.chips_per_node if shared else 1))
        return max(wire, *copies) if way == BRIDGE else wire + sum(copies)

    def first_chunk_seconds(self, link: Link, a: NodeGroup, b: NodeGroup) -> float:
        """Latency that copying the first chunk of a message adds on a bridge."""
        if self.transport(link, a, b) != BRIDGE:
            return 0.0
        rates = [self.chips[group.chip].host_bandwidth for group in (a, b)]
        return sum(BRIDGE_SMALLEST_CHUNK / rate for rate in rates if rate)

    def find(self, node: str, local: int) -> Rank:
        """The rank of a chip by node name and local index; UserError if there is none."""
        for rank in self.ranks:
            if rank.node == node and rank.local == local:
                return rank
        names = list(dict.fromkeys(r.node for r in self.ranks))
        names_text = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise UserError(
            "the cluster has no such chip",
            field="node",
            value=f"{node}, chip {local}",
            accepted=f"{names_text} (HETERO_NODE names the node; without it, the host's name does)",
            where=self.file,
        )


