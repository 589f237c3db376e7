"""What gradient synchronisation of a candidate puts on links and chips, from where the replicas of each stage lie.

Each element has one owner among its holders, divided among the ranks by their shares; a holder sends the owners what
is theirs and gets new parameters back. Messages are priced as ``planner.cost.link_model`` prices them on
concrete ranks: a node sends at the rate of its fastest link, to one other node at that of their own. Of what the ranks
of a TP group hold alike (norms), only latency and the sums are counted.
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
from hetero_megatron.planner.template.node_classes import At, NodeClasses
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate

Port = tuple[int, ...]  # the cards of each node of a class; (part, stage, 0): the own link of each of the stage's chips


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


def sync_loads(candidate: PlanTemplate, ground: NodeClasses, links: LinkTable, costs: CostModel) -> SyncLoads:
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
        _price(run, ground, stages, links)
    return loads


def _price(run: SyncSegment, ground: NodeClasses, stages: Mapping[At, StageTemplate], links: LinkTable) -> None:
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
            group = links.between(g, g, tp <= links.pool.groups[g].per_node) if tp > 1 else None
            if group is not None:  # over what its ranks hold alike
                run.latency, message = max(run.latency, group.alpha), max(message, group.message)
            near = links.between(g, g, True) if others_inside else None
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
                way, back = links.between(g, h), links.between(h, g)
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


@dataclass(frozen=True)
class LastBackward:
    """Seconds: when it begins and ends, each of its layers, and all but the embedding's part."""

    begin: float
    done: float
    layer: float
    plain: float
    layers: int

    def span(self, run: SyncSegment, at: At, share: float) -> tuple[float, float]:
        """When the gradients of the first and of the last bucket of a run are there."""
        lowest = run.lowest[at]
        last = self.done if run.embed else self.begin + self.plain - lowest * self.layer
        above = last - self.begin - (self.layers - lowest) * self.layer if not run.embed else 0.0
        first = max(self.begin + above, last - (1 - share) * (self.layers - lowest) * self.layer)
        return min(first, last), last


def sync_ends(
    loads: SyncLoads,
    costs: CostModel,
    chips: Mapping[At, str],
    idle: Mapping[At, float],
    item: float,
    times: Mapping[At, LastBackward] | None = None,
) -> dict[At, float]:
    """When the ranks of each stage are done with all runs: gradients as ``times`` has them, else parameters. The
    rules are those of ``simulate.grad_sync.Synchronisation``, but a run's buckets are taken together."""
    hosts = {at: RankHost() for at in idle}
    free: dict[object, float] = {}
    sharded = costs.options.sharded
    for run in loads.runs:
        ready = late = 0.0
        after = {}
        share = 1 / run.buckets  # of the run, that only the last bucket is
        for at in run.held:
            pack, after[at] = (
                own_seconds(run, at, costs, chips[at], item, times is None)
                if sharded else (0.0, 0.0)
            )  # fmt: skip
            first = last = idle[at]
            if times is not None and costs.options.overlap:
                first, last = times[at].span(run, at, share)
            sent = hosts[at].send(last, pack)
            late, ready = max(late, sent), max(ready, sent - (last - first) - pack * (1 - share))
        begin = max([ready, *(free.get(port, 0.0) for port in run.ports)])
        end = max(begin + run.link * item, late + run.link * item * share)
        for port, seconds_ in run.ports.items():
            free[port] = max(begin + seconds_ * item, late + seconds_ * item * share)
            end = max(end, free[port])
        # A bucket is sent once the one IN_FLIGHT before it has arrived, so of long ways there are so many in a row.
        each, rows = max(run.link, *run.ports.values(), 0.0) * item * share, -(-run.buckets // IN_FLIGHT)
        end = max(end + run.latency, begin + rows * (each + run.latency))
        for at, seconds_ in after.items():
            hosts[at].under_way.append((end, seconds_ * share))
            hosts[at].delay += seconds_ * (1 - share)
    return {at: host.finish(idle[at]) for at, host in hosts.items()}
