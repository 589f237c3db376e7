"""The cluster file: the chips of each node, and the links between them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hetero_megatron.cluster.catalogue import CHIP_DTYPES, CHIPS, Chip, CommunicatorMemory
from hetero_megatron.cluster.hosts import (
    HOST_KEYS,
    HostSettings,
    LaunchSettings,
    check_hosts_once,
    read_cluster_document,
    read_host_settings,
    read_launch_settings,
)
from hetero_megatron.cluster.rates_section import check_numbers, read_rates
from hetero_megatron.cluster.units import CHIP, NODE, VENDOR, check_printable, quantity
from hetero_megatron.errors import UserError
from hetero_megatron.utils.yaml_document import Entry, from_data

CLUSTER_KEYS = ("version", "nodes", "chips", "links", "rates", "launch")
NODE_KEYS = ("name", "count", "chip", "chips_per_node", *HOST_KEYS)
CHIP_KEYS = (
    "memory", "tflops", "memory_bandwidth", "link_bandwidth", "host_bandwidth", "dtypes", "emulate", "rates", "source",
    "cost_per_hour", "vendor", "communicators",
)  # fmt: skip
LINK_KEYS = ("bandwidth", "latency", "transport", "emulate")
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
    """``count`` equal nodes. ``settings``: how launchers reach them."""

    name: str
    count: int
    chip: str
    chips_per_node: int
    settings: HostSettings = field(default=HostSettings(), compare=False)

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
        found: list[Rank] = []
        for group in self.nodes:
            for index in range(group.count):
                node = group.node(index)
                for local in range(group.chips_per_node):
                    found.append(Rank(len(found), node, group.name, group.chip, local))
        object.__setattr__(self, "ranks", tuple(found))

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
        inside = first.node == second.node
        return self.link_inside(first.group) if inside else self.link_between(first.group, second.group)

    def link_inside(self, group: str) -> Link | None:
        """The link between chips of a node of a group; None if neither the file nor the catalogue has it."""
        known = self.chips[self.groups[group].chip].link_bandwidth
        return self.intra_node or (Link(known) if known is not None else None)

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
        one, two = self.chips[a.chip].vendor, self.chips[b.chip].vendor
        return one == two or len({chip.vendor for chip in self.chips.values() if chip.vendor}) == 1

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
            known = self.chips[group.chip].host_bandwidth
            assert known, "refused where the file is read"
            copies.append(1 / known / share / (group.chips_per_node if shared else 1))
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
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise UserError(
            "the cluster has no such chip",
            field="node",
            value=f"{node}, chip {local}",
            accepted=f"{shown} (HETERO_NODE names the node; without it, the host's name does)",
            where=self.file,
        )


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read and check a cluster file; UserError names the field, the value and file:line."""
    return _cluster(read_cluster_document(path))


def cluster_from_dict(data: Mapping[str, Any]) -> Cluster:
    """A cluster from Python data with the keys of a cluster file."""
    return _cluster(from_data(data))


def _cluster(document: Entry) -> Cluster:
    keys = document.mapping(CLUSTER_KEYS, required=("nodes",))
    if "version" in keys and keys["version"].integer() != 1:
        keys["version"].fail("unknown version of the cluster format", accepted="1")
    check_printable(document)
    described = dict((keys["chips"].any_mapping() if "chips" in keys else {}).items())
    for name, entry in described.items():
        CHIP.check(name, entry.path, entry.where)
    chips = {name: _chip(name, entry) for name, entry in described.items()}
    nodes = _nodes(keys["nodes"], chips)
    used = {group.chip for group in nodes}
    for name, entry in described.items():
        if name not in used:
            entry.fail("no node has this chip", accepted="chips of the nodes: " + ", ".join(sorted(used)))
    links = keys["links"].mapping(("intra_node", "inter_node", "pairs")) if "links" in keys else {}
    cluster = Cluster(
        nodes=nodes,
        chips={name: chips.get(name) or CHIPS[name] for name in sorted(used)},
        intra_node=_link(links["intra_node"]) if "intra_node" in links else None,
        inter_node=_link(links["inter_node"]) if "inter_node" in links else None,
        pairs=_pairs(links["pairs"], nodes) if "pairs" in links else {},
        rates=read_rates(keys["rates"]) if "rates" in keys else {},
        file=document.file,
        launch=read_launch_settings(keys["launch"]) if "launch" in keys else LaunchSettings(),
    )
    _check_hosts(links, cluster)
    return cluster


