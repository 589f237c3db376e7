"""Placement of a template summarised by classes of equivalent nodes.

Two nodes are in one class if they hold the same stages. It depends on the chips of the stages only, so templates that
differ in layers, recompute or batch shares have it in common. Costs are computed once per class instead of once per
node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.planner.template.placement import PlacedTemplate, Units
from hetero_megatron.planner.template.plan_template import PlanTemplate

StageId = tuple[int, int]  # (part, stage)
Node = tuple[int, int]  # (group, index in the group)


@dataclass(frozen=True)
class NodeClasses:
    """Attributes:
        group, count: by class, the nodes' group and their number.
        nodes: by stage and class, how many of the stage's TP groups one node of the class has (groups that span nodes
            count at their first node).
        units: by stage, its TP groups in all.
        sharing: by part, the distinct rows among its copies of: per stage boundary, 0 inside one node, else how many
            pipelines share the busier node's network cards."""

    group: tuple[int, ...]
    count: tuple[int, ...]
    nodes: Mapping[StageId, Mapping[int, int]]
    units: Mapping[StageId, int]
    sharing: tuple[tuple[tuple[int, ...], ...], ...]


def chips_key(template: PlanTemplate) -> tuple[object, ...]:
    """Templates with equal keys are placed on the same chips."""
    return (
        template.order,
        tuple(
            (part.copies, tuple((s.group, s.tp, s.dp) for s in part.shape.stages)) for part in template.parts
        ),
    )  # fmt: skip


def node_classes(placed: PlacedTemplate, node_of: Mapping[int, Node]) -> NodeClasses:
    """Node classes of a placed template; ``node_of``: the node of each rank."""
    lies = [[_nodes(units, node_of) for units in stages] for _, _, stages in placed.pipelines]
    users: Counter[Node] = Counter()
    for rows in lies:
        linked_nodes: set[Node] = set()
        for a, b in zip(rows, rows[1:]):
            if len(a | b) > 1:
                linked_nodes |= a | b
        users.update(linked_nodes)
    sharing: list[tuple[tuple[int, ...], ...]] = []
    by_node: dict[Node, Counter[StageId]] = defaultdict(Counter)
    total: Counter[StageId] = Counter()
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
        sharing.append(tuple(distinct))
    classes: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node, units_by_stage in by_node.items():
        classes[(node[0], *sorted(units_by_stage.items()))].append(node)
    nodes: dict[StageId, dict[int, int]] = {stage_id: {} for stage_id in total}
    for c, members in enumerate(classes.values()):
        for stage_id, n in by_node[members[0]].items():
            nodes[stage_id][c] = n
    return NodeClasses(
        tuple(members[0][0] for members in classes.values()), tuple(map(len, classes.values())), nodes, total,
        tuple(sharing),
    )  # fmt: skip


def _nodes(units: Units, node_of: Mapping[int, Node]) -> set[Node]:
    return {node_of[unit[end]] for unit in units for end in (0, -1)}


def _sharing(nodes: set[Node], users: Mapping[Node, int]) -> int:
    return 0 if len(nodes) == 1 else max(users[n] for n in nodes)
