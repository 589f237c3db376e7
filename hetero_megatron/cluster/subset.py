"""Parts of a cluster: some of its ranks or nodes, ranks that stand for others of their kind (a pair for every kind of
link, groups of neighbours); and clusters with additional nodes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.cluster.cluster import Cluster, Link, NodeGroup
from hetero_megatron.cluster.hosts import HostSettings
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import did_you_mean

DEFAULT_PER_NODE = 8


def shrink(cluster: Cluster, keep: Sequence[int]) -> Cluster:
    """The cluster with only the ranks ``keep``, in the same order. Nodes keep their names; chips of a node that loses
    some are renumbered."""
    chips_left: dict[str, int] = defaultdict(int)
    for rank in keep:
        chips_left[cluster.ranks[rank].node] += 1
    groups: list[NodeGroup] = []
    origin: dict[str, str] = {}
    for group in cluster.nodes:
        run: list[tuple[int, int]] = []  # (node index, chips)
        runs = []
        for index in range(group.count):
            chips = chips_left.get(group.node(index), 0)
            if run and (chips != run[0][1] or run[-1][0] != index - 1):
                runs.append(run)
                run = []
            if chips:
                run.append((index, chips))
        if run:
            runs.append(run)
        for run in runs:
            if len(run) == group.count:
                groups.append(replace(group, chips_per_node=run[0][1]))
                origin[group.name] = group.name
                continue
            # Consecutive numbers from 0 keep the group's name, the others stand alone under their node's name.
            if run[0][0] == 0 and len(run) > 1:
                groups.append(replace(
                    group, count=len(run), chips_per_node=run[0][1], settings=_settings(group, run)
                ))  # fmt: skip
                origin[group.name] = group.name
            else:
                for index, chips in run:
                    settings = _settings(group, [(index, chips)])
                    groups.append(replace(
                        group, name=group.node(index), count=1, chips_per_node=chips, settings=settings
                    ))  # fmt: skip
                    origin[group.node(index)] = group.name
    pairs: dict[frozenset[str], Link] = {}
    for a in groups if cluster.pairs else ():
        for b in groups:
            link = cluster.pairs.get(frozenset((origin[a.name], origin[b.name])))
            if link is not None and (a.name != b.name or origin[a.name] == a.name):
                pairs[frozenset((a.name, b.name))] = link
    kept_chips = {name: chip for name, chip in cluster.chips.items() if any(g.chip == name for g in groups)}
    rates = dict(cluster.rates)
    if rates.get("chips"):
        rates["chips"] = {name: value for name, value in rates["chips"].items() if name in kept_chips}
    if rates.get("links"):
        rates["links"] = _link_rows(rates["links"], origin)
    return Cluster(
        tuple(groups), kept_chips, cluster.intra_node, cluster.inter_node, pairs, rates, cluster.file, cluster.launch
    )


def _settings(group: NodeGroup, run: Sequence[tuple[int, int]]) -> HostSettings:
    """Of some of the group's nodes; ``run``: (index of a node, its chips)."""
    hosts = group.settings.hosts
    return replace(group.settings, hosts=tuple(hosts[index] for index, _ in run) if hosts else ())


def _link_rows(rows: Sequence[Mapping[str, object]], origin: Mapping[str, str]) -> list[dict[str, object]]:
    """Measured links under the names of the remaining groups."""
    renamed: list[dict[str, object]] = []
    for row in rows:
        if "within" in row:
            renamed += [{**row, "within": name} for name, old in origin.items() if old == row["within"]]
            continue
        ends: Any = row["between"] if "between" in row else (row["from"], row["to"])
        first, second = str(ends[0]), str(ends[1])
        pairs = [(a, b) for a, x in origin.items() if x == first for b, y in origin.items() if y == second]
        if first == second and "between" in row:
            pairs = [(a, b) for a, b in pairs if a <= b]
        for a, b in pairs:
            renamed.append({**row, **({"between": [a, b]} if "between" in row else {"from": a, "to": b})})
    return renamed


def of_type(cluster: Cluster, chip: str) -> Cluster:
    """Only the chips of one type."""
    keep = [rank.rank for rank in cluster.ranks if rank.chip == chip]
    return cluster if len(keep) == cluster.world_size else shrink(cluster, keep)


