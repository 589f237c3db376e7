"""What gradient synchronisation of a candidate puts on links and chips, from where the replicas of each stage lie.

Each element has one owner among its holders, divided among the ranks by their shares; a holder sends the owners what
is theirs and gets new parameters back. Messages are priced as :mod:`hetero_megatron.planner.network` prices them on
concrete ranks: a node sends at the rate of its fastest link, to one other node at that of their own. What the ranks of
a TP group hold alike (norms) is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.plan.buckets import BUCKET_BYTES
from hetero_megatron.planner.costs import CostModel
from hetero_megatron.planner.memory import equal_shares, held_elements
from hetero_megatron.planner.network import Network
from hetero_megatron.planner.place import Placed
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import StageShape

Node = tuple[int, int]  # group, index
At = tuple[int, int]  # part, stage
Port = tuple[int, ...]  # a node's network cards; (part, stage, 0): the own link of each of the stage's chips


@dataclass(frozen=True)
class Way:
    """From a group to another (or itself, between nodes or inside one): seconds per message, per byte through the
    sender's and the receiver's port, and per byte between two ends; host seconds per message."""

    alpha: float
    single: float  # the same outside of collectives
    out: float
    into: float
    link: float
    message: float


class Ways:
    """All of a pool's."""

    def __init__(self, pool: Pool, costs: CostModel) -> None:
        self.pool, self.network = pool, Network(costs.rates)
        self._known: dict[tuple[int, int, bool], Way | None] = {}

    def between(self, g: int, h: int, inside: bool = False) -> Way | None:
        """None where there is no such link."""
        key = (g, h, inside)
        if key not in self._known:
            self._known[key] = self._make(g, h, inside) if self.pool.link(g, h, inside) is not None else None
        return self._known[key]

    def _make(self, g: int, h: int, inside: bool) -> Way:
        ranks, groups = self.network.ranks, self.pool.groups
        a = groups[g].ranks[0][0]
        b = groups[g].ranks[0][1] if inside else groups[h].ranks[-1 if g == h else 0][0]
        first, second = ranks[a].group, ranks[b].group
        rates = self.network.rates.between(first, second, inside)
        alpha, beta = rates.all_to_all or (rates.alpha, rates.beta)
        out, into = (min(beta, self.network.fastest(name, inside)) for name in (first, second))
        return Way(alpha, rates.alpha, out, into, beta, self.network.message_seconds(a, b))


@dataclass
class Run:
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
class Loads:
    """``runs`` in the order of backward; by stage: ``shared``, the sum over its layers of dp / copies."""

    runs: list[Run] = field(default_factory=list)
    shared: dict[At, float] = field(default_factory=lambda: defaultdict(float))
    nodes: dict[At, Counter[Node]] = field(default_factory=dict)


def sync_loads(placed: Placed, ways: Ways, costs: CostModel, node_of: Mapping[int, Node]) -> Loads:
    """Of all layers, embedding and head."""
    loads = Loads()
    index = 0
    spans: list[tuple[At, int, int, StageShape, int]] = []
    for p, part in enumerate(placed.candidate.parts):
        for s in range(len(part.shape.stages)):
            count: Counter[Node] = Counter()
            for copy in range(part.copies):
                for unit in placed.pipelines[index + copy][2][s]:
                    count[node_of[unit[0]]] += 1
            loads.nodes[p, s] = count
        start = 0
        for s, stage in enumerate(part.shape.stages):
            spans.append(((p, s), start, start + stage.layers, stage, len(part.shape.stages)))
            start += stage.layers
        index += part.copies
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
        copies = sum(sum(loads.nodes[at].values()) for at in holders)
        ranks = sum(sum(loads.nodes[at].values()) * stages[at].tp for at in holders)
        total = sum(sum(loads.nodes[at].values()) * stages[at].tp * stages[at].share for at in holders)
        for at in holders:
            shared = layers or not stages[at].layers  # a stage of no layers shares its end alone
            loads.shared[at] += shared * stages[at].dp * stages[at].tp * stages[at].share / total
        if copies <= 1:
            before = ()
            continue
        if holders != before:
            share = {at: stages[at].tp * stages[at].share / total for at in holders}
            loads.runs.append(Run(dict.fromkeys(holders, 0.0), {}, copies, ranks, total, share))
        run, before = loads.runs[-1], holders
        for at in holders:
            run.held[at] += _held(costs, stages[at], layers, end)
            if layers or at not in run.lowest:
                run.lowest[at] = first - starts[at] if layers else stages[at].layers * (end == "head")
        run.embed = end == "embed"
    for run in loads.runs:
        _price(run, loads, stages, ways)
    return loads


