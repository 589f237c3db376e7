"""Gradient reduction and all-gather of parameters of a concrete plan, action by action.

What does not depend on rates (participants, element counts and order of each REDUCE and ALL_GATHER) is computed once.
The actions are the runtime's (:func:`~hetero_megatron.plans.program.bucket_actions`). A bucket is sent when all its
ranks have its gradients (during the last backward) and fewer than ``IN_FLIGHT`` buckets are under way. Every rank
starts its actions in order, and packs, sums and unpacks them on its own. Actions that share a chip's link or a node's
network cards are serialised. With islands a bucket travels in two hops; a rank's second starts after its first has
ended. With outer steps, exchanges between islands come on top (:func:`outer_seconds`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plans import Plan, Stage
from hetero_megatron.plans.buckets import IN_FLIGHT, Bucket, Hop, make_buckets
from hetero_megatron.plans.canonical import Outer
from hetero_megatron.plans.islands import hop_elements
from hetero_megatron.plans.outer import exchanged, fragment_tensors, owners_by_island
from hetero_megatron.plans.program import bucket_actions
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.predictor.cost.link_model import HostRates, LinkModel, RankHosts, exchange_host_seconds
from hetero_megatron.predictor.simulate.bucket_flows import BucketFlows, PortIndex, PortPrice, bucket_flows, price
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.utils.cached_method import cached_method

Floats = NDArray[np.float64]
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
            self._contents.append(rows)
            if bucket.onward is None:
                self.held[places] += held_elements
                self.owned[places] += owned_elements
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

    @cached_method
    def order(self, gather: bool) -> ActionOrder:
        """As in :func:`~hetero_megatron.plans.program.sync_actions`."""
        buckets = reversed(self.buckets) if gather else self.buckets
        at_the_end = (b for b in buckets if b.weights is None)  # others travel inside forward and backward
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


@dataclass(frozen=True)
class BucketSpan:
    """When one hop of a bucket travels, in seconds from the start of the step."""

    bucket: int
    start: float
    end: float
    hop: int = 0


class GradSync:
    """All buckets of a plan with their prices. ``structure``: the rate-independent part, when the caller has it."""

    def __init__(self, plan: Plan, model: CostModel, structure: SyncStructure | None = None) -> None:
        self.plan, self.model, self.network = plan, model, model.links
        self.structure = SyncStructure(plan, model) if structure is None else structure
        assert self.structure.serves(model), "of another model or cluster"
        self.all_buckets = self.structure.buckets
        self.buckets = [b for b in self.all_buckets if len(b.ranks) > 1 and b.weights is None]
        self.layer_of = {t.name: t.layer for t in logical_tensors(model.model)}
        ranks = self.structure.places.ranks.tolist()
        self.owned = dict(zip(ranks, self.structure.owned.tolist(), strict=True))
        self.held = dict(zip(ranks, self.structure.held.tolist(), strict=True))
        rates = [model.chip_rates(model.cluster.ranks[r].chip) for r in ranks]
        self._host = HostRates(*(np.array(row) for row in zip(*(r.host for r in rates))))

    @cached_property
    def matrix_flops(self) -> dict[int, float]:
        """By rank that owns matrices, of Muon's update."""
        if not self.model.options.muon:
            return {}
        from hetero_megatron.plans.matrices import update_flops

        tensors = {t.name: t for t in logical_tensors(self.model.model)}
        owners = (b.owners.items() for b in self.all_buckets if b.matrices)
        return update_flops((tensors[name], layout) for rows in owners for name, layout in rows)

    @cached_method
    def price(self, content: BucketFlows, item: float, gather: bool) -> PortPrice:
        port_price = price(content.traffic(gather, self.structure.places), item, self.network)
        return replace(port_price, latency=port_price.latency + self.network.host_seconds(content.ranks))

    def last_backwards(
        self, begin: Mapping[int, float], parts: Mapping[int, UnitSeconds], chunks: Mapping[int, int]
    ) -> Callable[[Bucket], Floats]:
        """A function that gives, per bucket, the seconds at which each of its ranks has the bucket's gradients.
        ``begin``: by rank, start of the last backward (s); parts: by rank, durations of its parts; chunks: by rank,
        of which chunk it is."""
        structure = self.structure
        ranks = structure.places.ranks.tolist()
        start = np.array([begin[r] for r in ranks])
        kinds: dict[tuple[object, ...], int] = {}
        kind = np.zeros(len(ranks), np.int64)
        rows: list[tuple[Stage, UnitSeconds, int]] = []
        for pipeline in self.plan.pipelines:
            for stage in pipeline.stages:
                for rank in stage.ranks:
                    key = (stage.layers, stage.embed, stage.head, stage.recompute, id(parts[rank]), chunks[rank])
                    if key not in kinds:
                        kinds[key] = len(rows)
                        rows.append((stage, parts[rank], chunks[rank]))
                    kind[structure.places.index[rank]] = kinds[key]
        present: dict[int, Ints] = {}

        def ready(bucket: Bucket) -> Floats:
            places = structure.at(bucket)
            if id(places) not in present:
                present[id(places)] = np.flatnonzero(np.bincount(kind[places]))
            layers = [self.layer_of[name] for name in bucket.names]
            into = np.zeros(len(rows))
            for k in present[id(places)].tolist():
                stage, part, chunk = rows[k]
                if stage.weights is not None:  # sums start when backward is over
                    into[k] = self._into_backward(stage, part, chunk, ["embed", stage.chunks[chunk][0]])
                else:
                    into[k] = self._into_backward(stage, part, chunk, layers)
            return np.asarray(start[places] + into[kind[places]])

        return ready

    @staticmethod
    def _into_backward(stage: Stage, part: UnitSeconds, chunk: int, layers: Sequence[int | str]) -> float:
        """Seconds from the start of a backward of this chunk until the gradients of these layers are complete."""
        head = part.head[1] if stage.head and chunk == len(stage.chunks) - 1 else 0.0
        decoder = [i for i in layers if isinstance(i, int)]
        # Recomputed layers run again just before their backward, so they are spread evenly over it.
        layer_seconds = part.layer[1] + (
            stage.recomputed * (part.layer[0] + part.again) / stage.num_layers if stage.num_layers else 0.0
        )
        a, b = stage.chunks[chunk]
        if "embed" in layers and stage.embed and chunk == 0:
            return part.action + head + (b - a) * layer_seconds + part.embed[1]
        first = min((i for i in decoder if a <= i < b), default=b)  # what other chunks have is there before it
        return part.action + head + (b - first) * layer_seconds

    @cached_method
    def host_seconds(self, content: BucketFlows, dense: bool, item: float, gather: bool) -> tuple[Floats, Floats]:
        """(before, after) an action on a bucket travels, [ranks] seconds of the host: packing what others get; summing
        gradients or unpacking parameters."""
        rates, count = HostRates(*(x[content.at] for x in self._host)), len(content.ranks)
        amounts = content.given, content.taken, content.owned
        return exchange_host_seconds(rates, *amounts, content.from_own, dense, count, item, gather)

    def run(
        self, ready: Callable[[Bucket], Floats], idle: Mapping[int, float], item: float, gather: bool
    ) -> tuple[dict[int, float], list[BucketSpan]]:
        """(seconds at which each rank is done with all its buckets, when each hop of a bucket travels).

        Args:
            ready: seconds at which each rank of a bucket has its content, before packing.
            idle: by rank, seconds at which it is done with everything else.
            item: bytes per element.
            gather: parameters from owners to holders, instead of gradients to owners.
        """
        sharded = self.model.options.sharded  # an all-reduce packs and adds on the way
        places, order = self.structure.places, self.structure.order(gather)
        hosts = RankHosts(
            len(places.ranks), IN_FLIGHT if self.structure.hops == 1 else max(IN_FLIGHT, len(order.actions))
        )
        missing = list(order.missing)
        heap: list[tuple[float, int]] = []
        free = np.zeros(places.ports)
        spans = []

        def launch(number: int) -> None:
            action = order.actions[number]
            pack = self.host_seconds(action.content, action.bucket.dense, item, gather)[0] if sharded else 0.0
            complete = ready(action.bucket)[action.content.inside]
            limited = gather or action.hop == 0
            sent = hosts.start(action.content.at, action.bucket.index, complete, pack, limited)
            heapq.heappush(heap, (float(sent.max()), number))

        for number, count in enumerate(order.missing):
            if not count:
                launch(number)
        while heap:
            sent_at, number = heapq.heappop(heap)
            action = order.actions[number]
            cost = self.price(action.content, item, gather)
            start = max(sent_at, float(free[cost.ports].max())) if len(cost.ports) else sent_at
            free[cost.ports] = start + cost.busy
            end = start + cost.seconds + cost.latency
            spans.append(BucketSpan(action.bucket.index, start, end, action.hop))
            sum_seconds = self.host_seconds(action.content, action.bucket.dense, item, gather)[1] if sharded else 0.0
            hosts.travel(action.content.at, action.bucket.index, end, sum_seconds)
            for following, count in order.following.get(number, ()):
                missing[following] -= count
                if not missing[following]:
                    launch(following)
        ranks = places.ranks.tolist()
        ends_of_ranks = hosts.finish(np.array([idle[r] for r in ranks]))
        return dict(zip(ranks, ends_of_ranks.tolist(), strict=True)), spans


def outer_seconds(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], links: LinkModel, itemsize: int, step: float
) -> float:
    """Mean over all steps of what they wait for exchanges.

    Args:
        itemsize: bytes of a difference of weights that is not compressed.
        step: seconds of a step without exchanges, which those that are under way for some steps go on beside.
    """
    assert plan.outer is not None
    return waiting_seconds(plan.outer, exchange_seconds(plan, spec, buckets, links, itemsize), step)


def exchange_seconds(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], links: LinkModel, itemsize: int
) -> list[float]:
    """Of each fragment, how long its exchange takes."""
    outer = plan.outer
    assert outer is not None
    owners, seconds = owners_by_island(outer, buckets), list[float]()
    for names in fragment_tensors(spec, outer):
        flows = [(*pair, float(size)) for pair, size in exchanged(outer, owners, names, itemsize).items()]
        seconds.append(links.groups_exchange(flows, [plan.ranks])[0])
    return seconds


def waiting_seconds(outer: Outer, exchanges: Sequence[float], step: float) -> float:
    """Mean over all steps of what they wait for ``exchanges`` of each fragment that take so long."""
    return sum(max(0.0, seconds - outer.delay * step) for seconds in exchanges) / outer.every
