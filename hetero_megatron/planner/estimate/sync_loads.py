"""What gradient synchronisation of a candidate puts on links and chips, from where the replicas of each stage lie.

Each element has one owner among its holders, divided among the ranks by their shares; a holder sends the owners what
is theirs and gets new parameters back. Messages are priced as ``planner.cost.link_model`` prices them on
concrete ranks: a node sends at the rate of its fastest link, to one other node at that of their own. Of what the ranks
of a TP group hold alike (norms), only latency and the sums are counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.plan.buckets import BUCKET_BYTES
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.link_model import LinkModel
from hetero_megatron.planner.cost.sync_host_cost import back_copies
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.node_classes import At, NodeClasses
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate

Port = tuple[int, ...]  # the cards of each node of a class; (part, stage, 0): the own link of each of the stage's chips


@dataclass(frozen=True)
class LinkPrice:
    """From a group to another (or itself, between nodes or inside one): seconds per message, per byte through the
    sender's and the receiver's port, per byte between two ends, and between two chips in a collective; host seconds per
    message."""

    alpha: float
    single: float  # the same outside of collectives
    out: float
    into: float
    link: float
    pair: float
    message: float


class LinkTable:
    """All of a pool's."""

    def __init__(self, pool: DevicePool, costs: CostModel) -> None:
        self.pool, self.network = pool, LinkModel(costs.rates)
        self._known: dict[tuple[int, int, bool], LinkPrice | None] = {}

    def between(self, g: int, h: int, inside: bool = False) -> LinkPrice | None:
        """None where there is no such link."""
        key = (g, h, inside)
        if key not in self._known:
            there = self.pool.link(g, h, inside) is not None and all(self.pool.groups[i].ranks for i in (g, h))
            self._known[key] = self._make(g, h, inside) if there else None
        return self._known[key]

    def _make(self, g: int, h: int, inside: bool) -> LinkPrice:
        ranks, groups = self.network.ranks, self.pool.groups
        a = groups[g].ranks[0][0]
        b = groups[g].ranks[0][1] if inside else groups[h].ranks[-1 if g == h else 0][0]
        first, second = ranks[a].group, ranks[b].group
        rates = self.network.rates.between(first, second, inside)
        alpha, beta = rates.collective("all_to_all")
        out, into = (min(beta, self.network.fastest(name, inside)) for name in (first, second))
        link, pair = min(rates.beta, beta), rates.between_chips("all_to_all")
        return LinkPrice(alpha, rates.alpha, out, into, link, pair, self.network.message_seconds(a, b))


@dataclass
class SyncSegment:
    """Layers (or ends) with the same holders, which travel together; all per byte of an element.

    Attributes:
        held: elements of a rank of each stage that holds them; lowest: the stage's layers before these, and whether
            the stage has the embedding after them in backward; copies: how many hold each element; ranks: in all;
        total: of the ranks' shares;
        share: of a copy's elements that its TP group owns, by stage.
        ports: seconds that each port is busy; link: of the most loaded pair of ends; latency, hosts' part included.
    """

    held: dict[At, float]
    lowest: dict[At, int]
    copies: int
    ranks: int
    total: int
    share: dict[At, float]
    embed: bool = False
    ports: dict[Port, float] = field(default_factory=dict)
    link: float = 0.0
    latency: float = 0.0

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(max(self.held.values()) * 4 / BUCKET_BYTES))


@dataclass
class SyncLoads:
    """``runs`` in the order of backward; by stage: ``shared``, the sum over its layers of dp / copies."""

    runs: list[SyncSegment] = field(default_factory=list)
    shared: dict[At, float] = field(default_factory=lambda: defaultdict(float))


def sync_loads(candidate: PlanTemplate, ground: NodeClasses, ways: LinkTable, costs: CostModel) -> SyncLoads:
    """Of all layers, embedding and head."""
    loads = SyncLoads()
    spans: list[tuple[At, int, int, StageTemplate, int]] = []
    for p, part in enumerate(candidate.parts):
        start = 0
        for s, stage in enumerate(part.shape.stages):
            spans.append(((p, s), start, start + stage.layers, stage, len(part.shape.stages)))
            start += stage.layers
    stages = {at: stage for at, _, _, stage, _ in spans}
    cuts = sorted({x for _, a, b, _, _ in spans for x in (a, b)})
    segments: list[tuple[tuple[At, ...], int, int, str]] = [
        (tuple(at for at, _, _, _, n in spans if at[1] == n - 1), 0, 0, "head")
    ]
    for a, b in list(zip(cuts, cuts[1:]))[::-1]:
        segments.append((tuple(at for at, lo, hi, _, _ in spans if lo <= a and hi >= b), a, b - a, ""))
    segments.append((tuple(at for at, _, _, _, _ in spans if at[1] == 0), 0, 0, "embed"))
    starts = {at: lo for at, lo, _, _, _ in spans}
    before: tuple[At, ...] = ()
    for holders, first, layers, end in segments:
        copies = sum(ground.units[at] for at in holders)
        ranks = sum(ground.units[at] * stages[at].tp for at in holders)
        total = sum(ground.units[at] * stages[at].tp * stages[at].share for at in holders)
        for at in holders:
            shared = layers or not stages[at].layers  # a stage of no layers shares its end alone
            loads.shared[at] += shared * stages[at].dp * stages[at].tp * stages[at].share / total
        if ranks <= 1:  # a TP group meets over what its ranks hold alike, and so adds up all its gradients
            before = ()
            continue
        if holders != before:
            share = {at: stages[at].tp * stages[at].share / total for at in holders}
            loads.runs.append(SyncSegment(dict.fromkeys(holders, 0.0), {}, copies, ranks, total, share))
        run, before = loads.runs[-1], holders
        for at in holders:
            run.held[at] += costs.most_held(stages[at].tp, layers, end == "embed", end == "head")
            if layers or at not in run.lowest:
                run.lowest[at] = first - starts[at] if layers else stages[at].layers * (end == "head")
        run.embed = end == "embed"
    for run in loads.runs:
        _price(run, ground, stages, ways)
    return loads


