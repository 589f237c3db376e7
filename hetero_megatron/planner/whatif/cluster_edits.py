"""Other clusters: without some nodes, with more of them; and a cluster as the data of a cluster file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.cluster import CHIPS, Chip, Cluster, Link, NodeGroup
from hetero_megatron.errors import UserError
from hetero_megatron.planner.template.placement import shrink

DEFAULT_PER_NODE = 8


def without(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The cluster without these nodes (``fast-1``) or whole node groups (``fast``).

    Raises:
        UserError: no such node, or nothing is left.
    """
    nodes = {rank.node for rank in cluster.ranks}
    groups = {group.name for group in cluster.nodes}
    gone: set[str] = set()
    for name in names:
        if name in nodes:
            gone.add(name)
        elif name in groups:
            gone |= {rank.node for rank in cluster.ranks if rank.group == name}
        else:
            near = difflib.get_close_matches(name, sorted(nodes | groups), n=1)
            raise UserError(
                "the cluster has no such node" + (f" (did you mean {near[0]}?)" if near else ""), field="--without",
                value=name, accepted=", ".join(sorted(nodes)[:8]) + (", …" if len(nodes) > 8 else ""),
                where=cluster.file,
            )  # fmt: skip
    keep = [rank.rank for rank in cluster.ranks if rank.node not in gone]
    if not keep:
        raise UserError(
            "no chip is left", field="--without", value=",".join(names), accepted="at least one node that stays",
            where=cluster.file,
        )  # fmt: skip
    return shrink(cluster, keep)


def with_more(cluster: Cluster, text: str) -> Cluster:
    """The cluster with more nodes: ``2xNAME`` or ``2xNAME-node``, where NAME is a node group, a chip of the cluster or
    the beginning of a chip of the catalogue (then nodes of 8 chips).

    Raises:
        UserError: not of that form, or an unknown name.
    """
    match = re.fullmatch(r"(\d+)x(.+)", text)
    if not match or int(match[1]) < 1:
        raise UserError("cannot be read", field="--add", value=text, accepted="COUNTxNAME, e.g. 2xH100-node")
    count, name = int(match[1]), match[2].removesuffix("-node")
    for same in (
        lambda group: match[2] in (group.name, group.chip),  # a name may end in -node
        lambda group: name in (group.name, group.chip),
        lambda group: group.chip.lower().startswith(name.lower()),
    ):
        for i, group in enumerate(cluster.nodes):
            if same(group):
                nodes = (*cluster.nodes[:i], replace(group, count=group.count + count), *cluster.nodes[i + 1 :])
                return replace(cluster, nodes=nodes)
    chips = [chip for chip in CHIPS if chip.lower().startswith(name.lower())]
    if not chips:
        known = [g.name for g in cluster.nodes] + list(CHIPS)
        raise UserError(
            "no such node group or chip", field="--add", value=text, accepted=", ".join(known), where=cluster.file
        )
    new = NodeGroup(_fresh(name.lower(), cluster), count, chips[0], DEFAULT_PER_NODE)
    return replace(cluster, nodes=(*cluster.nodes, new), chips={**cluster.chips, chips[0]: CHIPS[chips[0]]})


def _fresh(name: str, cluster: Cluster) -> str:
    taken = {group.name for group in cluster.nodes}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in taken)


def document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as the data of a cluster file; ``cluster_from_dict`` gives it back."""
    data: dict[str, Any] = {
        "version": 1,
        "nodes": [
            {"name": g.name, "count": g.count, "chip": g.chip, "chips_per_node": g.chips_per_node}
            for g in cluster.nodes
        ],
    }
    chips = {name: _chip(chip) for name, chip in cluster.chips.items() if CHIPS.get(name) != chip}
    if chips:
        data["chips"] = chips
    links: dict[str, Any] = {}
    for key in ("intra_node", "inter_node"):
        link = getattr(cluster, key)
        if link is not None:
            links[key] = _link(link)
    if cluster.pairs:
        links["pairs"] = [
            {"between": sorted(pair) if len(pair) == 2 else [*pair, *pair], **_link(link)}
            for pair, link in sorted(cluster.pairs.items(), key=lambda item: sorted(item[0]))
        ]
    if links:
        data["links"] = links
    if cluster.rates:
        data["rates"] = dict(cluster.rates)
    return data


def _chip(chip: Chip) -> dict[str, Any]:
    data: dict[str, Any] = {"memory": f"{chip.memory} B", "dtypes": list(chip.dtypes)}
    if chip.flops:
        data["tflops"] = {dtype: flops / 1e12 for dtype, flops in chip.flops.items()}
    for key in ("memory_bandwidth", "link_bandwidth", "host_bandwidth"):
        if getattr(chip, key) is not None:
            data[key] = f"{getattr(chip, key):.17g} B/s"
    if chip.source:
        data["source"] = chip.source
    emulate: dict[str, Any] = {}
    if chip.speed is not None:
        emulate["speed"] = chip.speed
    if chip.memory_budget is not None:
        emulate["memory"] = f"{chip.memory_budget} B"
    if emulate:
        data["emulate"] = emulate
    if chip.rates:
        data["rates"] = dict(chip.rates)
    if chip.vendor:
        data["vendor"] = chip.vendor
    if chip.cost_per_hour is not None:
        data["cost_per_hour"] = chip.cost_per_hour
    return data


def _link(link: Link) -> dict[str, Any]:
    data: dict[str, Any] = {"bandwidth": f"{link.bandwidth:.17g} B/s", "latency": f"{link.latency:.17g} s"}
    if link.transport is not None:
        data["transport"] = link.transport
    emulate = {}
    if link.emulated is not None:
        emulate["bandwidth"] = f"{link.emulated:.17g} B/s"
    if link.emulated_latency is not None:
        emulate["latency"] = f"{link.emulated_latency:.17g} s"
    return {**data, "emulate": emulate} if emulate else data
