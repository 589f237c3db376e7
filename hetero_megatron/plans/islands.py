"""Which ranks of a plan are near each other: the islands of a cluster, and what going by them saves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.layout import crossing_elements
from hetero_megatron.layout.layout import IntArray, reduction_elements
from hetero_megatron.plans.buckets import Bucket, Hop, by_islands, make_buckets, represented_elements
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.experts import stage_token_hops
from hetero_megatron.plans.routing import layer_loads
from hetero_megatron.plans.shares import Islands, all_ranks, split_by_island
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import format_bytes, plural, rank_ranges, word

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
Moves = tuple[IntArray, IntArray, FloatArray]  # (senders, receivers, elements)
WAYS = 4  # of a routed token: to its experts and back, and so do the gradients
EQUAL = 1.05  # times as long as the quickest division still counts as equal
SEARCHED = 32  # chips up to which a search gives islands to what it predicts: their layouts take seconds for hundreds


@dataclass(frozen=True)
class Crossing:
    """Bytes of gradients (fp32) that cross from island to island in a step, straight to the owners and as planned;
    ``hops``: buckets that go in two."""

    direct: int
    planned: int
    hops: int
    buckets: int


def add_islands(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """The plan with the islands of the cluster: always ranks that no communication library joins, and parts of these
    where they save bytes over slow links. As it is where nothing is to be added, and where it has further ranks.

    Raises:
        UserError: a tensor-parallel or context group crosses vendors; see :func:`over_libraries`.
    """
    if all_ranks(plan)[-1] >= cluster.world_size:
        return plan
    divided = plan if plan.islands else _near(plan, model, cluster)
    return over_libraries(divided, cluster.library_of, lambda rank: cluster.ranks[rank].chip)


def over_libraries(plan: Plan, library: Callable[[int], int], name: Callable[[int], str]) -> Plan:
    """The plan as it runs where communication libraries join only some ranks: gradients that cross from one library's
    ranks to another's are summed among the former first.

    Args:
        library: number of the one that a rank is joined by; name: of a rank's chip or platform, for messages.

    Raises:
        UserError: a tensor-parallel or context group has ranks of two, which the plan does not say may be.
    """
    if plan.roles:
        roles = tuple((role, over_libraries(role_plan, library, name)) for role, role_plan in plan.roles)
        plan = replace(plan, roles=roles)
    if len({library(rank) for rank in plan.ranks}) == 1:
        return plan
    for group in sorted(replicas(plan)):
        if not plan.allow_bridge and len({library(rank) for rank in group}) > 1:
            example_ranks = {library(rank): rank for rank in reversed(group)}
            ends = " and ".join(f"rank {rank} ({name(rank)})" for rank in sorted(example_ranks.values()))
            raise UserError(
                f"ranks {rank_ranges(group)} are one tensor-parallel or context group, and {ends} have no "
                "communication library in common: every layer would wait for the bridge", field="plan",
                accepted="such groups of one library's chips, or allow_bridge: true in the plan",
            )  # fmt: skip
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for i, island in enumerate(split_by_island(plan.islands, plan.ranks) if plan.islands else [plan.ranks]):
        for rank in island:
            ranks_of.setdefault((i, library(rank)), []).append(rank)
    islands = tuple(sorted(tuple(ranks) for ranks in ranks_of.values()))
    return plan if islands == plan.islands else replace(plan, islands=islands)


def replicas(plan: Plan) -> set[tuple[int, ...]]:
    """Ranks that work on the same sequences in the same layers, and so exchange data in every one of these: TP groups,
    or all ranks of context parallelism, whether they exchange by collectives or round a ring."""
    ranks_of: dict[object, list[int]] = {}
    for i, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for unit in stage.units:
                ranks_of.setdefault((i, s, unit.sequences), []).extend(unit.ranks)
    return {tuple(sorted(ranks)) for ranks in ranks_of.values()}


def _near(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """The plan with islands where they save bytes over slow links, else as it is.

    Islands are what remains together when all links up to a bandwidth are cut: nodes, or groups of nodes. Of several
    such divisions the one is taken under which the exchanges of gradients and of routed tokens take least, hop after
    hop, by the bandwidths of links and of what a node has for all others together; of those that take about equally
    long, the one that loads links the least in all.
    """
    priced, straight = [], make_buckets(plan, model)
    for islands in divisions(plan.ranks, cluster):
        divided = replace(plan, islands=islands)
        buckets, tokens = by_islands(straight, islands), list(_token_moves(divided, model))
        if any(len(b.hops) > 1 for b in buckets) or any(twice for twice, _ in tokens):
            priced.append((divided, *_link_seconds(buckets, [moves for _, moves in tokens], cluster)))
    if not priced:
        return plan
    moves = [moves for _, moves in _token_moves(plan, model)]
    priced.insert(0, (plan, *_link_seconds(straight, moves, cluster)))
    least_busy = min(busiest for _, busiest, _ in priced)
    equal = [
        (total_seconds, i) for i, (_, busiest, total_seconds) in enumerate(priced) if busiest <= EQUAL * least_busy
    ]
    return priced[min(equal)[1]][0]


def format_added(plan: Plan, cluster: Cluster) -> str:
    """One line about islands that :func:`add_islands` added."""
    names = " | ".join(rank_ranges(ranks) for ranks in plan.islands)
    unlike = len({cluster.library_of(rank) for rank in plan.ranks}) > 1
    why = "no communication library joins them" if unlike else "the links between them are slow"
    return f"islands {names} added: {why} in {cluster.file or 'the cluster'}"


def with_islands_where_quick(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """For a search: the plan as all that read it with the cluster will have it, up to ``SEARCHED`` chips."""
    return add_islands(plan, model, cluster) if cluster.world_size <= SEARCHED else plan


def divisions(ranks: Sequence[int], cluster: Cluster, alone: bool = False) -> list[Islands]:
    """Ranks in islands, for every bandwidth up to which links could be cut, the slowest first; those of unknown speed
    stay. ``alone``: also every rank as an island."""
    speeds = sorted({s for a, b in _ends(ranks, cluster) if (s := _bandwidth(cluster, a, b)) is not None})
    divisions_of_ranks: dict[Islands, None] = {}
    for cut in speeds if alone else speeds[:-1]:
        parent = {r: r for r in ranks}

        def root(rank: int, parent: dict[int, int] = parent) -> int:
            while parent[rank] != rank:
                parent[rank] = rank = parent[parent[rank]]
            return rank

        for a, b in _ends(ranks, cluster, every=True):
            speed = _bandwidth(cluster, a, b)
            if speed is None or speed > cut:
                parent[root(a)] = root(b)
        groups: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            groups[root(rank)].append(rank)
        if 1 < len(groups) < len(ranks) + alone:
            divisions_of_ranks[tuple(sorted(tuple(g) for g in groups.values()))] = None
    return list(divisions_of_ranks)


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
    """Bytes/s end to end."""
    link = cluster.link(a, b)
    if link is None:
        return None
    group_a, group_b = cluster.group_of(a), cluster.group_of(b)
    return 1 / cluster.seconds_per_byte(link, group_a, group_b, cluster.ranks[a].node != cluster.ranks[b].node)


def _token_moves(plan: Plan, model: ModelSpec) -> Iterator[tuple[bool, Moves]]:
    """Of each hop of each stage that lists groups of experts: (is it one of two?, elements from rank to rank in a step,
    there and back, forward and backward, with even routing)."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            layers = sum(model.layer(i).mlp == "moe" for i in stage.layer_indices()) if stage.experts else 0
            hops = layer_loads(model, stage, True, islands=plan.islands).hops if layers else ()
            for hop in hops:
                times = WAYS * layers * pipeline.num_micro_batches * model.hidden_size
                src, dst = np.array(list(hop.copies), dtype=np.int64).reshape(-1, 2).T
                yield len(hops) > 1, (src, dst, times * np.array(list(hop.copies.values())))


