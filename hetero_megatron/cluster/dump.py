"""A cluster as the data of a cluster file."""

from __future__ import annotations

from typing import Any

from hetero_megatron.cluster.catalogue import CHIPS, Chip
from hetero_megatron.cluster.cluster import Cluster, Link
from hetero_megatron.cluster.hosts import host_keys, launch_keys


def document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as the data of a cluster file; ``cluster_from_dict`` gives it back."""
    data: dict[str, Any] = {
        "version": 1,
        "nodes": [
            {"name": g.name, "count": g.count, "chip": g.chip, "chips_per_node": g.chips_per_node}
            | ({"host_memory": f"{g.host_memory} B"} if g.host_memory else {})
            | host_keys(g.settings)
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
    if launch := launch_keys(cluster.launch):
        data["launch"] = launch
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
    if chip.communicators is not None:
        data["communicators"] = {key: f"{getattr(chip.communicators, key)} B" for key in ("each", "peer")}
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
