"""Edits of cluster files: nodes removed, or with another chip; the rest of the document is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

Choose = Callable[[str, str], str | None]  # (node, its chip) -> its new chip; None: remove the node


def without_nodes(document: Mapping[str, Any], lost: set[str]) -> dict[str, Any]:
    """The content of a cluster file without some nodes; the others keep their names, chips, links and rates."""
    return with_nodes(document, lambda node, chip: None if node in lost else chip)


def with_nodes(document: Mapping[str, Any], choose: Choose) -> dict[str, Any]:
    """The content of a cluster file after ``choose`` kept, changed or removed each node.

    A group whose nodes are unchanged stays one entry; otherwise every node becomes an entry of its own, and links of
    the group are repeated for each.
    """
    nodes: list[dict[str, Any]] = []
    names: dict[str, list[str]] = {}
    for group in document["nodes"]:
        count, name, chip = int(group.get("count", 1)), group["name"], group["chip"]
        members = [name] if count == 1 else [f"{name}-{i}" for i in range(count)]
        chips = {member: choose(member, chip) for member in members}
        if all(new_chip == chip for new_chip in chips.values()):
            nodes.append(dict(group))
            names[name] = [name]
            continue
        hosts = group.get("hosts") or [None] * count
        for (member, new_chip), host in zip(chips.items(), hosts, strict=True):
            if new_chip is not None:
                host_keys = {"hosts": [host]} if host is not None else {}
                nodes.append({**group, "name": member, "count": 1, "chip": new_chip, **host_keys})
        names[name] = [m for m, new_chip in chips.items() if new_chip is not None]
    used, counts = {node["chip"] for node in nodes}, {n["name"]: int(n.get("count", 1)) for n in nodes}
    out = {**document, "nodes": nodes}
    if document.get("chips"):
        out["chips"] = {name: chip for name, chip in document["chips"].items() if name in used}
    links = document.get("links") or {}
    if links.get("pairs"):
        pairs = [
            {**pair, "between": ends}
            for pair in links["pairs"]
            for ends in _ends(pair["between"], names, counts, one_way=False)
        ]
        out["links"] = {**links, "pairs": pairs}
    if document.get("rates"):
        out["rates"] = _rates(document["rates"], used, names, counts)
    return out


def _ends(
    between: list[str], names: Mapping[str, list[str]], counts: Mapping[str, int], one_way: bool
) -> list[list[str]]:
    """The pairs of new groups for a pair of groups; a group of one node has no link to itself."""
    pairs: dict[object, list[str]] = {}
    for a, b in product(names[between[0]], names[between[1]]):
        if a != b or counts[a] > 1:
            pairs.setdefault((a, b) if one_way else frozenset((a, b)), [a, b])
    return list(pairs.values())


def _rates(
    rates: Mapping[str, Any], used: set[str], names: Mapping[str, list[str]], counts: Mapping[str, int]
) -> dict[str, Any]:
    out = dict(rates)
    if "chips" in rates:
        out["chips"] = {name: by_dtype for name, by_dtype in rates["chips"].items() if name in used}
    links: list[dict[str, Any]] = []
    for link in rates.get("links", []):
        if "within" in link:
            links += [{**link, "within": name} for name in names[link["within"]]]
        elif "between" in link:
            links += [{**link, "between": ends} for ends in _ends(link["between"], names, counts, one_way=False)]
        else:
            group_names = [link["from"], link["to"]]
            links += [{**link, "from": a, "to": b} for a, b in _ends(group_names, names, counts, one_way=True)]
    if "links" in rates:
        out["links"] = links
    return out
