"""A cluster file for chips that no longer run at their calibrated rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.edit import with_nodes
from hetero_megatron.cluster.rates_section import TABLES
from hetero_megatron.predictor.cost.rates import ChipRates, load_rates, scaled_rows
from hetero_megatron.predictor.cost.rates_document import as_document

PER_SECOND = ("gemm_flops", "attention_flops", "bytes_per_second")


def slower(rates: ChipRates, factor: float) -> ChipRates:
    """The rates of a chip that takes ``factor`` times as long for everything."""
    changes: dict[str, Any] = {}
    for name in (f.name for f in fields(rates)):
        value = getattr(rates, name)
        if name in PER_SECOND:
            changes[name] = value / factor
        elif name.endswith(("_seconds", "_beta")):  # per call, per byte
            changes[name] = value * factor
        elif name in TABLES:
            changes[name] = scaled_rows(name, value, factor)
    return replace(rates, **changes)


def with_slow_nodes(
    document: Mapping[str, Any], cluster: Cluster, factors: Mapping[str, float], dtype: str
) -> dict[str, Any]:
    """The content of a cluster file in which the chips of some nodes are slower than it says. Each such node gets its
    own chip type, ``<chip> on <node>``, with scaled rates; on the testbed it is emulated at that speed.

    Args:
        cluster: that of ``document``.
        factors: by node, measured over expected seconds of its slowest chip.
    """
    rates = load_rates(cluster, dtype)
    groups = {rank.node: rank.chip for rank in cluster.ranks}
    chips = dict(document.get("chips") or {})
    measured = {name: dict(by) for name, by in ((document.get("rates") or {}).get("chips") or {}).items()}
    new = {node: _name(groups[node], node) for node in factors}
    for node, factor in factors.items():
        old = groups[node]
        chips[new[node]] = _entry(dict(chips.get(old) or {}), cluster, old, factor)
        measured[new[node]] = {dtype: as_document(slower(rates.chips[old], factor))}
    changed = {**document, "chips": chips, "rates": {**(document.get("rates") or {}), "chips": measured}}
    return with_nodes(changed, lambda node, chip: new.get(node, chip))


def _name(chip: str, node: str) -> str:
    ending = f" on {node}"
    return chip if chip.endswith(ending) else chip + ending


def _entry(entry: dict[str, Any], cluster: Cluster, chip: str, factor: float) -> dict[str, Any]:
    """The entry of a chip under ``chips:``, with the values that otherwise come from the catalogue, which lacks the new
    name."""
    known = cluster.chips[chip]
    entry.pop("rates", None)  # replaced by the scaled ones in the file's rates section
    entry.setdefault("memory", f"{known.memory} B")
    entry.setdefault("dtypes", list(known.dtypes))
    entry.setdefault("source", known.source)
    if known.flops:
        entry.setdefault("tflops", {dtype: flops / 1e12 for dtype, flops in known.flops.items()})
    for key in ("memory_bandwidth", "link_bandwidth", "host_bandwidth"):
        if getattr(known, key) is not None:
            entry.setdefault(key, f"{getattr(known, key)} B/s")
    if known.speed is not None:
        entry["emulate"] = {**(entry.get("emulate") or {}), "speed": known.speed / factor}
    return entry


def worst_by_node(cluster: Cluster, ratios: Mapping[int, float]) -> dict[str, float]:
    """Ratios by rank -> by node: that of its slowest chip."""
    found: dict[str, float] = {}
    for rank, ratio in ratios.items():
        node = cluster.ranks[rank].node
        found[node] = max(found.get(node, 0.0), ratio)
    return found
