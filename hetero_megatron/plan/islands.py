"""Which ranks of a plan are near each other: the islands of a cluster, and what going by them saves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_megatron.cluster import Cluster, format_bytes
from hetero_megatron.layout import reduction
from hetero_megatron.plan.buckets import Bucket, Hop, islands_of, make_buckets
from hetero_megatron.plan.canonical import Plan
from hetero_megatron.plan.dump import rank_ranges
from hetero_megatron.spec import ModelSpec

Islands = tuple[tuple[int, ...], ...]
SEARCHED = 32  # chips up to which a search gives islands to what it predicts: their layouts take seconds for hundreds


@dataclass(frozen=True)
class Crossing:
    """Bytes of gradients (fp32) that cross from island to island in a step, straight to the owners and as planned;
    ``hops``: buckets that go in two."""

    direct: int
    planned: int
    hops: int
    buckets: int


def with_islands(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """The plan with the islands of the cluster where they save bytes over its slow links, else the plan as it is; so
    too where it names islands already.

    Islands are what remains together when all links up to a bandwidth are cut: nodes, or groups of nodes. Of several
    such divisions the one is taken under which the gradients' bytes, each divided by its link's bandwidth, are least.
    """
    if plan.islands or plan.ranks[-1] >= cluster.world_size:
        return plan
    best, least = plan, None
    for islands in divisions(plan, cluster):
        divided = replace(plan, islands=islands, _cache={})
        buckets = make_buckets(divided, model)
        if all(len(b.hops) == 1 for b in buckets):
            continue
        seconds = _link_seconds(buckets, cluster)
        if least is None:
            least = _link_seconds(make_buckets(plan, model), cluster)
        if seconds < least:
            best, least = divided, seconds
    return best


def with_islands_where_quick(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """For a search: the plan as all that read it with the cluster will have it, up to ``SEARCHED`` chips."""
    return with_islands(plan, model, cluster) if cluster.world_size <= SEARCHED else plan


def divisions(plan: Plan, cluster: Cluster) -> list[Islands]:
    """The plan's ranks in islands, for every bandwidth up to which links could be cut; those of unknown speed stay."""
    speeds = sorted({s for a, b in _ends(plan.ranks, cluster) if (s := _bandwidth(cluster, a, b)) is not None})
    found: dict[Islands, None] = {}
    for cut in speeds[:-1]:
        parent = {r: r for r in plan.ranks}

        def root(rank: int, parent: dict[int, int] = parent) -> int:
            while parent[rank] != rank:
                parent[rank] = rank = parent[parent[rank]]
            return rank

        for a, b in _ends(plan.ranks, cluster, every=True):
            speed = _bandwidth(cluster, a, b)
            if speed is None or speed > cut:
                parent[root(a)] = root(b)
        groups: dict[int, list[int]] = defaultdict(list)
        for rank in plan.ranks:
            groups[root(rank)].append(rank)
        if 1 < len(groups) < len(plan.ranks):
            found[tuple(sorted(tuple(g) for g in groups.values()))] = None
    return list(found)


def _ends(ranks: Sequence[int], cluster: Cluster, every: bool = False) -> list[tuple[int, int]]:
    """Pairs of ranks, enough to see every link: neighbours inside a node, and first ranks of nodes."""
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[cluster.ranks[rank].node].append(rank)
    inside = [pair for members in nodes.values() for pair in zip(members, members[1:])]
    if every:
        firsts = [members[0] for members in nodes.values()]
    else:  # two nodes per group show all speeds
        groups: dict[str, list[int]] = defaultdict(list)
        for members in nodes.values():
            groups[cluster.ranks[members[0]].group].append(members[0])
        firsts = [rank for members in groups.values() for rank in members[:2]]
    return inside + [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 :]]


def _bandwidth(cluster: Cluster, a: int, b: int) -> float | None:
    link = cluster.link(a, b)
    return link.bandwidth if link is not None else None


def _link_seconds(buckets: Sequence[Bucket], cluster: Cluster) -> float:
    """Elements over bandwidth, added up over all pairs; a link of unknown speed counts nothing."""
    total = 0.0
    known: dict[tuple[int, ...], float] = {}  # equal layers share their layouts
    for hop in (hop for bucket in buckets for hop in bucket.hops):
        key = tuple(id(layout) for layout in (*hop.sources.values(), *hop.targets.values()))
        if key not in known:
            known[key] = 0.0
            for (a, b), count in hop_elements(hop).items():
                speed = _bandwidth(cluster, a, b) if a != b else None
                known[key] += count / speed if speed else 0.0
        total += known[key]
    return total


def hop_elements(hop: Hop) -> dict[tuple[int, int], int]:
    """Elements from every source to every target of one hop."""
    total: dict[tuple[int, int], int] = defaultdict(int)
    for ranks in hop.groups:
        for name, layout in hop.sources.items():
            for piece in reduction(layout.only(ranks), hop.targets[name].only(ranks)).pieces:
                total[piece.src, piece.dst] += piece.box.size
    return dict(total)


def crossing(plan: Plan, model: ModelSpec, itemsize: int = 4) -> Crossing:
    """What of the gradients crosses between the plan's islands, and what would without them."""
    island = {rank: i for i, ranks in enumerate(islands_of(plan, plan.ranks)) for rank in ranks}

    def between(hops: Sequence[Hop]) -> int:
        pairs = (pair for hop in hops for pair in hop_elements(hop).items())
        return itemsize * sum(count for (a, b), count in pairs if island[a] != island[b])

    buckets = [b for b in make_buckets(plan, model) if len(b.ranks) > 1]
    direct = sum(between((Hop((b.ranks,), b.holders, b.owners),)) for b in buckets)
    two = sum(len(b.hops) > 1 for b in buckets)
    return Crossing(direct, sum(between(b.hops) for b in buckets), two, len(buckets))


def format_islands(plan: Plan, model: ModelSpec) -> str:
    """One line: the islands, and what they save."""
    found = crossing(plan, model)
    names = " | ".join(rank_ranges(ranks) for ranks in plan.islands)
    return (
        f"islands {names}: {found.hops} of {found.buckets} buckets are summed inside an island first; per step "
        f"{format_bytes(found.planned)} of fp32 gradients cross between islands instead of {format_bytes(found.direct)}"
    )
