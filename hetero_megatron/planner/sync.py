"""Gradient reduction and parameter spread of a concrete plan, bucket by bucket, on the ports of its chips and nodes.

The same buckets as the runtime's: a bucket is sent when all its ranks have its gradients, which happens during the last
backward; buckets of one group go in order; buckets that share a chip's link or a node's cards take turns on it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.buckets import Bucket, make_buckets
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


class _Structure:
    """Which elements of which bucket go where."""

    def __init__(self, plan: Plan, model: CostModel, network: Network) -> None:
        self.model, self.cluster, self.network = model.model, model.cluster, network
        self.buckets = make_buckets(plan, model.model)
        self.owned: dict[int, int] = defaultdict(int)
        self.held: dict[int, int] = defaultdict(int)
        self.moved: dict[int, int] = defaultdict(int)  # elements read and written to pack and to add
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
            for (src, dst), count in self.elements(bucket).items() if len(bucket.ranks) > 1 else ():
                if src != dst:
                    self.moved[src] += 2 * count
                    self.moved[dst] += 3 * count

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

    def ready_at(self, bucket: Bucket, begin: Mapping[int, float], parts: Mapping[int, UnitSeconds]) -> float:
        """When all members have the bucket's gradients; ``begin``: of each rank's last backward."""
        stages = self.stage_of
        layers = [self.layer_of[name] for name in bucket.names]
        return max(begin[r] + self._into_backward(stages[r], parts[r], layers) for r in bucket.ranks)

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

    def run(self, ready: Callable[[Bucket], float], item: float, spread: bool) -> tuple[dict[int, float], list[Span]]:
        """(when each rank has its last bucket, when each bucket travels).

        Args:
            ready: seconds at which all members of a bucket could start it.
            item: bytes per element; spread: from owners to holders.
        """
        queues: dict[tuple[int, ...], list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            queues[bucket.ranks].append(bucket)
        heap = [(ready(queue[0]), group) for group, queue in queues.items()]
        heapq.heapify(heap)
        position = dict.fromkeys(queues, 0)
        free: dict[object, float] = defaultdict(float)
        done: dict[int, float] = defaultdict(float)
        spans = []
        while heap:
            at, group = heapq.heappop(heap)
            bucket = queues[group][position[group]]
            price = self.price(bucket, item, spread)
            start = max([at, *(free[port] for port in price.ports)])
            for port, seconds in price.ports.items():
                free[port] = start + seconds
            end = start + price.seconds + price.latency
            spans.append(Span(bucket.index, start, end))
            for rank in group:
                done[rank] = max(done[rank], end)
            position[group] += 1
            if position[group] < len(queues[group]):
                heapq.heappush(heap, (max(ready(queues[group][position[group]]), start), group))
        return done, spans