def _check_hosts(links: Mapping[str, Entry], cluster: Cluster) -> None:
    """Refuse links through host memory for chips without a known host bandwidth."""
    pairs = links["pairs"].items() if "pairs" in links else []
    rows = {frozenset(e.value for e in row.any_mapping()["between"].items()): row for row in pairs}
    for i, a in enumerate(cluster.nodes):
        if cluster.intra_node is not None:
            _check_host(links["intra_node"], cluster.intra_node, a, a, cluster)
        for b in cluster.nodes[i if a.count > 1 else i + 1 :]:
            if (link := cluster.link_between(a.name, b.name)) is not None:
                row = rows.get(frozenset((a.name, b.name))) or links["inter_node"]
                _check_host(row, link, a, b, cluster)


def _check_host(entry: Entry, link: Link, a: NodeGroup, b: NodeGroup, cluster: Cluster) -> None:
    chip = next((g.chip for g in (a, b) if cluster.chips[g.chip].host_bandwidth is None), None)
    way = cluster.transport(link, a, b)
    if chip is None or way == DIRECT:
        return
    keys = entry.any_mapping()
    unlike = f"{a.name} and {b.name} are of unlike vendors, whose messages go through hosts, and "
    keys.get("transport", entry).fail(
        f"{'' if 'transport' in keys else unlike}nothing says how fast chip {chip} reaches its host",
        accepted=f"chips: {{{chip}: {{host_bandwidth: 25 GB/s}}}} beside it, or transport: direct",
    )


