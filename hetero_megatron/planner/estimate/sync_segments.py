"""What gradient synchronisation of a plan template moves, and over which links, from where the replicas of each stage
are placed.

Each element has one owner among its holders (a distributed optimizer); holders send gradients to the owners and receive
new parameters. Messages are priced as in :mod:`~hetero_megatron.predictor.cost.link_model`: a node sends at the rate of
its fastest link, and to one other node at the rate of the link between them. Tensors that the ranks of a TP group hold
alike (norms) contribute only latency and summing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import NodeClasses, PlanTemplate, StageId, StageTemplate
from hetero_megatron.plans.buckets import BUCKET_BYTES
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkPrice
from hetero_megatron.utils.cached_method import cached_method

SINGLE = 8  # buckets of a segment up to which each is one event, as in the simulator; more travel together
Port = tuple[int, ...]  # (node class,): a node's network cards; (part, stage, 0): a chip's own link


@dataclass(frozen=True)
class BucketRun:
    """Consecutive buckets of a segment that travel as one event.

    Attributes:
        count: their number; fraction: of the segment's elements.
        layers: of the segment, counted from the last one, whose gradients a single bucket waits for; embed: whether it
            has the embedding.
    """

    count: int
    fraction: float = 1.0
    layers: int = 0
    embed: bool = False


@dataclass
class SyncSegment:
    """Consecutive layers (or embedding, or head) with the same holders, which are reduced together.

    Attributes:
        held: elements per rank, by stage.
        lowest: by stage, how many of the stage's layers come before this segment.
        copies: holders of each element; ranks: holders in all; total: sum of the ranks' optimizer shares.
        share: by stage, the fraction of a copy's elements that its TP group owns.
        layers: number of layers; head, embed: elements of the head and of the embedding, whose gradients come first and
            last in backward; elements: of one copy; bucket, last: elements in a bucket of
            layers on average, and in the last one.
        ports: seconds per byte of an element that each port is busy; link: the same for the most loaded pair of ends.
        latency: seconds, including the hosts' time per message.
        runs: what travels, in order: every bucket, or where there are many, all at once.
    """

    held: dict[StageId, float]
    lowest: dict[StageId, int]
    copies: int
    ranks: int
    total: int
    share: dict[StageId, float]
    layers: int = 0
    head: int = 0
    embed: int = 0
    elements: int = 0
    bucket: float = BUCKET_BYTES // 4
    last: int = 0
    ports: dict[Port, float] = field(default_factory=dict)
    link: float = 0.0
    latency: float = 0.0
    runs: tuple[BucketRun, ...] = ()

    @property
    def buckets(self) -> int:
        layer_elements = max(self.held.values()) * self._fraction(self.elements - self.head - self.embed)
        return max(1, (self.head > 0) + (self.embed > 0) + math.ceil(layer_elements / self.bucket))

    @property
    def last_bucket(self) -> float:
        """Fraction of the segment in the last bucket: that of the embedding, which is not divided, or of layers."""
        return self._fraction(self.embed) or 1 / self.buckets

    @property
    def trailing(self) -> float:
        """Fraction of the segment that travels last, beside the first bucket of the next one."""
        if self.embed or not self.layers:  # a large head's norm is a bucket of its own
            return self._fraction(self.embed or self.head * (4 * self.head <= BUCKET_BYTES))
        return min(1.0, self.last / max(self.held.values()))

    def _fraction(self, elements: int) -> float:
        return elements / self.elements

    def complete(self, bucket: BucketRun, times: Mapping[StageId, LastBackward]) -> dict[StageId, float]:
        """When a single bucket's gradients are, by stage, in seconds from the start of the step."""
        if bucket.embed:
            return {stage_id: times[stage_id].done for stage_id in self.held}
        return {
            stage_id: times[stage_id].after_layers(self.lowest[stage_id] + self.layers - bucket.layers)
            for stage_id in self.held
        }

    def releases(self, times: Mapping[StageId, LastBackward]) -> list[tuple[float, dict[StageId, float]]]:
        """When gradients become complete where all buckets travel as one: those of a layer at the end of its backward,
        all at once. By head, first and last bucket of layers (those between are proportional), embedding: (fraction of
        the segment that is not complete before, by stage, seconds from the start of the step)."""
        share, completions = self.bucket / max(self.held.values()), []
        head, embed = self._fraction(self.head), self._fraction(self.embed)
        if head:
            completions.append(
                (1.0, {stage_id: times[stage_id].after_layers(times[stage_id].layers) for stage_id in self.held})
            )
        if self.layers:
            layer_fraction = (1 - head - embed) / self.layers
            bucket_layers = (
                min(self.layers, max(1, int(share / layer_fraction))) if layer_fraction > 0 else self.layers
            )
            last = {stage_id: times[stage_id].after_layers(self.lowest[stage_id]) for stage_id in self.held}
            if self.layers > bucket_layers:
                others = self.layers - bucket_layers
                completions.append(
                    (1 - head, {stage_id: end - others * times[stage_id].layer for stage_id, end in last.items()})
                )
            completions.append((layer_fraction * bucket_layers + embed, last))
        if embed:
            completions.append((embed, {stage_id: times[stage_id].done for stage_id in self.held}))
        return completions


