"""Estimate of gradient synchronisation for a plan template, from where the replicas of each stage are placed.

Each element has one owner among its holders (a distributed optimizer); holders send gradients to the owners and receive
new parameters. Messages are priced as in :mod:`~hetero_megatron.planner.cost.link_model`: a node sends at the rate of
its fastest link, and to one other node at the rate of the link between them. Tensors that the ranks of a TP group hold
alike (norms) contribute only latency and summing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_megatron.plan.buckets import BUCKET_BYTES, IN_FLIGHT
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.sync_host_cost import RankHost, back_copies
from hetero_megatron.planner.estimate.link_table import LinkTable
from hetero_megatron.planner.template.node_classes import NodeClasses, StageId
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate

Port = tuple[int, ...]  # (node class,): a node's network cards; (part, stage, 0): a chip's own link


@dataclass
class SyncSegment:
    """Consecutive layers (or embedding, or head) with the same holders, which are reduced together.

    Attributes:
        held: elements per rank, by stage.
        lowest: by stage, how many of the stage's layers come before this segment.
        copies: holders of each element; ranks: holders in all; total: sum of the ranks' optimizer shares.
        share: by stage, the fraction of a copy's elements that its TP group owns.
        embed: includes the embedding, whose gradients come last in backward.
        ports: seconds per byte of an element that each port is busy; link: the same for the most loaded pair of ends.
        latency: seconds, including the hosts' time per message.
    """

    held: dict[StageId, float]
    lowest: dict[StageId, int]
    copies: int
    ranks: int
    total: int
    share: dict[StageId, float]
    embed: bool = False
    ports: dict[Port, float] = field(default_factory=dict)
    link: float = 0.0
    latency: float = 0.0

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(max(self.held.values()) * 4 / BUCKET_BYTES))


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
    stages = {at: stage for at, _, _, stage, _ in spans}
    cuts = sorted({x for _, a, b, _, _ in spans for x in (a, b)})
    segments: list[tuple[tuple[StageId, ...], int, int, str]] = [
        (tuple(at for at, _, _, _, n in spans if at[1] == n - 1), 0, 0, "head")
    ]
    for a, b in list(zip(cuts, cuts[1:]))[::-1]:
        segments.append((tuple(at for at, lo, hi, _, _ in spans if lo <= a and hi >= b), a, b - a, ""))
    segments.append((tuple(at for at, _, _, _, _ in spans if at[1] == 0), 0, 0, "embed"))
    starts = {at: lo for at, lo, _, _, _ in spans}
    before: tuple[StageId, ...] = ()
    for holders, first, layers, end in segments:
        copies = sum(classes.units[at] for at in holders)
        ranks = sum(classes.units[at] * stages[at].tp for at in holders)
        total = sum(classes.units[at] * stages[at].tp * stages[at].share for at in holders)
        for at in holders:
            shared = layers or not stages[at].layers  # a stage without layers only has embedding or head
            loads.shared[at] += shared * stages[at].dp * stages[at].tp * stages[at].share / total
        if ranks <= 1:  # a TP group of several ranks still sums the tensors that they all hold
            before = ()
            continue
        if holders != before:
            share = {at: stages[at].tp * stages[at].share / total for at in holders}
            loads.segments.append(SyncSegment(dict.fromkeys(holders, 0.0), {}, copies, ranks, total, share))
        segment, before = loads.segments[-1], holders
        for at in holders:
            segment.held[at] += costs.most_trained(stages[at].tp, layers, end == "embed", end == "head")
            if layers or at not in segment.lowest:
                segment.lowest[at] = first - starts[at] if layers else stages[at].layers * (end == "head")
        segment.embed = end == "embed"
    for segment in loads.segments:
        _price_segment(segment, classes, stages, links)
    return loads


def _price_segment(
    segment: SyncSegment, classes: NodeClasses, stages: Mapping[StageId, StageTemplate], links: LinkTable
) -> None:
    """Fill in ``ports``, ``link`` and ``latency``. Equal nodes have equal ports, so each class of nodes is priced once.
    """
    nodes: Counter[int] = Counter()  # optimizer shares on one node of each class
    units: Counter[int] = Counter()  # copies by group
    inside_units: Counter[int] = Counter()
    for at in segment.held:
        for c, n in classes.nodes[at].items():
            nodes[c] += n * stages[at].tp * stages[at].share
            units[classes.group[c]] += n * classes.count[c]
            inside_units[c] += n
    total: Counter[int] = Counter()  # by group
    most: dict[int, int] = defaultdict(int)  # on one node of the group
    count: Counter[int] = Counter()  # nodes
    for c, n in nodes.items():
        g = classes.group[c]
        total[g] += n * classes.count[c]
        most[g], count[g] = max(most[g], n), count[g] + classes.count[c]
    groups = sorted(units)
    message = 0.0
    largest = max(stages[at].share for at in segment.held)
    for at, held in segment.held.items():
        tp = stages[at].tp
        for c, mine in classes.nodes[at].items():
            g = classes.group[c]
            inside, others_inside = nodes[c], inside_units[c] - 1
            group = links.between(g, g, tp <= links.pool.groups[g].per_node) if tp > 1 else None
            if group is not None:  # tensors that its ranks hold alike
                segment.latency, message = max(segment.latency, group.alpha), max(message, group.message)
            near = links.between(g, g, True) if others_inside else None
            if near is not None:
                given = (inside - tp * stages[at].share) / segment.total
                own = held * max(given * near.out, segment.share[at] * others_inside * near.into)
                segment.ports[*at, 0] = max(segment.ports.get((*at, 0), 0.0), own)
                segment.link = max(segment.link, held * largest / segment.total * near.pair)
                segment.latency, message = max(segment.latency, near.alpha), max(message, near.message)
            out = into = 0.0
            for h in groups:
                others = total[h] - (inside if h == g else 0)
                copies = units[h] - (inside_units[c] if h == g else 0)
                way, back = links.between(g, h), links.between(h, g)
                if not others or way is None or back is None:
                    continue
                out, into = out + others / segment.total * way.out, into + copies * segment.share[at] * back.into
                if h != g or count[g] > 1:
                    between = mine * tp * held / segment.total * most[h] * max(way.link, back.link)
                    pair = held * largest / segment.total * max(way.pair, back.pair)
                    segment.link = max(segment.link, between, pair)
                segment.latency, message = max(segment.latency, way.alpha), max(message, way.message)
            if out:
                segment.ports[(c,)] = segment.ports.get((c,), 0.0) + mine * tp * held * max(out, into)
    segment.latency += (segment.ranks - 1) * message


def host_seconds(
    segment: SyncSegment, at: StageId, costs: CostModel, chip: str, item: float, spread: bool
) -> tuple[float, float]:
    """(before, after): seconds that a rank's host spends on a segment before and after it travels, as in
    :meth:`GradSync.host_seconds`."""
    rates, held = costs.chip_rates(chip), segment.held[at]
    given, taken = held * (1 - segment.share[at]) * item, held * segment.share[at] * (segment.copies - 1) * item
    fixed, own = rates.exchange_seconds * segment.buckets, held * segment.share[at] * item
    dense = segment.ranks == segment.copies  # without TP all ranks hold the same elements
    if spread:
        packed, unpacked = back_copies(given, taken, dense, segment.ranks)
        return packed * rates.pack + fixed, unpacked * rates.unpack + fixed
    begin = own * (rates.add if segment.copies > 1 else rates.pack)
    return (0.0 if dense else given) * rates.pack + fixed, taken * rates.add + begin + fixed * segment.ranks


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

    def gradient_times(self, segment: SyncSegment, at: StageId, share: float) -> tuple[float, float]:
        """(first, last): when the gradients of the first and of the last bucket of a segment are complete; ``share``:
        part of the segment in one bucket."""
        lowest = segment.lowest[at]
        last = self.done if segment.embed else self.begin + self.plain - lowest * self.layer
        above = last - self.begin - (self.layers - lowest) * self.layer if not segment.embed else 0.0
        first = max(self.begin + above, last - (1 - share) * (self.layers - lowest) * self.layer)
        return min(first, last), last


def sync_ends(
    loads: SyncLoads,
    costs: CostModel,
    chips: Mapping[StageId, str],
    idle: Mapping[StageId, float],
    item: float,
    times: Mapping[StageId, LastBackward] | None = None,
) -> dict[StageId, float]:
    """When each stage's ranks are done with all segments, in seconds from the start of the step. Follows
    ``simulate.grad_sync``, except that the buckets of a segment are priced together.

    Args:
        chips: chip type by stage.
        idle: when each stage's ranks are done with everything else.
        item: bytes per element.
        times: the last backwards for gradient reduction; None: spread of updated parameters.
    """
    hosts = {at: RankHost() for at in idle}
    free: dict[object, float] = {}
    sharded = costs.options.sharded
    for segment in loads.segments:
        ready = late = 0.0
        after = {}
        share = 1 / segment.buckets
        for at in segment.held:
            pack, after[at] = (
                host_seconds(segment, at, costs, chips[at], item, times is None)
                if sharded else (0.0, 0.0)
            )  # fmt: skip
            first = last = idle[at]
            if times is not None and costs.options.overlap:
                first, last = times[at].gradient_times(segment, at, share)
            sent = hosts[at].send(last, pack)
            late, ready = max(late, sent), max(ready, sent - (last - first) - pack * (1 - share))
        begin = max([ready, *(free.get(at, 0.0) for at in (*segment.ports, *segment.held))])
        end = max(begin + segment.link * item, late + segment.link * item * share)
        for port, seconds_ in segment.ports.items():
            free[port] = max(begin + seconds_ * item, late + seconds_ * item * share)
            end = max(end, free[port])
        # At most IN_FLIGHT buckets travel at once, so the latency is paid once per IN_FLIGHT buckets.
        each, rows = max(segment.link, *segment.ports.values(), 0.0) * item * share, -(-segment.buckets // IN_FLIGHT)
        end = max(end + segment.latency, begin + rows * (each + segment.latency))
        # A rank sends its next segment's first bucket when all but IN_FLIGHT - 1 of this one's are done.
        free |= dict.fromkeys(segment.held, end - (end - begin) * min(1.0, (IN_FLIGHT - 1) * share))
        for at, seconds_ in after.items():
            hosts[at].under_way.append((end, seconds_ * share))
            hosts[at].delay += seconds_ * (1 - share)
    return {at: host.finish(idle[at]) for at, host in hosts.items()}
