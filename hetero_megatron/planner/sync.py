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
from hetero_megatron.plan.buckets import Bucket
from hetero_megatron.planner.costs import CostModel, UnitSeconds
from hetero_megatron.planner.network import Exchange, Flow, Network, volumes
from hetero_megatron.spec import logical_tensors


@dataclass(frozen=True)
class Span:
    """When one bucket travels, in seconds from the start of the step."""

    bucket: int
    start: float
    end: float


class Synchronisation:
    """All buckets of a plan and their prices."""

    def __init__(self, plan: Plan, model: CostModel, buckets: Sequence[Bucket], network: Network) -> None:
        self.plan, self.model, self.network = plan, model, network
        self.buckets = [b for b in buckets if len(b.ranks) > 1]
        self.all_buckets = buckets
        self.layer_of = {t.name: t.layer for t in logical_tensors(model.model)}
        self.owned = self._owned(buckets)
        self._volumes: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
        self._prices: dict[tuple[object, ...], Exchange] = {}

    @staticmethod
    def _owned(buckets: Sequence[Bucket]) -> Mapping[int, int]:
        """Elements that each rank owns and updates."""
        known: dict[int, list[tuple[int, int]]] = {}
        out: dict[int, int] = defaultdict(int)
        for bucket in buckets:
            for layout in bucket.owners.values():
                if id(layout) not in known:
                    known[id(layout)] = [(r, layout.elements(r)) for r in layout.ranks]
                for rank, count in known[id(layout)]:
                    out[rank] += count
        return out

    def elements(self, bucket: Bucket) -> dict[tuple[int, int], int]:
        """Elements from every holder to every owner of a bucket."""
        key = tuple(id(layout) for layout in (*bucket.holders.values(), *bucket.owners.values()))
        if key not in self._volumes:
            total: dict[tuple[int, int], int] = defaultdict(int)
            for name in bucket.names:
                for pair, count in volumes(bucket.holders[name], bucket.owners[name]).items():
                    total[pair] += count
            self._volumes[key] = dict(total)
        return self._volumes[key]

    def price(self, bucket: Bucket, item: int, spread: bool) -> Exchange:
        elements = self.elements(bucket)
        key = (id(elements), item, spread)
        if key not in self._prices:
            flows: list[Flow] = [
                (b, a, n * item) if spread else (a, b, n * item) for (a, b), n in elements.items() if n and a != b
            ]
            found = self.network.exchange(flows, collective=True)
            # Posting: a rank sends and receives one message per other member.
            peers = len(bucket.ranks) - 1
            first, second = bucket.ranks[:2]
            posting = max(self.network.message_seconds(r, second if r == first else first) for r in bucket.ranks)
            self._prices[key] = Exchange(found.ports, found.latency + peers * posting)
        return self._prices[key]

    def ready_at(self, bucket: Bucket, begin: Mapping[int, float], parts: Mapping[int, UnitSeconds]) -> float:
        """When all members have the bucket's gradients; ``begin``: of each rank's last backward."""
        stages = self._stages()
        layers = [self.layer_of[name] for name in bucket.names]
        return max(begin[r] + self._into_backward(stages[r], parts[r], layers) for r in bucket.ranks)

    def _stages(self) -> Mapping[int, Stage]:
        if not hasattr(self, "_by_rank"):
            self._by_rank = {r: s for p in self.plan.pipelines for s in p.stages for r in s.ranks}
        return self._by_rank

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

    def run(self, ready: Callable[[Bucket], float], item: int, spread: bool) -> tuple[dict[int, float], list[Span]]:
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