def _nodes(entry: Entry, chips: Mapping[str, Chip]) -> tuple[NodeGroup, ...]:
    items = entry.items()
    if not items:
        entry.fail("a cluster has at least one node")
    groups: list[NodeGroup] = []
    hosts: dict[str, Entry] = {}
    for item in items:
        keys = item.mapping(NODE_KEYS, required=("name", "chip"))
        name, chip = NODE.read(keys["name"]), keys["chip"].text()
        if any(group.name == name for group in groups):
            keys["name"].fail("two node groups have this name", accepted="a name of its own for each group")
        if chip not in chips and chip not in CHIPS:
            known = [*chips, *CHIPS]
            near = difflib.get_close_matches(chip, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            keys["chip"].fail(
                f"unknown chip{hint}", accepted="a chip under chips:, or one of " + ", ".join(CHIPS)
            )
        count = keys["count"].integer(1) if "count" in keys else 1
        per_node = keys["chips_per_node"].integer(1) if "chips_per_node" in keys else 1
        if count * per_node + sum(g.count * g.chips_per_node for g in groups) > MAX_RANKS:
            item.fail("too many chips", accepted=f"at most {MAX_RANKS:,} in all")
        groups.append(NodeGroup(name, count, chip, per_node, read_host_settings(keys, count)))
        if "hosts" in keys:
            hosts[name] = keys["hosts"]
        clash = _same_node_name(groups)
        if clash:
            keys["name"].fail(f"two nodes would be called {clash!r}", accepted="another name for this group")
    check_hosts_once(hosts, {group.name: group.settings for group in groups})
    return tuple(groups)


def _same_node_name(groups: list[NodeGroup]) -> str:
    """A node name that the newest group shares with an earlier one; empty if there is none."""
    new = groups[-1]
    for other in groups[:-1]:
        for one, several in ((new, other), (other, new)):
            stem, dash, index = one.name.rpartition("-")
            numbered = dash and stem == several.name and index.isdecimal() and str(int(index)) == index
            if one.count == 1 and several.count > 1 and numbered and int(index) < several.count:
                return one.name
    return ""


def _chip(name: str, entry: Entry) -> Chip:
    """A chip of the file; missing values come from the catalogue's chip of the same name."""
    keys = entry.mapping(CHIP_KEYS, required=() if name in CHIPS else ("memory",))
    chip = CHIPS.get(name) or Chip(name, 0, source="cluster file")
    changes: dict[str, Any] = {"vendor": VENDOR.read(keys["vendor"])} if "vendor" in keys else {}
    if "memory" in keys:
        changes["memory"] = int(quantity(keys["memory"], "bytes"))
    for key in ("memory_bandwidth", "link_bandwidth", "host_bandwidth"):
        if key in keys:
            changes[key] = quantity(keys[key], "bytes/s")
    if "dtypes" in keys:
        changes["dtypes"] = tuple(item.choice(CHIP_DTYPES) for item in keys["dtypes"].items())
        changes["flops"] = {dtype: flops for dtype, flops in chip.flops.items() if dtype in changes["dtypes"]}
    if "tflops" in keys:
        changes["flops"] = _flops(keys["tflops"], changes.get("dtypes", chip.dtypes))
    if {"tflops", "memory_bandwidth", "source"} & set(keys):
        changes["source"] = keys["source"].text() if "source" in keys else "cluster file"
    if "cost_per_hour" in keys:
        changes["cost_per_hour"] = keys["cost_per_hour"].number(1e-9, 1e9)
    if "rates" in keys:
        keys["rates"].any_mapping()
        check_numbers(keys["rates"])
        changes["rates"] = keys["rates"].plain()
    if "communicators" in keys:
        known = keys["communicators"].mapping(("each", "peer"), required=("each", "peer"))
        each, peer = (int(quantity(known[key], "bytes")) for key in ("each", "peer"))
        changes["communicators"] = CommunicatorMemory(each, peer, "cluster file")
    if "emulate" in keys:
        emulate = keys["emulate"].mapping(("speed", "memory"))
        if "speed" in emulate:
            changes["speed"] = emulate["speed"].number(1e-6, 1000)  # 1.0 = one core of this machine
            changes.setdefault("vendor", "")  # all emulated chips are this machine's cores
        if "memory" in emulate:
            changes["memory_budget"] = int(quantity(emulate["memory"], "bytes"))
            if changes["memory_budget"] > changes.get("memory", chip.memory):
                emulate["memory"].fail("more than the chip has", accepted="at most the chip's memory")
    return replace(chip, **changes)


def _flops(entry: Entry, dtypes: tuple[str, ...]) -> dict[str, float]:
    """Dense TFLOP/s by dtype, as plain numbers; FLOP/s in the result. ``dtypes``: those that the chip has."""
    result = {}
    for dtype, value in entry.mapping(CHIP_DTYPES).items():
        result[dtype] = value.number(1e-9, 1e9) * 1e12
        if dtype not in dtypes:
            value.fail(f"the chip does not compute in {dtype}", accepted="one of " + ", ".join(dtypes))
    return result


def _link(entry: Entry, keys: dict[str, Entry] | None = None) -> Link:
    keys = keys or entry.mapping(LINK_KEYS, required=("bandwidth",))
    emulate = keys["emulate"].mapping(("bandwidth", "latency")) if "emulate" in keys else {}
    if "emulate" in keys and not emulate:
        keys["emulate"].fail("nothing to emulate", accepted="{bandwidth: 25 MB/s}, {latency: 5 ms} or both")
    return Link(
        bandwidth=quantity(keys["bandwidth"], "bytes/s"),
        latency=quantity(keys["latency"], "seconds") if "latency" in keys else 0.0,
        emulated=quantity(emulate["bandwidth"], "bytes/s") if "bandwidth" in emulate else None,
        emulated_latency=quantity(emulate["latency"], "seconds") if "latency" in emulate else None,
        transport=keys["transport"].choice(TRANSPORTS) if "transport" in keys else None,
    )


def _pairs(entry: Entry, nodes: tuple[NodeGroup, ...]) -> dict[frozenset[str], Link]:
    names = [group.name for group in nodes]
    result: dict[frozenset[str], Link] = {}
    for item in entry.items():
        keys = item.mapping(("between", *LINK_KEYS), required=("between", "bandwidth"))
        between = keys["between"].items()
        if len(between) != 2:
            keys["between"].fail("a link is between two node groups", accepted="[name, name]")
        pair = frozenset(end.choice(names) for end in between)
        if len(pair) == 1 and nodes[names.index(next(iter(pair)))].count == 1:
            keys["between"].fail("this group has one node, and so no link to itself", accepted="two groups")
        if pair in result:
            keys["between"].fail("this pair is written twice", accepted="each pair once, in either order")
        result[pair] = _link(item, keys)
    return result
