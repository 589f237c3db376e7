"""Cluster files read: keys, defaults and refusals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero_megatron.cluster.catalogue import CHIP_DTYPES, CHIPS, Chip, CommunicatorMemory
from hetero_megatron.cluster.cluster import DIRECT, MAX_RANKS, TRANSPORTS, Cluster, Link, NodeGroup
from hetero_megatron.cluster.hosts import (
    HOST_KEYS,
    LaunchSettings,
    check_hosts_once,
    read_cluster_document,
    read_host_settings,
    read_launch_settings,
)
from hetero_megatron.cluster.rates_section import check_numbers, read_rates
from hetero_megatron.cluster.units import CHIP, NODE, VENDOR, check_printable, quantity
from hetero_megatron.utils.text import did_you_mean
from hetero_megatron.utils.yaml_document import Entry, from_data

CLUSTER_KEYS = ("version", "nodes", "chips", "links", "rates", "launch")
NODE_KEYS = ("name", "count", "chip", "chips_per_node", "host_memory", *HOST_KEYS)
CHIP_KEYS = (
    "memory", "tflops", "memory_bandwidth", "link_bandwidth", "host_bandwidth", "dtypes", "emulate", "rates", "source",
    "cost_per_hour", "vendor", "communicators",
)  # fmt: skip
LINK_KEYS = ("bandwidth", "latency", "transport", "emulate")


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
            accepted = "a chip under chips:, or one of " + ", ".join(CHIPS)
            keys["chip"].fail(f"unknown chip{did_you_mean(chip, [*chips, *CHIPS])}", accepted=accepted)
        count = keys["count"].integer(1) if "count" in keys else 1
        per_node = keys["chips_per_node"].integer(1) if "chips_per_node" in keys else 1
        if count * per_node + sum(g.count * g.chips_per_node for g in groups) > MAX_RANKS:
            item.fail("too many chips", accepted=f"at most {MAX_RANKS:,} in all")
        host_memory = int(quantity(keys["host_memory"], "bytes")) if "host_memory" in keys else 0
        groups.append(NodeGroup(name, count, chip, per_node, read_host_settings(keys, count), host_memory))
        if "hosts" in keys:
            hosts[name] = keys["hosts"]
        clash = _same_node_name(groups)
        if clash:
            keys["name"].fail(f"two nodes would be called {clash!r}", accepted="another name for this group")
    check_hosts_once(hosts, {group.name: group.settings for group in groups})
    return tuple(groups)


def _same_node_name(groups: list[NodeGroup]) -> str:
    """A node name that the newest group shares with an earlier one; empty if there is none."""
    newest = groups[-1]
    for earlier in groups[:-1]:
        for single, several in ((newest, earlier), (earlier, newest)):
            stem, dash, index = single.name.rpartition("-")
            numbered = dash and stem == several.name and index.isdecimal() and str(int(index)) == index
            if single.count == 1 and several.count > 1 and numbered and int(index) < several.count:
                return single.name
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
        communicators = keys["communicators"].mapping(("each", "peer"), required=("each", "peer"))
        each_bytes, peer_bytes = (int(quantity(communicators[key], "bytes")) for key in ("each", "peer"))
        changes["communicators"] = CommunicatorMemory(each_bytes, peer_bytes, "cluster file")
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
    flops = {}
    for dtype, value in entry.mapping(CHIP_DTYPES).items():
        flops[dtype] = value.number(1e-9, 1e9) * 1e12
        if dtype not in dtypes:
            value.fail(f"the chip does not compute in {dtype}", accepted="one of " + ", ".join(dtypes))
    return flops


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
    links: dict[frozenset[str], Link] = {}
    for item in entry.items():
        keys = item.mapping(("between", *LINK_KEYS), required=("between", "bandwidth"))
        ends = keys["between"].items()
        if len(ends) != 2:
            keys["between"].fail("a link is between two node groups", accepted="[name, name]")
        pair = frozenset(end.choice(names) for end in ends)
        if len(pair) == 1 and nodes[names.index(next(iter(pair)))].count == 1:
            keys["between"].fail("this group has one node, and so no link to itself", accepted="two groups")
        if pair in links:
            keys["between"].fail("this pair is written twice", accepted="each pair once, in either order")
        links[pair] = _link(item, keys)
    return links
