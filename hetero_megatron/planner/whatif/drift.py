"""A cluster file for chips that no longer run at their calibrated rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

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
    measured = {name: dict(by_dtype) for name, by_dtype in ((document.get("rates") or {}).get("chips") or {}).items()}
    slow_names = {node: _name(groups[node], node) for node in factors}
    for node, factor in factors.items():
        chip = groups[node]
        chips[slow_names[node]] = _entry(dict(chips.get(chip) or {}), cluster, chip, factor)
        measured[slow_names[node]] = {dtype: as_document(slower(rates.chips[chip], factor))}
    changed = {**document, "chips": chips, "rates": {**(document.get("rates") or {}), "chips": measured}}
    return with_nodes(changed, lambda node, chip: slow_names.get(node, chip))


def _name(chip: str, node: str) -> str:
    ending = f" on {node}"
    return chip if chip.endswith(ending) else chip + ending


def _entry(entry: dict[str, Any], cluster: Cluster, chip: str, factor: float) -> dict[str, Any]:
    """The entry of a chip under ``chips:``, with the values that otherwise come from the catalogue, which lacks the new
    name."""
    described = cluster.chips[chip]
    entry.pop("rates", None)  # replaced by the scaled ones in the file's rates section
    entry.setdefault("memory", f"{described.memory} B")
    entry.setdefault("dtypes", list(described.dtypes))
    entry.setdefault("source", described.source)
    if described.flops:
        entry.setdefault("tflops", {dtype: flops / 1e12 for dtype, flops in described.flops.items()})
    for key in ("memory_bandwidth", "link_bandwidth", "host_bandwidth"):
        if getattr(described, key) is not None:
            entry.setdefault(key, f"{getattr(described, key)} B/s")
    if described.speed is not None:
        entry["emulate"] = {**(entry.get("emulate") or {}), "speed": described.speed / factor}
    return entry


class OnNode(Protocol):
    """A rank, of a cluster or of a job."""

    @property
    def node(self) -> str: ...


def worst_by_node(ranks: Sequence[OnNode], ratios: Mapping[int, float]) -> dict[str, float]:
    """Ratios by rank -> by node: that of its slowest chip."""
    by_node: dict[str, float] = {}
    for rank, ratio in ratios.items():
        node = ranks[rank].node
        by_node[node] = max(by_node.get(node, 0.0), ratio)
    return by_node


def slow_nodes_text(factors: Mapping[str, float]) -> str:
    """Text such as ``a takes 1.50 times as long, b takes 2.00 times as long``."""
    return ", ".join(f"{node} takes {factor:.2f} times as long" for node, factor in sorted(factors.items()))
