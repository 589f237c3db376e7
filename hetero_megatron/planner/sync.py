"""Gradient reduction and parameter spread of a concrete plan, bucket by bucket, on the ports of its chips and nodes.

The same buckets as the runtime's: a bucket is sent when all its ranks have its gradients, which happens during the last
backward, and fewer than ``IN_FLIGHT`` are under way; every rank sends its buckets in order and packs, sums and unpacks
them itself; buckets that share a chip's link or a node's cards take turns on it. Where a plan has islands a bucket
travels in two hops.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, make_buckets
from hetero_megatron.plan.islands import hop_elements
from hetero_megatron.planner.bucket_flows import (
    Flows,
    Places,
    PortTraffic,
    Price,
    bucket_flows,
    of_traffic,
    one_after_the_other,
    port_traffic,
    price,
)
from hetero_megatron.planner.costs import CostModel, UnitSeconds
from hetero_megatron.planner.network import Network
from hetero_megatron.spec import logical_tensors

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """When one bucket travels, in seconds from the start of the step."""

    bucket: int
    start: float
    end: float


@dataclass
class Host:
    """One rank's own time in an exchange of all its buckets.

    Attributes:
        delay: seconds of packing and summing so far; last: when it last sent a bucket.
        under_way: (arrival, seconds to sum or unpack it) of buckets that it waits for.
    """

    delay: float = 0.0
    last: float = 0.0
    under_way: deque[tuple[float, float]] = field(default_factory=deque)

    def send(self, ready: float, pack: float) -> float:
        """When the next bucket, whose content is there at ``ready`` but for the delay, is packed."""
        at = max(ready + self.delay, self.last)
        if len(self.under_way) == IN_FLIGHT:
            arrived, after = self.under_way.popleft()
            at = max(at, arrived) + after
            self.delay += after
        self.delay += pack
        self.last = at + pack
        return self.last

    def finish(self, at: float) -> float:
        """When everything is summed; ``at``: when the rank is done with all else."""
        end = max(at + self.delay, self.last)
        for arrived, after in self.under_way:
            end = max(end, arrived) + after
        return end


class _Hosts:
    """:class:`Host` of all ranks at once, as arrays: the last :data:`IN_FLIGHT` buckets of each in a ring."""

    def __init__(self, ranks: int) -> None:
        self.delay, self.last = np.zeros(ranks), np.zeros(ranks)
        self.sent = np.zeros(ranks, np.int64)
        self.arrived = np.full((ranks, IN_FLIGHT), -np.inf)
        self.after = np.zeros((ranks, IN_FLIGHT))

    def send(self, at: Ints, ready: Floats, pack: Floats | float) -> Floats:
        slot = self.sent[at] % IN_FLIGHT  # of the oldest
        after = self.after[at, slot]
        begin = np.maximum(ready + self.delay[at], self.last[at])
        begin = np.maximum(begin, self.arrived[at, slot]) + after + pack
        self.delay[at] += after + pack
        self.last[at] = begin
        return begin

    def travel(self, at: Ints, end: float, after: Floats | float) -> None:
        slot = self.sent[at] % IN_FLIGHT
        self.arrived[at, slot], self.after[at, slot] = end, after
        self.sent[at] += 1

    def finish(self, idle: Floats) -> Floats:
        end = np.maximum(idle + self.delay, self.last)
        rows = np.arange(len(end))
        for k in range(IN_FLIGHT):  # the oldest first
            slot = (self.sent + k) % IN_FLIGHT
            end = np.maximum(end, self.arrived[rows, slot]) + self.after[rows, slot]
        return end


class _Structure:
    """Which elements of which bucket go where; arrays are over the plan's ranks in ascending order."""

    def __init__(self, plan: Plan, model: CostModel, network: Network) -> None:
        self.model, self.cluster, self.network = model.model, model.cluster, network
        self.buckets = make_buckets(plan, model.model)
        self.places = Places(plan.ranks, network)
        self.owned = np.zeros(len(plan.ranks), np.int64)
        self.held = np.zeros(len(plan.ranks), np.int64)
        self._ranks: dict[tuple[int, ...], Ints] = {}
        # Equal for buckets that move the same between the same ranks, by index.
        self.keys = [(*map(id, b.holders.values()), *map(id, b.owners.values())) for b in self.buckets]
        self._at = [self._places_of(b.ranks) for b in self.buckets]
        self._flows: dict[tuple[int, ...], Flows] = {}
        self._traffic: dict[tuple[object, ...], tuple[PortTraffic, ...]] = {}
        for bucket in self.buckets:
            flows = self.flows(bucket)
            self.owned[flows.at] += flows.mine
            self.held[flows.at] += flows.held
        self.heads, self.following = self._order()

    def serves(self, model: CostModel) -> bool:
        return self.model == model.model and self.cluster is model.cluster

    def _places_of(self, ranks: tuple[int, ...]) -> Ints:
        if ranks not in self._ranks:
            self._ranks[ranks] = np.array([self.places.index[r] for r in ranks], np.int64)
        return self._ranks[ranks]

    def at(self, bucket: Bucket) -> Ints:
        """Places of the bucket's ranks."""
        return self._at[bucket.index]

    def flows(self, bucket: Bucket) -> Flows:
        key = self.keys[bucket.index]
        if key not in self._flows:
            self._flows[key] = bucket_flows(bucket, self.at(bucket))
        return self._flows[key]

    def traffic(self, bucket: Bucket, spread: bool) -> tuple[PortTraffic, ...]:
        """In elements, hop after hop; from holders to owners, or back to spread the new parameters."""
        key = (self.keys[bucket.index], spread)
        if key not in self._traffic:
            if len(bucket.hops) == 1:
                self._traffic[key] = (port_traffic(self.flows(bucket), self.places, spread),)
            else:
                hops = [[(*ends, float(n)) for ends, n in hop_elements(hop).items() if n] for hop in bucket.hops]
                if spread:
                    hops = [[(b, a, n) for a, b, n in hop] for hop in hops]
                self._traffic[key] = tuple(of_traffic(self.network.traffic(hop), self.places) for hop in hops)
        return self._traffic[key]

    def _order(self) -> tuple[dict[int, int], dict[int, list[tuple[int, int]]]]:
        """A rank sends its buckets in order: (ranks of each bucket that have an earlier one; by bucket: the ones that
        come next on some of its ranks, and on how many)."""
        latest = np.zeros(len(self.places.ranks), np.int64)  # 1 + index; 0: none
        missing: dict[int, int] = {}
        following: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for bucket in self.buckets:
            if len(bucket.ranks) > 1:
                at = self.at(bucket)
                counts = np.bincount(latest[at])
                missing[bucket.index] = int(counts[1:].sum())
                for earlier in np.flatnonzero(counts[1:]).tolist():
                    following[earlier].append((bucket.index, int(counts[earlier + 1])))
                latest[at] = bucket.index + 1
        return missing, following