def _link_seconds(buckets: Sequence[Bucket], tokens: Iterable[Moves], cluster: Cluster) -> tuple[float, float]:
    """Elements over bandwidth, hop after hop: of the busiest link or port, and of all links together."""
    busiest = total = 0.0
    places = _Places(cluster)
    seconds_of: dict[tuple[int, ...], tuple[float, float]] = {}  # equal layers share their layouts
    for hop in (hop for bucket in buckets for hop in bucket.hops):
        key = tuple(id(layout) for layout in (*hop.sources.values(), *hop.targets.values()))
        if key not in seconds_of:
            seconds_of[key] = places.seconds(*_hop_pairs(hop))
        busiest, total = busiest + seconds_of[key][0], total + seconds_of[key][1]
    for moves in tokens:
        busiest_link, all_links = places.seconds(*moves)
        busiest, total = busiest + busiest_link, total + all_links
    return busiest, total


class _Places:
    """Where the ranks of a cluster are, as arrays: thousands of them exchange in millions of pairs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        nodes, groups = ({name: i for i, name in enumerate(dict.fromkeys(names))} for names in
                         ((r.node for r in cluster.ranks), (r.group for r in cluster.ranks)))  # fmt: skip
        self.node = np.array([nodes[r.node] for r in cluster.ranks])
        self.group = np.array([groups[r.group] for r in cluster.ranks])

    def seconds(self, src: IntArray, dst: IntArray, elements: IntArray | FloatArray) -> tuple[float, float]:
        """The busiest link, or end of links: a chip inside its node, a node among others, which sends (and receives)
        all at the rate of the fastest of its links; and the sum of all links. A link of unknown speed counts
        nothing."""
        same_node = self.node[src] == self.node[dst]
        speed = self._speeds(src, dst, same_node)
        has_speed = (src != dst) & (speed > 0)
        src, dst, elements, same_node, speed = (x[has_speed] for x in (src, dst, elements, same_node, speed))
        if not len(src):
            return 0.0, 0.0
        ends = [np.where(same_node, rank, len(self.node) + self.node[rank]) for rank in (src, dst)]
        _, link = np.unique(ends[0] * 2 * len(self.node) + ends[1], return_inverse=True)
        link_seconds = np.bincount(link, elements / speed)
        busiest = [link_seconds.max()]
        for end in ends:
            _, port = np.unique(end, return_inverse=True)
            fastest = np.zeros(port.max() + 1)
            np.maximum.at(fastest, port, speed)
            busiest.append((np.bincount(port, elements) / fastest).max())
        return float(max(busiest)), float(link_seconds.sum())

    def _speeds(self, src: IntArray, dst: IntArray, same: IntArray) -> FloatArray:
        """Bytes/s of each pair; 0 where unknown. Pairs of the same node groups have the same."""
        kinds = (self.group[src] * (self.group.max() + 1) + self.group[dst]) * 2 + same
        _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
        bandwidths = [_bandwidth(self.cluster, int(src[i]), int(dst[i])) or 0.0 for i in first]
        return np.array(bandwidths)[kind]


def hop_elements(hop: Hop) -> dict[tuple[int, int], int]:
    """Elements from every source to every target of one hop."""
    src, dst, elements = (x.tolist() for x in _hop_pairs(hop))
    return dict(zip(zip(src, dst), elements))


def _hop_pairs(hop: Hop) -> tuple[IntArray, IntArray, IntArray]:
    """(source, target, elements) of every pair of ranks that exchanges something in a hop."""
    layouts = [(layout, hop.targets[name]) for name, layout in hop.sources.items()]
    equal = Counter((id(source), id(target)) for source, target in layouts)
    different = {(id(source), id(target)): (source, target) for source, target in layouts}
    columns_of_hops = []
    for ranks in hop.groups:
        for key, (source, target) in different.items():
            *ends, elements = reduction_elements(source.only(ranks), target.only(ranks))
            columns_of_hops.append((*ends, equal[key] * elements))
    src, dst, elements = (np.concatenate(columns) for columns in zip(*columns_of_hops))
    width = int(dst.max(initial=0)) + 1
    pairs, pair_of = np.unique(src * width + dst, return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    np.add.at(total, pair_of, elements)
    return pairs // width, pairs % width, total


def crossing(compiled: CompiledPlan, itemsize: int = 4) -> Crossing:
    """What of the gradients crosses between the plan's islands, and what would without them."""
    buckets = [b for b in compiled.buckets if len(b.ranks) > 1]
    crossing_of: dict[tuple[int, ...], tuple[int, int]] = {}  # equal layers share their layouts
    direct = planned = 0
    for bucket in buckets:
        key = tuple(id(layout) for layout in (*bucket.holders.values(), *bucket.owners.values()))
        if key not in crossing_of:
            crossing_of[key] = bucket_crossing(bucket, split_by_island(compiled.plan.islands, bucket.ranks))
        direct, planned = direct + crossing_of[key][0], planned + crossing_of[key][1]
    two = sum(len(b.hops) > 1 for b in buckets)
    return Crossing(itemsize * direct, itemsize * planned, two, len(buckets))


def format_islands(compiled: CompiledPlan) -> str:
    """One line: the islands, and what they save."""
    saved = crossing(compiled)
    stages = [stage for pipeline in compiled.plan.pipelines for stage in pipeline.stages]
    twice = sum(len(stage_token_hops(compiled.spec, stage, compiled.plan.islands)) for stage in stages)
    tokens = f"; routed tokens of {plural(twice, 'expert group')} go in two hops" if twice else ""
    names = " | ".join(rank_ranges(ranks) for ranks in compiled.plan.islands)
    if not saved.direct:
        return f"islands {names}: no gradients cross between them{tokens}"
    return (
        f"islands {names}: {saved.hops} of {plural(saved.buckets, 'bucket')} {word(saved.hops, 'is')} "
        "summed inside an island first; per step "
        f"{format_bytes(saved.planned)} of fp32 gradients cross between islands instead of {format_bytes(saved.direct)}"
        + tokens
    )


def bucket_crossing(bucket: Bucket, islands: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Elements of a bucket that cross between its ranks' islands on the way to the owners: straight, and as planned."""
    direct = crossing_elements(bucket.holders, bucket.owners, islands)
    return direct, direct if len(bucket.hops) == 1 else represented_elements(bucket.hops[1].sources, bucket.owners)

