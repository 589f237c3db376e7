"""Where the stages of a candidate lie, by classes of nodes that have the same of everything.

It depends on the chips of the stages only, not on their layers, so plans that differ in layers, recompute or shares of
the batch have it in common. Equal nodes are interchangeable, and what a plan does on thousands of them is computed once
per class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.planner.template.placement import PlacedTemplate, Units
from hetero_megatron.planner.template.plan_template import PlanTemplate

At = tuple[int, int]  # part, stage
Node = tuple[int, int]  # group, index


@dataclass(frozen=True)
class NodeClasses:
    """Classes of nodes are numbered.

    Attributes:
        group, count: of each class: the nodes' group, and how many there are.
        nodes: by stage: how many of its TP groups one node of each class has (those over several nodes: at their
            first); units: how many there are in all.
        near: by part, the distinct rows that its copies have: per boundary 0 where it lies in one node, else how many
            pipelines send through the busier node's cards.
    """

    group: tuple[int, ...]
    count: tuple[int, ...]
    nodes: Mapping[At, Mapping[int, int]]
    units: Mapping[At, int]
    near: tuple[tuple[tuple[int, ...], ...], ...]


def chips_key(candidate: PlanTemplate) -> tuple[object, ...]:
    """Candidates with equal keys lie on the same chips."""
    return (
        candidate.order,
        tuple(
            (part.copies, tuple((s.group, s.tp, s.dp) for s in part.shape.stages)) for part in candidate.parts
        ),
    )  # fmt: skip


def node_classes(placed: PlacedTemplate, node_of: Mapping[int, Node]) -> NodeClasses:
    """Classes and boundaries of a placed candidate; ``node_of``: by rank."""
    lies = [[_nodes(units, node_of) for units in stages] for _, _, stages in placed.pipelines]
    users: Counter[Node] = Counter()
    for rows in lies:
        found: set[Node] = set()
        for a, b in zip(rows, rows[1:]):
            if len(a | b) > 1:
                found |= a | b
        users.update(found)
    near: list[tuple[tuple[int, ...], ...]] = []
    by_node: dict[Node, Counter[At]] = defaultdict(Counter)
    total: Counter[At] = Counter()
    index = 0
    for p, part in enumerate(placed.template.parts):
        distinct: dict[tuple[int, ...], None] = {}
        for copy in range(index, index + part.copies):
            rows = lies[copy]
            distinct[tuple(_sharing(a | b, users) for a, b in zip(rows, rows[1:]))] = None
            for s, units in enumerate(placed.pipelines[copy][2]):
                total[p, s] += len(units)
                for unit in units:
                    by_node[node_of[unit[0]]][p, s] += 1
        index += part.copies
        near.append(tuple(distinct))
    classes: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node, held in by_node.items():
        classes[(node[0], *sorted(held.items()))].append(node)
    nodes: dict[At, dict[int, int]] = {at: {} for at in total}
    for c, members in enumerate(classes.values()):
        for at, n in by_node[members[0]].items():
            nodes[at][c] = n
    return NodeClasses(
        tuple(members[0][0] for members in classes.values()), tuple(map(len, classes.values())), nodes, total,
        tuple(near),
    )  # fmt: skip


def _nodes(units: Units, node_of: Mapping[int, Node]) -> set[Node]:
    return {node_of[unit[end]] for unit in units for end in (0, -1)}


def _sharing(nodes: set[Node], users: Mapping[Node, int]) -> int:
    return 0 if len(nodes) == 1 else max(users[n] for n in nodes)