class Synchronisation:
    """All buckets of a plan and their prices. What does not depend on rates is kept with the plan, for fits."""

    def __init__(self, plan: Plan, model: CostModel, network: Network) -> None:
        self.plan, self.model, self.network = plan, model, network
        known: _Structure | None = plan._cache.get("sync")
        if known is None or not known.serves(model):
            known = plan._cache["sync"] = _Structure(plan, model, network)
        self.structure = known
        self.all_buckets = self.structure.buckets
        self.buckets = [b for b in self.all_buckets if len(b.ranks) > 1]
        self.layer_of = {t.name: t.layer for t in logical_tensors(model.model)}
        ranks = self.structure.places.ranks.tolist()
        self.owned = dict(zip(ranks, self.structure.owned.tolist(), strict=True))
        self.held = dict(zip(ranks, self.structure.held.tolist(), strict=True))
        rates = [model.chip_rates(network.ranks[r].chip) for r in ranks]
        self._pack, self._add, self._unpack, self._fixed = (
            np.array([getattr(r, name) for r in rates]) for name in ("pack", "add", "unpack", "exchange_seconds")
        )
        self._prices: dict[tuple[object, ...], Price] = {}
        self._posting: dict[tuple[int, ...], float] = {}
        self._own: dict[tuple[object, ...], tuple[Floats, Floats]] = {}

    def elements(self, bucket: Bucket) -> Mapping[tuple[int, int], int]:
        """Elements from every holder to every owner of a bucket."""
        flows = self.structure.flows(bucket)
        source, target = np.nonzero(flows.volume[flows.kind])
        counts = flows.volume[flows.kind[source], target].tolist()
        pairs = zip(source.tolist(), target.tolist(), counts, strict=True)
        return {(bucket.ranks[i], bucket.ranks[j]): n for i, j, n in pairs}

    def price(self, bucket: Bucket, item: float, spread: bool) -> Price:
        traffic = self.structure.traffic(bucket, spread)
        key = (id(traffic), item)
        if key not in self._prices:
            if bucket.ranks not in self._posting:
                self._posting[bucket.ranks] = self.network.posting(bucket.ranks)
            hops = [price(hop, item, self.network) for hop in traffic]
            self._prices[key] = one_after_the_other(hops, self._posting[bucket.ranks])
        return self._prices[key]

    def last_backwards(
        self, begin: Mapping[int, float], parts: Mapping[int, UnitSeconds]
    ) -> Callable[[Bucket], Floats]:
        """When the members of a bucket have its gradients; ``begin``: of each rank's last backward, ``parts``: its
        parts."""
        structure = self.structure
        ranks = structure.places.ranks.tolist()
        start = np.array([begin[r] for r in ranks])
        kinds: dict[tuple[object, ...], int] = {}
        kind = np.zeros(len(ranks), np.int64)
        rows: list[tuple[Stage, UnitSeconds]] = []
        for pipeline in self.plan.pipelines:
            for stage in pipeline.stages:
                for rank in stage.ranks:
                    key = (stage.layers, stage.embed, stage.head, stage.recompute, id(parts[rank]))
                    if key not in kinds:
                        kinds[key] = len(rows)
                        rows.append((stage, parts[rank]))
                    kind[structure.places.index[rank]] = kinds[key]
        present: dict[int, Ints] = {}

        def ready(bucket: Bucket) -> Floats:
            at = structure.at(bucket)
            if id(at) not in present:
                present[id(at)] = np.flatnonzero(np.bincount(kind[at]))
            layers = [self.layer_of[name] for name in bucket.names]
            into = np.zeros(len(rows))
            for k in present[id(at)].tolist():
                stage, part = rows[k]
                into[k] = self._into_backward(stage, part, layers)
            return np.asarray(start[at] + into[kind[at]])

        return ready

    @staticmethod
    def _into_backward(stage: Stage, part: UnitSeconds, layers: Sequence[int | str]) -> float:
        """Seconds after the start of a backward at which the gradients of these layers are there."""
        head = part.head[1] if stage.head else 0.0
        decoder = [i for i in layers if isinstance(i, int)]
        # Recomputed layers run again just before their backward, so they are spread evenly over it.
        full = {"full": stage.num_layers, "first": stage.recompute.layers}.get(stage.recompute.kind, 0)
        each = part.layer[1] + (full * part.layer[0] / stage.num_layers if stage.num_layers else 0.0)
        if "embed" in layers and stage.embed:
            return part.action + head + stage.num_layers * each + part.embed[1]
        if decoder:
            held = stage.layer_indices()
            return part.action + head + (len(held) - held.index(min(decoder))) * each
        return part.action + head

    def host_seconds(self, bucket: Bucket, item: float, spread: bool) -> tuple[Floats, Floats]:
        """(before, after) a bucket travels, by rank: packing what others get; summing gradients, or writing
        parameters."""
        key = (self.structure.keys[bucket.index], item, spread)
        if key not in self._own:
            flows = self.structure.flows(bucket)
            pack, add, unpack, fixed = (x[flows.at] for x in (self._pack, self._add, self._unpack, self._fixed))
            if spread:  # owners give what they took
                self._own[key] = flows.taken * item * pack + fixed, flows.given * item * unpack + fixed
            else:
                summed = (flows.taken + flows.owned) * item * add + fixed * len(bucket.ranks)
                self._own[key] = flows.given * item * pack + fixed, summed
        return self._own[key]

    def run(
        self, ready: Callable[[Bucket], Floats], idle: Mapping[int, float], item: float, spread: bool
    ) -> tuple[dict[int, float], list[Span]]:
        """(when each rank is done with all its buckets, when each bucket travels).

        Args:
            ready: seconds at which each rank of a bucket has its content, packing and summing of others not counted.
            idle: when each rank is done with all else; item: bytes per element; spread: from owners to holders.
        """
        sharded = self.model.options.sharded  # an all-reduce packs and adds on the way
        places = self.structure.places
        hosts = _Hosts(len(places.ranks))
        missing = dict(self.structure.heads)
        heap: list[tuple[float, int]] = []
        free = np.zeros(places.ports)
        spans = []

        def launch(bucket: Bucket) -> None:
            pack = self.host_seconds(bucket, item, spread)[0] if sharded else 0.0
            sent = hosts.send(self.structure.at(bucket), ready(bucket), pack)
            heapq.heappush(heap, (float(sent.max()), bucket.index))

        for bucket in self.buckets:
            if not missing[bucket.index]:
                launch(bucket)
        while heap:
            at, index = heapq.heappop(heap)
            bucket = self.all_buckets[index]
            cost = self.price(bucket, item, spread)
            start = max(at, float(free[cost.ports].max())) if len(cost.ports) else at
            free[cost.ports] = start + cost.busy
            end = start + cost.seconds + cost.latency
            spans.append(Span(index, start, end))
            after = self.host_seconds(bucket, item, spread)[1] if sharded else 0.0
            hosts.travel(self.structure.at(bucket), end, after)
            for following, count in self.structure.following[index]:
                missing[following] -= count
                if not missing[following]:
                    launch(self.all_buckets[following])
        ranks = places.ranks.tolist()
        done = hosts.finish(np.array([idle[r] for r in ranks]))
        return dict(zip(ranks, done.tolist(), strict=True)), spans
