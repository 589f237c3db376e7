"""Element counts that some ranks exchange in one action on a bucket, as arrays over these ranks.

Thousands of holders of a bucket have only a few distinct boxes (one per tensor-parallel index), and every element has
one owner. Instead of all pairs of ranks there is one row per distinct box: how much of it each rank owns. The traffic
between nodes is a product of two small matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import Cluster
from hetero_megatron.layout import Box, Layout
from hetero_megatron.layout.layout import box_arrays, overlapping_pairs
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.predictor.cost.link_model import LinkKind, LinkModel
from hetero_megatron.utils.cached_method import cached_method

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class PortIndex:
    """Index of the ranks of a plan (ascending) and of their nodes, and of their ports: every rank and node has one out
    and one in."""

    def __init__(self, ranks: tuple[int, ...], cluster: Cluster) -> None:
        self.ranks = np.array(ranks, np.int64)
        self.index = {rank: i for i, rank in enumerate(ranks)}
        names = {node: i for i, node in enumerate(dict.fromkeys(cluster.ranks[r].node for r in ranks))}
        groups = {group: i for i, group in enumerate(dict.fromkeys(cluster.ranks[r].group for r in ranks))}
        self.nodes, self.groups = names, tuple(groups)
        self.node: Ints = np.array([names[cluster.ranks[r].node] for r in ranks], np.int64)
        self.group_of_node = np.zeros(len(names), np.int64)
        self.traffic: dict[tuple[object, ...], PortTraffic] = {}  # cache of port_traffic
        self.group_of_node[self.node] = [groups[cluster.ranks[r].group] for r in ranks]

    @property
    def ports(self) -> int:
        return 2 * (len(self.ranks) + len(self.nodes))


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """(distinct values in ascending order, index of each value among them), for small non-negative integers. Like
    ``numpy.unique``, whose first call imports ``numpy.ma`` (50 ms)."""
    present = np.bincount(values) > 0
    return np.flatnonzero(present), (np.cumsum(present) - 1)[values]


@dataclass(frozen=True)
class PortTraffic:
    """Messages that start together, by port.

    Attributes:
        ports, way, size: [messages]: ``size[i]`` elements pass port ``ports[i]`` over a link of kind ``ways[way[i]]``.
        longest: by kind of link, most elements between one sender and one receiver (chips inside a node, else nodes).
        pairs: by kind of link, most elements from one chip to another.
    """

    ports: Ints
    way: Ints
    size: Floats
    ways: tuple[tuple[bool, LinkKind], ...]  # (into the port, kind of link)
    longest: Mapping[LinkKind, float]
    pairs: Mapping[LinkKind, float]


@dataclass(frozen=True, eq=False)
class BucketFlows:
    """What some ranks exchange in one action on a bucket; arrays [ranks].

    Attributes:
        at: their indices in the plan; inside: their indices among the ranks of the bucket.
        kind: row of ``volume`` for what each rank holds.
        volume: [kinds, ranks]: elements of a kind's boxes that each rank owns.
    """

    ranks: tuple[int, ...]
    at: Ints
    inside: Ints
    kind: Ints
    volume: Ints

    @cached_property
    def owned(self) -> Ints:
        """Elements that the rank holds and keeps."""
        return np.asarray(self.volume[self.kind, np.arange(len(self.at))])

    @cached_property
    def given(self) -> Ints:
        """Elements sent to other owners."""
        return np.asarray(self.volume.sum(axis=1)[self.kind] - self.owned)

    @cached_property
    def taken(self) -> Ints:
        """Elements received from other holders."""
        return np.asarray(np.bincount(self.kind, minlength=len(self.volume)) @ self.volume - self.owned)

    @cached_property
    def from_own(self) -> NDArray[np.bool_]:
        """Whether the rank's sums begin with a copy of its own part: no other rank holds all that it owns (experts that
        only it has)."""
        held_elsewhere = np.bincount(self.kind, minlength=len(self.volume))[:, None] > (
            np.arange(len(self.volume))[:, None] == self.kind
        )
        return np.asarray(np.where(held_elsewhere, self.volume, 0).max(axis=0) < self.owned)

    def elements(self) -> Mapping[tuple[int, int], int]:
        """Elements by (source, destination), towards the owners."""
        source, target = np.nonzero(self.volume[self.kind])
        counts = self.volume[self.kind[source], target].tolist()
        rows = zip(source.tolist(), target.tolist(), counts, strict=True)
        return {(self.ranks[i], self.ranks[j]): n for i, j, n in rows}

    @cached_method
    def traffic(self, gather: bool, places: PortIndex) -> PortTraffic:
        """In elements; from holders to owners, or with ``gather`` back."""
        return port_traffic(self, places, gather)


def bucket_flows(bucket: Bucket, at: Ints) -> BucketFlows:
    """The flows of a bucket that travels in one hop; ``at``: indices of its ranks in the plan."""
    kinds, volumes = zip(*(_volume(bucket.holders[name], bucket.owners[name]) for name in bucket.names))
    if len(kinds) == 1:
        kind, volume = kinds[0], volumes[0]
    else:
        kind_of: dict[tuple[int, ...], int] = {}
        kinds_of_ranks = zip(*(k.tolist() for k in kinds))
        kind = np.array([kind_of.setdefault(row, len(kind_of)) for row in kinds_of_ranks], np.int64)
        rows = np.array(list(kind_of), np.int64)
        volume = sum(v[rows[:, i]] for i, v in enumerate(volumes))
    return BucketFlows(bucket.ranks, at, np.arange(len(at)), kind, volume)


def _volume(holders: Layout, owners: Layout) -> tuple[Ints, Ints]:
    """(kind of each holder, [kinds, ranks] elements that its boxes share with what each rank owns)."""
    kind_of: dict[tuple[Box, ...], int] = {}
    kind = np.array([kind_of.setdefault(boxes, len(kind_of)) for boxes in holders.boxes.values()], np.int64)
    pairs = [(k, box) for boxes, k in kind_of.items() for box in boxes]
    lo, hi = box_arrays([box for _, box in pairs], len(holders.shape))
    rank, own_lo, own_hi = owners.arrays()
    i, j = overlapping_pairs(lo, hi, own_lo, own_hi)
    sizes = np.prod(np.minimum(hi[i], own_hi[j]) - np.maximum(lo[i], own_lo[j]), axis=1)
    row = np.array([k for k, _ in pairs], np.int64)[i]
    column = np.searchsorted(np.array(holders.ranks), rank[j])
    volume = np.zeros((len(kind_of), len(kind)), np.int64)
    np.add.at(volume, (row, column), sizes)
    return kind, volume


def port_traffic(flows: BucketFlows, places: PortIndex, gather: bool) -> PortTraffic:
    """Traffic from holders to owners, or with ``gather`` of the new parameters back. Equal flows between ranks that are
    placed alike on nodes only differ in the ports, so the rest is cached."""
    nodes, node = distinct(places.node[flows.at])
    group = places.group_of_node[nodes]
    key = (gather, flows.volume.shape, *(x.tobytes() for x in (flows.volume, flows.kind, node, group)))
    if key not in places.traffic:
        places.traffic[key] = _local_traffic(flows, node, group, places.groups, gather)
    traffic = places.traffic[key]
    places_of = np.concatenate([flows.at, len(places.ranks) + nodes])
    return replace(traffic, ports=2 * places_of[traffic.ports >> 1] + (traffic.ports & 1))


def _local_traffic(flows: BucketFlows, node: Ints, group: Ints, names: tuple[str, ...], gather: bool) -> PortTraffic:
    """Traffic with ports numbered within the flows: ranks, then nodes. ``node`` [ranks], ``group`` [nodes]."""
    nodes, ranks = np.arange(len(group)), np.arange(len(node))
    count = np.zeros((len(nodes), len(flows.volume)))  # holders of each kind
    np.add.at(count, (node, flows.kind), 1.0)
    into = np.stack([np.bincount(node, row, len(nodes)) for row in flows.volume])  # [kinds, nodes]
    between = count @ into  # [from node, to node]
    local = into[flows.kind, node] - flows.owned, (count[node] * flows.volume.T).sum(axis=1) - flows.owned
    other_holders = count[node]
    other_holders[np.arange(len(node)), flows.kind] -= 1
    # The largest message to each rank inside its node.
    longest = np.where(other_holders > 0.5, flows.volume.T, 0).max(axis=1)
    np.fill_diagonal(between, 0.0)
    if gather:
        between, local = between.T, local[::-1]
    rows: list[tuple[Ints, Floats, tuple[bool, LinkKind]]] = []
    largest: dict[LinkKind, float] = {}
    pairs: dict[LinkKind, float] = {}
    groups = distinct(group)[0].tolist()
    for g in groups:
        in_group = group[node] == g
        kind = (names[g], names[g], True)
        if local[0][in_group].any():
            rows += [(2 * ranks[in_group] + i, local[i][in_group], (i, kind)) for i in (False, True)]
            largest[kind] = pairs[kind] = float(longest[in_group].max())
        for h in groups:
            part = between[np.ix_(group == g, group == h)]
            if part.any():
                kind = (names[g], names[h], False)
                rows.append((2 * (len(ranks) + nodes[group == g]), part.sum(axis=1), (False, kind)))
                rows.append((2 * (len(ranks) + nodes[group == h]) + 1, part.sum(axis=0), (True, kind)))
                largest[kind] = float(part.max())
                holders, owners = (group == h, group[node] == g) if gather else (group == g, group[node] == h)
                holders_elsewhere = count[holders].sum(axis=0) - np.where(
                    holders[node[owners]][:, None], count[node[owners]], 0.0
                )
                pairs[kind] = float(np.where(holders_elsewhere > 0.5, flows.volume.T[owners], 0).max())
    return _joined(rows, largest, pairs)


def _joined(
    rows: list[tuple[Ints, Floats, tuple[bool, LinkKind]]],
    longest: Mapping[LinkKind, float],
    pairs: Mapping[LinkKind, float],
) -> PortTraffic:
    ways = tuple(dict.fromkeys(way for _, _, way in rows))
    number = {way: i for i, way in enumerate(ways)}
    if not rows:
        return PortTraffic(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), (), {}, {})
    ports, size = (np.concatenate([row[i] for row in rows]) for i in (0, 1))
    way = np.repeat([number[w] for _, _, w in rows], [len(p) for p, _, _ in rows])
    used = size > 0
    return PortTraffic(ports[used], way[used], size[used], ways, longest, pairs)


@dataclass(frozen=True)
class PortPrice:
    """Attributes:
        ports: distinct ports; busy: seconds that each is occupied.
        link: seconds of the most loaded single link.
        latency: seconds until the slowest message arrives after everything was sent."""

    ports: Ints
    busy: Floats
    link: float
    latency: float

    @property
    def seconds(self) -> float:
        return max(self.link, float(self.busy.max()) if len(self.busy) else 0.0)


def price(traffic: PortTraffic, item: float, network: LinkModel) -> PortPrice:
    """The price of a collective by the rules of :meth:`LinkModel.exchange`; ``item``: bytes per element."""
    latency, slowest, rate = 0.0, 0.0, np.zeros(len(traffic.ways))
    for i, (into, kind) in enumerate(traffic.ways):
        link = network.link(*kind, "all_to_all")
        latency, rate[i] = max(latency, link.alpha), link.into if into else link.out
    for kind, size in traffic.longest.items():
        slowest = max(slowest, size * item * network.link(*kind, "all_to_all").link)
    for kind, size in traffic.pairs.items():
        slowest = max(slowest, size * item * network.link(*kind, "all_to_all").pair)
    ports, place = distinct(traffic.ports)
    busy = np.bincount(place, traffic.size * item * rate[traffic.way], len(ports))
    return PortPrice(ports, busy.astype(np.float64), slowest, latency)