def _held(costs: CostModel, stage: StageShape, layers: int, end: str) -> float:
    shares = equal_shares(costs.model, stage.tp)
    return max(held_elements(costs.model, layers, end == "embed", end == "head", share) for share in shares)


def _price(run: Run, loads: Loads, stages: Mapping[At, StageShape], ways: Ways) -> None:
    """Seconds per byte of an element on every port, and between the two most loaded ends."""
    nodes: Counter[Node] = Counter()  # shares of the ranks
    units: Counter[int] = Counter()  # copies by group
    inside_units: Counter[Node] = Counter()
    for at in run.held:
        for node, n in loads.nodes[at].items():
            nodes[node] += n * stages[at].tp * stages[at].share
            units[node[0]] += n
            inside_units[node] += n
    total: Counter[int] = Counter()  # by group
    most: dict[int, int] = defaultdict(int)  # on one node of the group
    count: Counter[int] = Counter()  # nodes
    for (g, _), n in nodes.items():
        total[g] += n
        most[g], count[g] = max(most[g], n), count[g] + 1
    groups = sorted(units)
    message = 0.0
    largest = max(stages[at].share for at in run.held)
    for at, held in run.held.items():
        tp = stages[at].tp
        for (g, i), mine in loads.nodes[at].items():
            inside, others_inside = nodes[g, i], inside_units[g, i] - 1
            near = ways.between(g, g, True) if others_inside else None
            if near is not None:
                given = (inside - tp * stages[at].share) / run.total
                own = held * max(given * near.out, run.share[at] * others_inside * near.into)
                run.ports[*at, 0] = max(run.ports.get((*at, 0), 0.0), own)
                run.link = max(run.link, held * largest / run.total * near.link)
                run.latency, message = max(run.latency, near.alpha), max(message, near.message)
            out = into = 0.0
            for h in groups:
                others = total[h] - (inside if h == g else 0)
                copies = units[h] - (inside_units[g, i] if h == g else 0)
                way, back = ways.between(g, h), ways.between(h, g)
                if not others or way is None or back is None:
                    continue
                out, into = out + others / run.total * way.out, into + copies * run.share[at] * back.into
                if h != g or count[g] > 1:
                    run.link = max(run.link, mine * tp * held / run.total * most[h] * max(way.link, back.link))
                run.latency, message = max(run.latency, way.alpha), max(message, way.message)
            if out:
                run.ports[g, i] = run.ports.get((g, i), 0.0) + mine * tp * held * max(out, into)
    run.latency += (run.ranks - 1) * message


def own_seconds(
    run: Run, at: At, costs: CostModel, chip: str, item: float, spread: bool
) -> tuple[float, float]:
    """(before, after) a rank's part of a run travels, as :meth:`Synchronisation.host_seconds` has it."""
    rates, held = costs.chip_rates(chip), run.held[at]
    given, taken = held * (1 - run.share[at]) * item, held * run.share[at] * (run.copies - 1) * item
    fixed = rates.exchange_seconds * run.buckets
    if spread:
        return taken * rates.pack + fixed, given * rates.unpack + fixed
    own = held * run.share[at] * item
    return given * rates.pack + fixed, (taken + own) * rates.add + fixed * run.ranks


def bounded(ways: Ways, group: int, pool: Pool, near: bool) -> tuple[float, float]:
    """(least seconds per byte that a port of a node of ``group`` can do, least latency), for lower bounds."""
    found: Sequence[Way | None]
    found = [ways.between(group, group, True)] if near else [ways.between(group, h) for h in range(len(pool.groups))]
    known = [way for way in found if way is not None]
    return min((w.out for w in known), default=math.inf), min((w.alpha for w in known), default=math.inf)