def without(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The cluster without these nodes (``fast-1``) or whole node groups (``fast``).

    Raises:
        UserError: no such node, or nothing is left.
    """
    nodes = {rank.node for rank in cluster.ranks}
    groups = {group.name for group in cluster.nodes}
    removed: set[str] = set()
    for name in names:
        if name in nodes:
            removed.add(name)
        elif name in groups:
            removed |= {rank.node for rank in cluster.ranks if rank.group == name}
        else:
            raise UserError(
                f"the cluster has no such node{did_you_mean(name, sorted(nodes | groups))}", field="--without",
                value=name, accepted=", ".join(sorted(nodes)[:8]) + (", …" if len(nodes) > 8 else ""),
                where=cluster.file,
            )  # fmt: skip
    keep = [rank.rank for rank in cluster.ranks if rank.node not in removed]
    if not keep:
        raise UserError(
            "no chip is left", field="--without", value=",".join(names), accepted="at least one node that stays",
            where=cluster.file,
        )  # fmt: skip
    return shrink(cluster, keep)


def with_more(cluster: Cluster, text: str) -> Cluster:
    """The cluster with more nodes: ``2xNAME`` or ``2xNAME-node``, where NAME is a node group, a chip of the cluster or
    a prefix of a chip of the catalogue (then nodes of 8 chips).

    Raises:
        UserError: malformed, or an unknown name.
    """
    match = re.fullmatch(r"(\d+)x(.+)", text)
    if not match or int(match[1]) < 1:
        raise UserError("cannot be read", field="--add", value=text, accepted="COUNTxNAME, e.g. 2xH100-node")
    count, name = int(match[1]), match[2].removesuffix("-node")
    for matches in (
        lambda group: match[2] in (group.name, group.chip),  # a name may end in -node
        lambda group: name in (group.name, group.chip),
        lambda group: group.chip.lower().startswith(name.lower()),
    ):
        for i, group in enumerate(cluster.nodes):
            if matches(group):
                settings = replace(group.settings, hosts=())  # nobody said where the new ones are
                larger = replace(group, count=group.count + count, settings=settings)
                nodes = (*cluster.nodes[:i], larger, *cluster.nodes[i + 1 :])
                return replace(cluster, nodes=nodes)
    chips = [chip for chip in CHIPS if chip.lower().startswith(name.lower())]
    if not chips:
        names = [g.name for g in cluster.nodes] + list(CHIPS)
        raise UserError(
            "no such node group or chip", field="--add", value=text, accepted=", ".join(names), where=cluster.file
        )
    new = NodeGroup(fresh_name(name.lower(), cluster), count, chips[0], DEFAULT_PER_NODE)
    return replace(cluster, nodes=(*cluster.nodes, new), chips={**cluster.chips, chips[0]: CHIPS[chips[0]]})


def fresh_name(name: str, cluster: Cluster) -> str:
    names = {group.name for group in cluster.nodes}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in names)


def link_pairs(cluster: Cluster) -> list[tuple[int, int]]:
    """One ordered pair of ranks for each kind of link: inside a node of each group, between two nodes of a group, and
    between each two groups, both ways."""
    chosen: dict[tuple[str, str, bool], tuple[int, int]] = {}
    heads: dict[str, dict[str, list[int]]] = {}  # ranks by group and node
    for rank in cluster.ranks:
        heads.setdefault(rank.group, {}).setdefault(rank.node, []).append(rank.rank)
    for group, nodes in heads.items():
        first = next(iter(nodes.values()))
        if len(first) > 1:
            chosen[group, group, True] = (first[0], first[1])
        other_nodes = list(nodes.values())[1:]
        if other_nodes:
            chosen[group, group, False] = (first[0], other_nodes[0][0])
        for other_group, nodes_there in heads.items():
            if other_group != group:
                chosen[group, other_group, False] = (first[0], next(iter(nodes_there.values()))[0])
    return list(chosen.values())


def tp_groups(cluster: Cluster, tp: int, without: Collection[int] = ()) -> dict[str, list[tuple[int, ...]]]:
    """Groups of ``tp`` neighbouring chips of a type, by chip type: inside nodes, or across them where no node of that
    type has so many chips. Groups with ranks of ``without`` count only where a type has no others."""
    nodes: dict[str, dict[str, list[int]]] = {}
    for rank in cluster.ranks:
        nodes.setdefault(rank.chip, {}).setdefault(rank.node, []).append(rank.rank)
    by_chip = {}
    for chip, by_node in nodes.items():
        inside = list(by_node.values())
        rank_lists = inside if max(map(len, inside)) >= tp else [sum(inside, [])]
        groups = [tuple(ranks[i : i + tp]) for ranks in rank_lists for i in range(0, len(ranks) - tp + 1, tp)]
        by_chip[chip] = [g for g in groups if not set(g) & set(without)] or groups
    return {chip: groups for chip, groups in by_chip.items() if groups}
