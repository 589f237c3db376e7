"""Rate-independent structure of gradient sync: participants, element counts and order of each REDUCE and ALL_GATHER."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plans import Plan
from hetero_megatron.plans.buckets import Bucket, Hop, make_buckets
from hetero_megatron.plans.islands import hop_elements
from hetero_megatron.plans.program import bucket_actions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.bucket_flows import BucketFlows, PortIndex, bucket_flows
from hetero_megatron.utils.cached_method import cached_method

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SyncAction:
    """One hop of a bucket: ranks that exchange its elements in one collective."""

    bucket: Bucket
    hop: int
    content: BucketFlows


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

    def __init__(self, plan: Plan, model: CostModel, buckets: tuple[Bucket, ...] | None = None) -> None:
        self.model, self.cluster = model.model, model.cluster
        self.buckets = make_buckets(plan, model.model, muon=model.options.muon) if buckets is None else buckets
        self.places = PortIndex(plan.ranks, model.cluster)
        self.owned = np.zeros(len(plan.ranks), np.int64)
        self.held = np.zeros(len(plan.ranks), np.int64)
        self._at = [self._places_of(b.ranks) for b in self.buckets]
        contents: dict[object, tuple[Ints, Ints, list[list[BucketFlows]]]] = {}
        self._contents: list[list[list[BucketFlows]]] = []  # by bucket and hop; empty for a single rank
        for bucket, places in zip(self.buckets, self._at, strict=True):
            key = bucket.layout_key  # the same transfers between the same ranks
            if key not in contents:
                contents[key] = *bucket.counts(), self._hops(bucket, places)
            held_elements, owned_elements, rows = contents[key]
            self.held[places] += held_elements
            self.owned[places] += owned_elements
            self._contents.append(rows)
        self.hops = max((len(b.hops) for b in self.buckets), default=1)

    def serves(self, model: CostModel) -> bool:
        return self.model == model.model and self.cluster is model.cluster

    def at(self, bucket: Bucket) -> Ints:
        """Indices of the bucket's ranks in the plan."""
        return self._at[bucket.index]

    def actions(self, bucket: Bucket, gather: bool) -> list[list[SyncAction]]:
        """Participants of each action on a bucket, by hop, in the order of the actions."""
        rows = self._contents[bucket.index]
        return [[SyncAction(bucket, a.chunk, c) for c in rows[a.chunk]] for a in bucket_actions(bucket, gather)]

    def order(self, gather: bool) -> ActionOrder:
        return self._order(gather and self.hops > 1)  # with single hops it is the same in both directions

    @cached_method
    def _order(self, gather: bool) -> ActionOrder:
        at_the_end = (b for b in self.buckets if b.weights is None)  # others travel inside forward and backward
        actions = [m for b in at_the_end for row in self.actions(b, gather) for m in row]
        latest = np.full(len(self.places.ranks), -1)  # number of a rank's last action
        missing: list[int] = []
        following: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, action in enumerate(actions):
            counts = Counter(latest[action.content.at].tolist())
            missing.append(len(action.content.ranks) - counts.pop(-1, 0))
            for earlier, count in counts.items():
                following[earlier].append((number, count))
            latest[action.content.at] = number
        return ActionOrder(actions, missing, following)

    @cached_method
    def _places_of(self, ranks: tuple[int, ...]) -> Ints:
        return np.array([self.places.index[r] for r in ranks], np.int64)

    def _hops(self, bucket: Bucket, at: Ints) -> list[list[BucketFlows]]:
        if len(bucket.ranks) == 1:
            return [[] for _ in bucket.hops]
        if len(bucket.hops) == 1:
            return [[bucket_flows(bucket, at)]]
        return [self._groups(bucket, hop) for hop in bucket.hops]

    def _groups(self, bucket: Bucket, hop: Hop) -> list[BucketFlows]:
        """Of each group of ranks that exchanges something in a hop; every rank holds boxes of its own."""
        groups = [ranks for ranks in hop.groups if len(ranks) > 1]
        place = {rank: (g, i) for g, ranks in enumerate(groups) for i, rank in enumerate(ranks)}
        volumes = [np.zeros((len(ranks), len(ranks)), np.int64) for ranks in groups]
        for (src, dst), count in hop_elements(hop).items():
            if src in place:
                (g, i), (_, j) = place[src], place[dst]
                volumes[g][i, j] += count
        inside = {rank: i for i, rank in enumerate(bucket.ranks)}
        return [
            BucketFlows(ranks, self._places_of(ranks), np.array([inside[r] for r in ranks]), np.arange(len(ranks)), v)
            for ranks, v in zip(groups, volumes)
        ]
