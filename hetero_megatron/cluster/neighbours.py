"""Ranks that stand for others of their kind: pairs for all links of a cluster, and groups of neighbours."""

from __future__ import annotations

from collections.abc import Collection

from hetero_megatron.cluster.cluster import Cluster


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
