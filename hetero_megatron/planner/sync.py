"""Gradient reduction and parameter spread of a concrete plan, action by action, on the ports of its chips and nodes.

The same actions as the runtime's (:func:`~hetero_megatron.plan.buckets.bucket_actions`): a bucket is sent when all its
ranks have its gradients, which happens during the last backward, and fewer than ``IN_FLIGHT`` are under way; every rank
starts its actions in order and packs, sums and unpacks them itself; actions that share a chip's link or a node's cards
take turns on it. Where a plan has islands a bucket travels in two hops, the second when the rank's first has ended.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, bucket_actions, make_buckets
from hetero_megatron.plan.islands import hop_elements
from hetero_megatron.planner.costs import CostModel, UnitSeconds
from hetero_megatron.planner.loads import back_copies
from hetero_megatron.planner.network import Exchange, Network, Traffic, volumes
from hetero_megatron.spec import logical_tensors


@dataclass(frozen=True)
class Span:
    """When one hop of a bucket travels, in seconds from the start of the step."""

    bucket: int
    start: float
    end: float
    hop: int = 0


@dataclass
class Share:
    """Elements of one exchange on one rank: given to others to sum, taken from others, its own among what it sums."""

    given: int = 0
    taken: int = 0
    owned: int = 0


class Content:
    """What some ranks exchange: elements from every one to every other, towards the owners."""

    def __init__(self, ranks: tuple[int, ...], elements: Mapping[tuple[int, int], int]) -> None:
        self.ranks, self.elements = ranks, elements
        self.shares = {rank: Share() for rank in ranks}
        for (src, dst), count in elements.items():
            if src == dst:
                self.shares[src].owned += count
            else:
                self.shares[src].given += count
                self.shares[dst].taken += count
        self.traffic: dict[bool, Traffic] = {}  # in elements; True: back, to spread the new parameters


@dataclass(frozen=True, eq=False)
class Meeting:
    """The ranks that do one action on a bucket together."""

    bucket: Bucket
    hop: int
    content: Content

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.content.ranks


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


@dataclass
class _Host(Host):
    """Which buckets ``under_way`` are is in ``buckets``."""

    buckets: deque[int] = field(default_factory=deque)

    def start(self, bucket: int, hop: int, spread: bool, ready: float, pack: float) -> float:
        """When a hop of a bucket is packed: first its hop before has ended, and others where too many are under way."""
        at = max(ready + self.delay, self.last)
        while self.under_way and (bucket in self.buckets or self._full(hop, spread)):
            arrived, after = self.under_way.popleft()
            self.buckets.popleft()
            at = max(at, arrived) + after
            self.delay += after
        self.delay += pack
        self.last = at + pack
        return self.last

    def _full(self, hop: int, spread: bool) -> bool:
        if spread:
            return len(self.under_way) >= IN_FLIGHT
        return hop == 0 and len(set(self.buckets)) >= IN_FLIGHT


class _Structure:
    """Who exchanges which elements of which bucket."""

    def __init__(self, plan: Plan, model: CostModel, network: Network) -> None:
        self.model, self.cluster, self.network = model.model, model.cluster, network
        self.buckets = make_buckets(plan, model.model)
        self.owned: dict[int, int] = defaultdict(int)
        self.held: dict[int, int] = defaultdict(int)
        self.meetings: dict[int, list[list[Meeting]]] = {}  # by bucket and hop; a rank alone meets nobody
        contents: dict[tuple[int, ...], list[list[Content]]] = {}
        known: dict[int, list[tuple[int, int]]] = {}
        for bucket in self.buckets:
            for layouts, total in ((bucket.owners, self.owned), (bucket.holders, self.held)):
                for layout in layouts.values():
                    if id(layout) not in known:
                        known[id(layout)] = [(r, layout.elements(r)) for r in layout.ranks]
                    for rank, count in known[id(layout)]:
                        total[rank] += count
            if len(bucket.ranks) > 1:
                key = tuple(id(layout) for layout in (*bucket.holders.values(), *bucket.owners.values()))
                if key not in contents:
                    contents[key] = _contents(bucket)
                self.meetings[bucket.index] = [
                    [Meeting(bucket, h, content) for content in row] for h, row in enumerate(contents[key])
                ]

    def serves(self, model: CostModel) -> bool:
        return self.model == model.model and self.cluster is model.cluster

    def traffic(self, content: Content, spread: bool) -> Traffic:
        if spread not in content.traffic:
            pairs = ((pair, float(n)) for pair, n in content.elements.items() if n)
            content.traffic[spread] = self.network.traffic((b, a, n) if spread else (a, b, n) for (a, b), n in pairs)
        return content.traffic[spread]


def _contents(bucket: Bucket) -> list[list[Content]]:
    """By hop."""
    if len(bucket.hops) == 1:
        total: dict[tuple[int, int], int] = defaultdict(int)
        for name in bucket.names:
            for pair, count in volumes(bucket.holders[name], bucket.owners[name]).items():
                total[pair] += count
        return [[Content(bucket.ranks, total)]]
    out = []
    for hop in bucket.hops:
        parts: dict[tuple[int, ...], dict[tuple[int, int], int]] = {ranks: {} for ranks in hop.groups}
        group_of = {rank: ranks for ranks in hop.groups for rank in ranks}
        for (src, dst), count in hop_elements(hop).items():
            parts[group_of[src]][src, dst] = count
        out.append([Content(ranks, part) for ranks, part in parts.items() if len(ranks) > 1])
    return out


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

    def meetings(self, bucket: Bucket, spread: bool) -> list[list[Meeting]]:
        """Who meets in each action on a bucket, in the order of the actions."""
        hops = self.structure.meetings[bucket.index]
        return [hops[action.chunk] for action in bucket_actions(bucket, spread)]

    def price(self, meeting: Meeting, item: float, spread: bool) -> Exchange:
        content = meeting.content
        key = (id(content), item, spread)
        if key not in self._prices:
            found = self.network.price(self.structure.traffic(content, spread), item, collective=True)
            if content.ranks not in self._posting:
                self._posting[content.ranks] = self.network.posting(content.ranks)
            self._prices[key] = Exchange(found.ports, found.latency + self._posting[content.ranks], found.link)
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

    def host_seconds(self, meeting: Meeting, rank: int, item: float, spread: bool) -> tuple[float, float]:
        """(before, after) it travels: packing what others get; summing gradients, or writing parameters."""
        rates, share = self.model.chip_rates(self.network.ranks[rank].chip), meeting.content.shares[rank]
        fixed, count, dense = rates.exchange_seconds, len(meeting.ranks), meeting.bucket.dense
        if spread:  # owners give what they took
            packed, unpacked = back_copies(share.given, share.taken, dense, count)
            return packed * item * rates.pack + fixed, unpacked * item * rates.unpack + fixed
        summed = (share.taken + share.owned) * item * rates.add + fixed * count
        return (0 if dense else share.given) * item * rates.pack + fixed, summed

    def run(
        self, ready: Callable[[Bucket, int], float], idle: Mapping[int, float], item: float, spread: bool
    ) -> tuple[dict[int, float], list[Span]]:
        """(when each rank is done with all its buckets, when each bucket travels).

        Args:
            ready: seconds at which a rank has the content of a bucket, packing and summing of others not counted.
            idle: when each rank is done with all else; item: bytes per element; spread: from owners to holders.
        """
        sharded = self.model.options.sharded  # an all-reduce packs and adds on the way
        hosts = {rank: _Host() for rank in idle}
        queues: dict[int, deque[Meeting]] = defaultdict(deque)  # a rank does its actions in order
        every = [m for bucket in self.buckets for row in self.meetings(bucket, spread) for m in row]
        for meeting in every:
            for rank in meeting.ranks:
                queues[rank].append(meeting)
        missing = {id(m): sum(queues[r][0] is not m for r in m.ranks) for m in every}
        heap: list[tuple[float, int]] = []
        number = {id(m): i for i, m in enumerate(every)}
        free: dict[object, float] = defaultdict(float)
        spans = []

        def launch(meeting: Meeting) -> None:
            bucket, at = meeting.bucket, 0.0
            for r in meeting.ranks:
                pack = self.host_seconds(meeting, r, item, spread)[0] if sharded else 0.0
                at = max(at, hosts[r].start(bucket.index, meeting.hop, spread, ready(bucket, r), pack))
            heapq.heappush(heap, (at, number[id(meeting)]))

        for meeting in every:
            if not missing[id(meeting)]:
                launch(meeting)
        while heap:
            at, index = heapq.heappop(heap)
            meeting = every[index]
            price = self.price(meeting, item, spread)
            start = max([at, *(free[port] for port in price.ports)])
            for port, seconds in price.ports.items():
                free[port] = start + seconds
            end = start + price.seconds + price.latency
            spans.append(Span(meeting.bucket.index, start, end, meeting.hop))
            for rank in meeting.ranks:
                after = self.host_seconds(meeting, rank, item, spread)[1] if sharded else 0.0
                hosts[rank].under_way.append((end, after))
                hosts[rank].buckets.append(meeting.bucket.index)
                queues[rank].popleft()
            for following in {id(queues[r][0]): queues[r][0] for r in meeting.ranks if queues[r]}.values():
                missing[id(following)] = sum(queues[r][0] is not following for r in following.ranks)
                if not missing[id(following)]:
                    launch(following)
        return {rank: host.finish(idle[rank]) for rank, host in hosts.items()}, spans