@dataclass
class SyncLoads:
    """Attributes:
        segments: in the order of backward.
        shared: by stage, the sum over its layers of dp / copies."""

    segments: list[SyncSegment] = field(default_factory=list)
    shared: dict[StageId, float] = field(default_factory=lambda: defaultdict(float))


def sync_loads(template: PlanTemplate, classes: NodeClasses, links: LinkTable, costs: CostModel) -> SyncLoads:
    """The loads of all layers, embedding and head."""
    loads = SyncLoads()
    spans: list[tuple[StageId, int, int, StageTemplate, int]] = []
    for p, part in enumerate(template.parts):
        start = 0
        for s, stage in enumerate(part.shape.stages):
            spans.append(((p, s), start, start + stage.layers, stage, len(part.shape.stages)))
            start += stage.layers
    stages = {stage_id: stage for stage_id, _, _, stage, _ in spans}
    cuts = sorted({x for _, a, b, _, _ in spans for x in (a, b)})
    segments: list[tuple[tuple[StageId, ...], int, int, str]] = [
        (tuple(stage_id for stage_id, _, _, _, n in spans if stage_id[1] == n - 1), 0, 0, "head")
    ]
    for a, b in list(zip(cuts, cuts[1:]))[::-1]:
        segments.append((tuple(stage_id for stage_id, lo, hi, _, _ in spans if lo <= a and hi >= b), a, b - a, ""))
    segments.append((tuple(stage_id for stage_id, _, _, _, _ in spans if stage_id[1] == 0), 0, 0, "embed"))
    starts = {stage_id: lo for stage_id, lo, _, _, _ in spans}
    earlier_holders: tuple[StageId, ...] = ()
    for holders, first, layers, end in segments:
        copies = sum(classes.units[stage_id] for stage_id in holders)
        ranks = sum(classes.units[stage_id] * stages[stage_id].tp for stage_id in holders)
        total = sum(classes.units[stage_id] * stages[stage_id].tp * stages[stage_id].share for stage_id in holders)
        for stage_id in holders:
            shared = layers or not stages[stage_id].layers  # a stage without layers only has embedding or head
            loads.shared[stage_id] += (
                shared * stages[stage_id].dp * stages[stage_id].tp * stages[stage_id].share / total
            )
        if ranks <= 1:  # a TP group of several ranks still sums the tensors that they all hold
            earlier_holders = ()
            continue
        if holders != earlier_holders:
            share = {stage_id: stages[stage_id].tp * stages[stage_id].share / total for stage_id in holders}
            loads.segments.append(SyncSegment(dict.fromkeys(holders, 0.0), {}, copies, ranks, total, share))
        segment, earlier_holders = loads.segments[-1], holders
        segment.layers += layers
        least_tp = min(stages[stage_id].tp for stage_id in holders)
        segment.last = costs.memory.last_bucket(least_tp)
        segment.bucket = costs.memory.mean_bucket(least_tp)
        elements = costs.memory.trained(1, layers, end == "embed", end == "head")
        segment.head += elements * (end == "head")
        segment.embed += elements * (end == "embed")
        segment.elements += elements
        for stage_id in holders:
            segment.held[stage_id] += costs.memory.trained(stages[stage_id].tp, layers, end == "embed", end == "head")
            if layers or stage_id not in segment.lowest:
                segment.lowest[stage_id] = (
                    first - starts[stage_id] if layers else stages[stage_id].layers * (end == "head")
                )
    loads.segments = [segment for segment in loads.segments if segment.elements]  # adapters leave some with nothing
    for segment in loads.segments:
        _price_segment(segment, classes, stages, links)
        segment.runs = _bucket_runs(segment, min(stages[stage_id].tp for stage_id in segment.held), costs)
    return loads


def _bucket_runs(segment: SyncSegment, tp: int, costs: CostModel) -> tuple[BucketRun, ...]:
    """``tp``: the least degree of its TP groups, whose ranks hold most."""
    if segment.buckets > SINGLE:
        return (BucketRun(segment.buckets),)
    rows = costs.memory.bucket_rows(tp, segment.layers, segment.embed > 0, segment.head > 0)
    total = sum(elements for elements, _, _ in rows)
    return tuple(BucketRun(1, elements / total, layers, embed) for elements, layers, embed in rows)


