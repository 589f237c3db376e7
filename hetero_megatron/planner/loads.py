"""What gradient synchronisation puts on the links, from where the replicas of each stage lie.

Each element has one owner among its holders, evenly divided; a holder sends the owners what is theirs and gets new
parameters back. So of what a rank holds, the share of the copies outside its node crosses the node's network cards,
which all ranks of the node use together, and the share of the other copies inside crosses its own link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.planner.costs import CostModel
from hetero_megatron.planner.memory import equal_shares, held_elements
from hetero_megatron.planner.place import Placed
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import StageShape

Node = tuple[int, int]  # group, index
At = tuple[int, int]  # part, stage


@dataclass
class Loads:
    """Elements by node through its cards, and by stage: through a chip's own link, packed or added by a rank, of the
    first layer through the cards; ``copies``: sum over the stage's layers of dp / copies."""

    cards: dict[Node, float] = field(default_factory=lambda: defaultdict(float))
    slow: dict[Node, float] = field(default_factory=lambda: defaultdict(float))  # seconds per element of the worst link
    own: dict[At, float] = field(default_factory=lambda: defaultdict(float))
    moved: dict[At, float] = field(default_factory=lambda: defaultdict(float))
    shared: dict[At, float] = field(default_factory=lambda: defaultdict(float))
    nodes: dict[At, Counter[Node]] = field(default_factory=dict)
    partners: dict[At, set[At]] = field(default_factory=lambda: defaultdict(set))
    latency: float = 0.0


def sync_loads(placed: Placed, pool: Pool, costs: CostModel, node_of: Mapping[int, Node]) -> Loads:
    """Add up all layers, embedding and head."""
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
    cuts = sorted({x for _, a, b, _, _ in spans for x in (a, b)})
    for a, b in zip(cuts, cuts[1:]):
        _add(loads, [(at, st) for at, lo, hi, st, _ in spans if lo <= a and hi >= b], b - a, "", pool, costs)
    _add(loads, [(at, st) for at, _, _, st, _ in spans if at[1] == 0], 0, "embed", pool, costs)
    _add(loads, [(at, st) for at, _, _, st, n in spans if at[1] == n - 1], 0, "head", pool, costs)
    return loads


def _add(
    loads: Loads, inside: Sequence[tuple[At, StageShape]], layers: int, end: str, pool: Pool, costs: CostModel
) -> None:
    """One segment of layers (or an end) with the same holders."""
    nodes: Counter[Node] = Counter()
    for at, _ in inside:
        nodes.update(loads.nodes[at])
    copies = sum(nodes.values())
    for at, stage in inside:
        loads.shared[at] += layers * stage.dp / copies
    if copies <= 1:
        return
    groups = sorted({g for g, _ in nodes})
    far = {g: _farthest(pool, g, groups, nodes) for g in groups}
    for at, stage in inside:
        held = max(
            held_elements(costs.model, layers, end == "embed", end == "head", share)
            for share in equal_shares(costs.model, stage.tp)
        )
        loads.partners[at].update(other for other, _ in inside)
        loads.moved[at] += 5 * held * (copies - 1) / copies
        most = 0.0
        for node, units in loads.nodes[at].items():
            out = (copies - nodes[node]) / copies
            loads.cards[node] += units * stage.tp * held * out
            most = max(most, held * (nodes[node] - 1) / copies)
            if out:
                beta, latency = far[node[0]]
                loads.slow[node] = max(loads.slow[node], beta)
                loads.latency = max(loads.latency, latency)
        loads.own[at] += most


def _farthest(pool: Pool, g: int, groups: Sequence[int], nodes: Counter[Node]) -> tuple[float, float]:
    """(mean seconds per byte over the nodes it sends to, worst latency) of group ``g``'s links to the others."""
    beta = latency = weight = 0.0
    for h in groups:
        link = pool.inter[g][h]
        if link is None:
            continue
        count = sum(n for node, n in nodes.items() if node[0] == h)
        beta, weight = beta + count / link.bandwidth, weight + count
        latency = max(latency, link.latency)
    return (beta / weight if weight else 0.0), latency
