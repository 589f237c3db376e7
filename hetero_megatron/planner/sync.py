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

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, make_buckets
from hetero_megatron.plan.islands import hop_elements
from hetero_megatron.planner.costs import CostModel, UnitSeconds
from hetero_megatron.planner.network import Exchange, Network, Port, Traffic, volumes
from hetero_megatron.spec import logical_tensors


@dataclass(frozen=True)
class Span:
    """When one bucket travels, in seconds from the start of the step."""

    bucket: int
    start: float
    end: float


@dataclass
class Share:
    """Elements of one bucket on one rank: given to other owners, taken from other holders, owned."""

    given: int = 0
    taken: int = 0
    owned: int = 0


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


class _Structure:
    """Which elements of which bucket go where."""

    def __init__(self, plan: Plan, model: CostModel, network: Network) -> None:
        self.model, self.cluster, self.network = model.model, model.cluster, network
        self.buckets = make_buckets(plan, model.model)
        self.owned: dict[int, int] = defaultdict(int)
        self.held: dict[int, int] = defaultdict(int)
        self.shares: dict[int, dict[int, Share]] = {}  # by bucket and rank
        self._elements: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
        self._traffic: dict[tuple[int, bool], tuple[Traffic, ...]] = {}
        known: dict[int, list[tuple[int, int]]] = {}
        for bucket in self.buckets:
            for layouts, total in ((bucket.owners, self.owned), (bucket.holders, self.held)):
                for layout in layouts.values():
                    if id(layout) not in known:
                        known[id(layout)] = [(r, layout.elements(r)) for r in layout.ranks]
                    for rank, count in known[id(layout)]:
                        total[rank] += count
            if len(bucket.ranks) > 1:
                self.shares[bucket.index] = shares = {rank: Share() for rank in bucket.ranks}
                for (src, dst), count in self.elements(bucket).items():
                    if src == dst:
                        shares[src].owned += count
                    else:
                        shares[src].given += count
                        shares[dst].taken += count

    def serves(self, model: CostModel) -> bool:
        return self.model == model.model and self.cluster is model.cluster

    def elements(self, bucket: Bucket) -> dict[tuple[int, int], int]:
        key = tuple(id(layout) for layout in (*bucket.holders.values(), *bucket.owners.values()))
        if key not in self._elements:
            total: dict[tuple[int, int], int] = defaultdict(int)
            for name in bucket.names:
                for pair, count in volumes(bucket.holders[name], bucket.owners[name]).items():
                    total[pair] += count
            self._elements[key] = dict(total)
        return self._elements[key]

    def traffic(self, bucket: Bucket, spread: bool) -> tuple[Traffic, ...]:
        """In elements, hop after hop; from holders to owners, or back to spread the new parameters."""
        elements = self.elements(bucket)
        key = (id(elements), spread)
        if key not in self._traffic:
            hops = [elements] if len(bucket.hops) == 1 else [hop_elements(hop) for hop in bucket.hops]
            self._traffic[key] = tuple(
                self.network.traffic(
                    (b, a, float(n)) if spread else (a, b, float(n)) for (a, b), n in hop.items() if n
                )
                for hop in hops
            )
        return self._traffic[key]


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
        self.owned = self.structure.owned
        self.stage_of = {r: s for p in plan.pipelines for s in p.stages for r in s.ranks}
        self._prices: dict[tuple[object, ...], Exchange] = {}
        self._posting: dict[tuple[int, ...], float] = {}
        self._into: dict[tuple[int, int, int], float] = {}

    def elements(self, bucket: Bucket) -> Mapping[tuple[int, int], int]:
        """Elements from every holder to every owner of a bucket."""
        return self.structure.elements(bucket)

    def price(self, bucket: Bucket, item: float, spread: bool) -> Exchange:
        traffic = self.structure.traffic(bucket, spread)
        key = (id(traffic), item)
        if key not in self._prices:
            hops = [self.network.price(hop, item, collective=True) for hop in traffic]
            ports: dict[Port, float] = defaultdict(float)
            for port, seconds in (pair for hop in hops for pair in hop.ports.items()):
                ports[port] += seconds
            if bucket.ranks not in self._posting:
                self._posting[bucket.ranks] = self.network.posting(bucket.ranks)
            latency = sum(hop.latency for hop in hops) + self._posting[bucket.ranks]
            link = hops[0].link if len(hops) == 1 else sum(hop.seconds for hop in hops)  # one hop after the other
            self._prices[key] = Exchange(dict(ports), latency, link)
        return self._prices[key]

    def ready_at(self, bucket: Bucket, rank: int, begin: float, part: UnitSeconds) -> float:
        """When a member has the bucket's gradients; ``begin``: of its last backward, ``part``: its parts."""
        key = (id(bucket), id(self.stage_of[rank]), id(part))
        if key not in self._into:
            layers = [self.layer_of[name] for name in bucket.names]
            self._into[key] = self._into_backward(self.stage_of[rank], part, layers)
        return begin + self._into[key]

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

    def host_seconds(self, bucket: Bucket, rank: int, item: float, spread: bool) -> tuple[float, float]:
        """(before, after) a bucket travels: packing what others get; summing gradients, or writing parameters."""
        rates, share = self.model.chip_rates(self.network.ranks[rank].chip), self.structure.shares[bucket.index][rank]
        fixed = rates.exchange_seconds
        if spread:  # owners give what they took
            return share.taken * item * rates.pack + fixed, share.given * item * rates.unpack + fixed
        summed = (share.taken + share.owned) * item * rates.add + fixed * len(bucket.ranks)
        return share.given * item * rates.pack + fixed, summed

    def run(
        self, ready: Callable[[Bucket, int], float], idle: Mapping[int, float], item: float, spread: bool
    ) -> tuple[dict[int, float], list[Span]]:
        """(when each rank is done with all its buckets, when each bucket travels).

        Args:
            ready: seconds at which a rank has the content of a bucket, packing and summing of others not counted.
            idle: when each rank is done with all else; item: bytes per element; spread: from owners to holders.
        """
        sharded = self.model.options.sharded  # an all-reduce packs and adds on the way
        hosts = {rank: Host() for rank in idle}
        queues: dict[int, deque[Bucket]] = defaultdict(deque)  # a rank sends its buckets in order
        for bucket in self.buckets:
            for rank in bucket.ranks:
                queues[rank].append(bucket)
        missing = {b.index: sum(queues[r][0] is not b for r in b.ranks) for b in self.buckets}
        heap: list[tuple[float, int]] = []
        by_index = {b.index: b for b in self.buckets}
        free: dict[object, float] = defaultdict(float)
        spans = []

        def launch(bucket: Bucket) -> None:
            packs = {r: self.host_seconds(bucket, r, item, spread)[0] if sharded else 0.0 for r in bucket.ranks}
            heapq.heappush(heap, (max(hosts[r].send(ready(bucket, r), packs[r]) for r in bucket.ranks), bucket.index))

        for bucket in self.buckets:
            if not missing[bucket.index]:
                launch(bucket)
        while heap:
            at, index = heapq.heappop(heap)
            bucket = by_index[index]
            price = self.price(bucket, item, spread)
            start = max([at, *(free[port] for port in price.ports)])
            for port, seconds in price.ports.items():
                free[port] = start + seconds
            end = start + price.seconds + price.latency
            spans.append(Span(index, start, end))
            for rank in bucket.ranks:
                after = self.host_seconds(bucket, rank, item, spread)[1] if sharded else 0.0
                hosts[rank].under_way.append((end, after))
                queues[rank].popleft()
            for following in {queues[r][0].index: queues[r][0] for r in bucket.ranks if queues[r]}.values():
                missing[following.index] = sum(queues[r][0] is not following for r in following.ranks)
                if not missing[following.index]:
                    launch(following)
        return {rank: host.finish(idle[rank]) for rank, host in hosts.items()}, spans