def _price_segment(
    segment: SyncSegment, classes: NodeClasses, stages: Mapping[StageId, StageTemplate], links: LinkTable
) -> None:
    """Fill in ``ports``, ``link`` and ``latency``. Equal nodes have equal ports, so each class of nodes is priced once;
    the nodes of a TP group that spans several are equal too."""
    nodes: Counter[int] = Counter()  # optimizer shares on one node of each class, or on those that its TP groups span
    on_node: Counter[int] = Counter()  # of these, on one node
    units: Counter[int] = Counter()  # copies by group
    inside_units: Counter[int] = Counter()

    def here(at: StageId, group: int) -> int:
        """Ranks of a TP group on one node."""
        return min(stages[at].tp, links.pool.groups[group].per_node)

    for stage_id in segment.held:
        for c, n in classes.nodes[stage_id].items():
            nodes[c] += n * stages[stage_id].tp * stages[stage_id].share
            on_node[c] += n * here(stage_id, classes.group[c]) * stages[stage_id].share
            units[classes.group[c]] += n * classes.count[c]
            inside_units[c] += n
    total: Counter[int] = Counter()  # by group
    largest_node: dict[int, int] = defaultdict(int)  # on one node of the group
    count: Counter[int] = Counter()  # nodes
    for c, n in nodes.items():
        g = classes.group[c]
        total[g] += n * classes.count[c]
        largest_node[g], count[g] = max(largest_node[g], on_node[c]), count[g] + classes.count[c] + (on_node[c] < n)
    groups = sorted(units)
    message = 0.0
    for stage_id, elements in segment.held.items():
        tp = stages[stage_id].tp
        # Most of what a rank holds that one other rank owns.
        owners = [stages[b] for b in segment.held if b != stage_id or classes.units[stage_id] > 1]
        largest = elements * max((b.share * min(tp, b.tp) for b in owners), default=0) / segment.total
        for c, stage_nodes in classes.nodes[stage_id].items():
            g = classes.group[c]
            inside, others_inside = nodes[c], inside_units[c] - 1
            group = links.between(g, g, tp <= links.pool.groups[g].per_node) if tp > 1 else None
            if group is not None:  # tensors that its ranks hold alike
                segment.latency, message = max(segment.latency, group.alpha), max(message, group.message)
            inside_link = links.between(g, g, True) if others_inside else None
            if inside_link is not None:
                sent_fraction = (inside - tp * stages[stage_id].share) / segment.total
                port_seconds = elements * max(
                    sent_fraction * inside_link.out, segment.share[stage_id] * others_inside * inside_link.into
                )
                segment.ports[*stage_id, 0] = max(segment.ports.get((*stage_id, 0), 0.0), port_seconds)
                segment.link = max(segment.link, largest * inside_link.pair)
                segment.latency, message = max(segment.latency, inside_link.alpha), max(message, inside_link.message)
            out = into = 0.0
            for h in groups:
                shares_elsewhere = total[h] - (inside if h == g else 0)
                copies = units[h] - (inside_units[c] if h == g else 0)
                onward, back = links.between(g, h), links.between(h, g)
                if not shares_elsewhere or onward is None or back is None:
                    continue
                out, into = (
                    out + shares_elsewhere / segment.total * onward.out,
                    into + copies * segment.share[stage_id] * back.into,
                )
                if h != g or count[g] > 1:
                    between = stage_nodes * here(stage_id, g) * elements / segment.total * largest_node[h] * max(
                        onward.link, back.link
                    )
                    segment.link = max(segment.link, between, largest * max(onward.pair, back.pair))
                segment.latency, message = max(segment.latency, onward.alpha), max(message, onward.message)
            if out:
                segment.ports[(c,)] = segment.ports.get((c,), 0.0) + stage_nodes * here(stage_id, g) * elements * max(
                    out, into
                )
    segment.latency += (segment.ranks - 1) * message


@dataclass(frozen=True)
class LastBackward:
    """A stage's last backward of a step, in seconds from the start of the step.

    Attributes:
        begin, done: start and end.
        layer: duration of one layer; plain: of everything but the embedding.
    """

    begin: float
    done: float
    layer: float
    plain: float
    layers: int

    def after_layers(self, below: int) -> float:
        """When the gradients of all layers but the ``below`` first ones of the stage are complete (s)."""
        return self.begin + self.plain - below * self.layer


class LinkTable:
    """:class:`LinkPrice` of collectives per (source group, target group, same_node)."""

    def __init__(self, pool: DevicePool, costs: CostModel) -> None:
        self.pool, self.model = pool, costs.links

    @cached_method
    def between(self, g: int, h: int, same_node: bool = False) -> LinkPrice | None:
        """The price of a link between two nodes of these groups, or inside one node; None where there is no such link.
        """
        groups = self.pool.groups
        exists = self.pool.link(g, h, same_node) is not None and all(groups[i].ranks for i in (g, h))
        return self.model.link(groups[g].home, groups[h].home, same_node, "all_to_all") if exists else None

    @cached_method
    def best(self, g: int, same_node: bool) -> tuple[float, float]:
        """(least seconds per byte of a node's port in either direction, least latency in seconds) over all links of a
        group."""
        partners: Sequence[int] = [g] if same_node else range(len(self.pool.groups))
        out, into = (
            [price for price in prices if price is not None]
            for prices in zip(*((self.between(g, h, same_node), self.between(h, g, same_node)) for h in partners))
        )
        rates = [*(price.out for price in out), *(price.into for price in into)]
        return min(rates, default=math.inf), min((price.alpha for price in (*out, *into)), default=math.inf)
