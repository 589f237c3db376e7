"""Rate-independent structure of gradient sync: participants, element counts and order of each REDUCE and SPREAD."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plan import Plan
from hetero_megatron.plan.buckets import Bucket, Hop, bucket_actions, make_buckets
from hetero_megatron.plan.islands import hop_elements
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.link_model import LinkModel
from hetero_megatron.planner.simulate.bucket_flows import (
    BucketFlows,
    PortIndex,
    PortTraffic,
    bucket_flows,
    from_link_traffic,
    port_traffic,
)

Ints = NDArray[np.int64]


class ActionContent:
    """What some ranks exchange in one action; arrays are over these ranks.

    Attributes:
        at: their indices in the plan; inside: their indices among the ranks of the bucket.
        given: elements sent to other owners; taken: received from other holders; owned: kept.
        flows: for a bucket that travels in one hop.
        pairs: otherwise, elements by (source, destination), towards the owners.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        at: Ints,
        inside: Ints,
        flows: BucketFlows | None,
        pairs: Mapping[tuple[int, int], int],
    ) -> None:
        self.ranks, self.at, self.inside, self.flows, self.pairs = ranks, at, inside, flows, pairs
        if flows is not None:
            self.given, self.taken, self.owned = flows.given, flows.taken, flows.owned
        else:
            place = {rank: i for i, rank in enumerate(ranks)}
            self.given, self.taken, self.owned = (np.zeros(len(ranks), np.int64) for _ in range(3))
            for (src, dst), count in pairs.items():
                if src == dst:
                    self.owned[place[src]] += count
                else:
                    self.given[place[src]] += count
                    self.taken[place[dst]] += count
        self._traffic: dict[bool, PortTraffic] = {}

    def elements(self) -> Mapping[tuple[int, int], int]:
        """Elements by (source, destination), towards the owners."""
        if self.flows is None:
            return self.pairs
        flows = self.flows
        source, target = np.nonzero(flows.volume[flows.kind])
        counts = flows.volume[flows.kind[source], target].tolist()
        rows = zip(source.tolist(), target.tolist(), counts, strict=True)
        return {(self.ranks[i], self.ranks[j]): n for i, j, n in rows}

    def traffic(self, spread: bool, places: PortIndex, network: LinkModel) -> PortTraffic:
        """In elements; from holders to owners, or with ``spread`` back."""
        if spread not in self._traffic:
            if self.flows is not None:
                self._traffic[spread] = port_traffic(self.flows, places, spread)
            else:
                flows = [(b, a, float(n)) if spread else (a, b, float(n)) for (a, b), n in self.pairs.items() if n]
                self._traffic[spread] = from_link_traffic(network.traffic(flows), places)
        return self._traffic[spread]


@dataclass(frozen=True, eq=False)
class SyncAction:
    """One hop of a bucket: ranks that exchange its elements in one collective."""

    bucket: Bucket
    hop: int
    content: ActionContent

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.content.ranks


@dataclass(frozen=True)
class ActionOrder:
    """Dependencies between actions: a rank runs its actions in order.

    Attributes:
        missing: per action, how many of its ranks have an earlier action.
        following: by action, (next action of some of its ranks, number of these ranks).
    """

    actions: Sequence[SyncAction]
    missing: Sequence[int]
    following: Mapping[int, Sequence[tuple[int, int]]]


class SyncStructure:
    """All buckets of a plan; arrays are over the plan's ranks in ascending order. ``buckets``: of the plan, if already
    made."""

    def __init__(
        self, plan: Plan, model: CostModel, network: LinkModel, buckets: tuple[Bucket, ...] | None = None
    ) -> None:
        self.model, self.cluster, self.network = model.model, model.cluster, network
        self.buckets = make_buckets(plan, model.model) if buckets is None else buckets
        self.places = PortIndex(plan.ranks, network)
        self.owned = np.zeros(len(plan.ranks), np.int64)
        self.held = np.zeros(len(plan.ranks), np.int64)
        self._ranks: dict[tuple[int, ...], Ints] = {}
        self._at = [self._places_of(b.ranks) for b in self.buckets]
        self._orders: dict[bool, ActionOrder] = {}
        contents: dict[tuple[int, ...], tuple[BucketFlows, list[list[ActionContent]]]] = {}
        self._contents: list[list[list[ActionContent]]] = []  # by bucket and hop; empty for a single rank
        for bucket, at in zip(self.buckets, self._at, strict=True):
            # Equal for buckets with the same transfers between the same ranks.
            key = (*map(id, bucket.holders.values()), *map(id, bucket.owners.values()))
            if key not in contents:
                flows = bucket_flows(bucket, at)
                contents[key] = flows, self._hops(bucket, flows)
            flows, rows = contents[key]
            self.owned[at] += flows.mine
            self.held[at] += flows.held
            self._contents.append(rows)
        self.hops = max((len(b.hops) for b in self.buckets), default=1)

    def serves(self, model: CostModel) -> bool:
        return self.model == model.model and self.cluster is model.cluster

    def at(self, bucket: Bucket) -> Ints:
        """Indices of the bucket's ranks in the plan."""
        return self._at[bucket.index]

    def actions(self, bucket: Bucket, spread: bool) -> list[list[SyncAction]]:
        """Participants of each action on a bucket, by hop, in the order of the actions."""
        rows = self._contents[bucket.index]
        return [[SyncAction(bucket, a.chunk, c) for c in rows[a.chunk]] for a in bucket_actions(bucket, spread)]

    def order(self, spread: bool) -> ActionOrder:
        spread = spread and self.hops > 1  # with single hops the order is the same in both directions
        if spread not in self._orders:
            found = [m for b in self.buckets for row in self.actions(b, spread) for m in row]
            latest = np.full(len(self.places.ranks), -1)  # number of a rank's last action
            missing: list[int] = []
            following: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for number, action in enumerate(found):
                counts = Counter(latest[action.content.at].tolist())
                missing.append(len(action.ranks) - counts.pop(-1, 0))
                for earlier, count in counts.items():
                    following[earlier].append((number, count))
                latest[action.content.at] = number
            self._orders[spread] = ActionOrder(found, missing, following)
        return self._orders[spread]

    def _places_of(self, ranks: tuple[int, ...]) -> Ints:
        if ranks not in self._ranks:
            self._ranks[ranks] = np.array([self.places.index[r] for r in ranks], np.int64)
        return self._ranks[ranks]

    def _hops(self, bucket: Bucket, flows: BucketFlows) -> list[list[ActionContent]]:
        if len(bucket.ranks) == 1:
            return [[] for _ in bucket.hops]
        if len(bucket.hops) == 1:
            return [[ActionContent(bucket.ranks, flows.at, np.arange(len(bucket.ranks)), flows, {})]]
        return [self._groups(bucket, hop) for hop in bucket.hops]

    def _groups(self, bucket: Bucket, hop: Hop) -> list[ActionContent]:
        parts: dict[tuple[int, ...], dict[tuple[int, int], int]] = {ranks: {} for ranks in hop.groups}
        group_of = {rank: ranks for ranks in hop.groups for rank in ranks}
        for (src, dst), count in hop_elements(hop).items():
            parts[group_of[src]][src, dst] = count
        inside = {rank: i for i, rank in enumerate(bucket.ranks)}
        return [
            ActionContent(ranks, self._places_of(ranks), np.array([inside[r] for r in ranks], np.int64), None, pairs)
            for ranks, pairs in parts.items()
            if len(ranks) > 1
        ]