def _price(run: SyncSegment, ground: NodeClasses, stages: Mapping[At, StageTemplate], ways: LinkTable) -> None:
    """Seconds per byte of an element on every port, and between the two most loaded ends. Equal nodes have equal
    ports, so each class of them is priced once."""
    nodes: Counter[int] = Counter()  # shares of the ranks on a node of each class
    units: Counter[int] = Counter()  # copies by group
    inside_units: Counter[int] = Counter()
    for at in run.held:
        for c, n in ground.nodes[at].items():
            nodes[c] += n * stages[at].tp * stages[at].share
            units[ground.group[c]] += n * ground.count[c]
            inside_units[c] += n
    total: Counter[int] = Counter()  # by group
    most: dict[int, int] = defaultdict(int)  # on one node of the group
    count: Counter[int] = Counter()  # nodes
    for c, n in nodes.items():
        g = ground.group[c]
        total[g] += n * ground.count[c]
        most[g], count[g] = max(most[g], n), count[g] + ground.count[c]
    groups = sorted(units)
    message = 0.0
    largest = max(stages[at].share for at in run.held)
    for at, held in run.held.items():
        tp = stages[at].tp
        for c, mine in ground.nodes[at].items():
            g = ground.group[c]
            inside, others_inside = nodes[c], inside_units[c] - 1
            group = ways.between(g, g, tp <= ways.pool.groups[g].per_node) if tp > 1 else None
            if group is not None:  # over what its ranks hold alike
                run.latency, message = max(run.latency, group.alpha), max(message, group.message)
            near = ways.between(g, g, True) if others_inside else None
            if near is not None:
                given = (inside - tp * stages[at].share) / run.total
                own = held * max(given * near.out, run.share[at] * others_inside * near.into)
                run.ports[*at, 0] = max(run.ports.get((*at, 0), 0.0), own)
                run.link = max(run.link, held * largest / run.total * near.pair)
                run.latency, message = max(run.latency, near.alpha), max(message, near.message)
            out = into = 0.0
            for h in groups:
                others = total[h] - (inside if h == g else 0)
                copies = units[h] - (inside_units[c] if h == g else 0)
                way, back = ways.between(g, h), ways.between(h, g)
                if not others or way is None or back is None:
                    continue
                out, into = out + others / run.total * way.out, into + copies * run.share[at] * back.into
                if h != g or count[g] > 1:
                    between = mine * tp * held / run.total * most[h] * max(way.link, back.link)
                    pair = held * largest / run.total * max(way.pair, back.pair)
                    run.link = max(run.link, between, pair)
                run.latency, message = max(run.latency, way.alpha), max(message, way.message)
            if out:
                run.ports[(c,)] = run.ports.get((c,), 0.0) + mine * tp * held * max(out, into)
    run.latency += (run.ranks - 1) * message


def own_seconds(
    run: SyncSegment, at: At, costs: CostModel, chip: str, item: float, spread: bool
) -> tuple[float, float]:
    """(before, after) a rank's part of a run travels, as :meth:`Synchronisation.host_seconds` has it."""
    rates, held = costs.chip_rates(chip), run.held[at]
    given, taken = held * (1 - run.share[at]) * item, held * run.share[at] * (run.copies - 1) * item
    fixed, own = rates.exchange_seconds * run.buckets, held * run.share[at] * item
    dense = run.ranks == run.copies  # without TP all hold the same
    if spread:
        packed, unpacked = back_copies(given, taken, dense, run.ranks)
        return packed * rates.pack + fixed, unpacked * rates.unpack + fixed
    return (0.0 if dense else given) * rates.pack + fixed, (taken + own) * rates.add + fixed * run.ranks


def bounded(ways: LinkTable, group: int, pool: DevicePool, near: bool) -> tuple[float, float]:
    """(least seconds per byte that a port of a node of ``group`` can do in either direction, least latency), for lower
    bounds."""
    others: Sequence[int] = [group] if near else range(len(pool.groups))
    out, into = (
        [way for way in found if way is not None]
        for found in ([ways.between(group, h, near) for h in others], [ways.between(h, group, near) for h in others])
    )
    rates = [*(way.out for way in out), *(way.into for way in into)]
    return min(rates, default=math.inf), min((way.alpha for way in (*out, *into)), default=math.inf)
