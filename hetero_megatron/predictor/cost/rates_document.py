"""Rates as a cluster file has them, the other way round of :mod:`.rates`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hetero_megatron.cluster.rates_section import TABLES
from hetero_megatron.predictor.cost.rates import COLLECTIVES, NUMBERS, ChipRates, LayerRow, LinkRates


def as_document(rates: ChipRates) -> dict[str, Any]:
    """Rates as the mapping below ``<dtype>:`` in a cluster file; empty tables are left out."""
    out: dict[str, Any] = {k: getattr(rates, k) for k in NUMBERS}
    if rates.spread:
        out["spread"] = dict(rates.spread)
    for key in TABLES:
        rows = getattr(rates, key)
        if rows:
            out[key] = [list(asdict(r).values()) if isinstance(r, LayerRow) else list(r) for r in rows]
    return out


def link_document(source: str, target: str, link: LinkRates) -> dict[str, Any]:
    """A link's entry in ``rates.links``; what was not measured is left out."""
    out: dict[str, Any] = {"within": source} if link.same_node else {"from": source, "to": target}
    out |= {"alpha": link.alpha, "beta": link.beta}
    if link.message_seconds is not None:
        out["message_seconds"] = link.message_seconds
    pairs = {name: getattr(link, name) for name in COLLECTIVES}
    if any(pairs.values()):
        out["collectives"] = {n: dict(zip(("alpha", "beta"), pair)) for n, pair in pairs.items() if pair}
    if link.spread is not None:
        out["spread"] = link.spread
    return out
