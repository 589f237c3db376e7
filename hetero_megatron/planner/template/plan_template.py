"""Plan templates: pipelines and stages over groups of equal chips, without ranks; and from template to plan: which
chips of which nodes each stage gets.

Tensor-parallel groups lie inside one node wherever they fit (largest first). ``order="stage"`` places all pipelines'
first stages, then all second stages, and so on, as Megatron does: replicas of a stage share nodes. ``order="pipeline"``
places one pipeline after the other. A plan's ranks are those of the cluster; chips without a stage are idle.

A placed template is summarised by classes of equivalent nodes: two nodes are in one class if they hold the same stages.
It depends on the chips of the stages only, so templates that differ in layers, recompute or batch shares have it in
common. Costs are computed once per class instead of once per node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.template.device_pool import DeviceGroup, DevicePool
from hetero_megatron.plans import Interval, Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.plans.canonical import ActivationOffload, Optimizer
from hetero_megatron.schedule import generate
from hetero_megatron.schedule import in_flight as alive


@dataclass(frozen=True)
class StageTemplate:
    """A stage of ``dp`` TP groups of ``tp`` chips each, all of one device group.

    Args:
        group: index of the device group.
        first: number of recomputed layers when ``recompute="first"``.
        offload: the optimizer is kept in host memory.
        away: so many first layers have their activations in host memory from forward to backward.
        share: weight of each rank in the division of optimizer states among all holders.
    """

    group: int
    tp: int
    dp: int
    layers: int = 0
    recompute: str = "none"
    first: int = 0
    offload: bool = False
    share: int = 1
    away: int = 0

    @property
    def chips(self) -> int:
        return self.tp * self.dp

    @property
    def plain(self) -> StageTemplate:
        """The stage with all activations kept on the chip."""
        return replace(self, recompute="none", first=0, away=0)


@dataclass(frozen=True)
class PipelineTemplate:
    """Stages in layer order; ``micro_batch_size`` in sequences."""

    micro_batch_size: int
    stages: tuple[StageTemplate, ...]

    def with_stages(self, changed: Mapping[int, StageTemplate]) -> PipelineTemplate:
        """The pipeline with other stages at these places."""
        return replace(self, stages=tuple(changed.get(s, stage) for s, stage in enumerate(self.stages)))

    def usage(self, groups: int) -> tuple[int, ...]:
        """Chips used of each of ``groups`` device groups."""
        used = [0] * groups
        for stage in self.stages:
            used[stage.group] += stage.chips
        return tuple(used)

    @property
    def chips(self) -> int:
        return sum(stage.chips for stage in self.stages)

    @property
    def plain(self) -> PipelineTemplate:
        """The pipeline with all activations kept on the chips."""
        return replace(self, stages=tuple(stage.plain for stage in self.stages))


@dataclass(frozen=True)
class PipelineReplicas:
    """``copies`` equal pipelines, each with ``num_micro_batches`` per step."""

    shape: PipelineTemplate
    copies: int
    num_micro_batches: int

    @property
    def sequences(self) -> int:
        return self.copies * self.shape.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True)
class PlanTemplate:
    """A plan over device groups; ``order``: "stage" or "pipeline", how pipelines are placed on nodes
    (:func:`to_plan`)."""

    parts: tuple[PipelineReplicas, ...]
    schedule: str = "1f1b"
    order: str = "stage"

    @property
    def pipelines(self) -> int:
        return sum(part.copies for part in self.parts)

    @property
    def sequences(self) -> int:
        return sum(part.sequences for part in self.parts)

    def usage(self, groups: int) -> tuple[int, ...]:
        used = [0] * groups
        for part in self.parts:
            for g, n in enumerate(part.shape.usage(groups)):
                used[g] += part.copies * n
        return tuple(used)

    def with_part(self, p: int, part: PipelineReplicas) -> PlanTemplate:
        """The plan with other pipelines as part ``p``."""
        return replace(self, parts=(*self.parts[:p], part, *self.parts[p + 1 :]))

    def on_groups(self, groups: Sequence[int]) -> PlanTemplate:
        """The same template on other device groups; ``groups[g]``: the new index of group g."""

        def moved(shape: PipelineTemplate) -> PipelineTemplate:
            return replace(shape, stages=tuple(replace(s, group=groups[s.group]) for s in shape.stages))

        return replace(self, parts=tuple(replace(part, shape=moved(part.shape)) for part in self.parts))

    def merged(self) -> PlanTemplate:
        """Equal parts merged, in the order of first appearance; may change the placement."""
        counts: dict[tuple[PipelineTemplate, int], int] = {}
        for part in self.parts:
            key = (part.shape, part.num_micro_batches)
            counts[key] = counts.get(key, 0) + part.copies
        return replace(self, parts=tuple(PipelineReplicas(s, n, m) for (s, m), n in counts.items() if n))

    def joined(self) -> PlanTemplate:
        """Equal neighbouring parts merged, which keeps the placement."""
        parts: list[PipelineReplicas] = []
        for part in self.parts:
            if parts and (parts[-1].shape, parts[-1].num_micro_batches) == (part.shape, part.num_micro_batches):
                part = replace(part, copies=parts.pop().copies + part.copies)
            parts.append(part)
        return replace(self, parts=tuple(parts))


@lru_cache(maxsize=4096)
def in_flight(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations are alive at once, as counted by ``schedule.in_flight``;
    extrapolated linearly above ``2 x stages`` micro-batches."""
    simulated = 2 * stages
    if micro_batches <= simulated:
        return alive(generate(schedule, stages, micro_batches))
    rows = zip(*(in_flight(schedule, stages, n) for n in (simulated - 1, simulated)))
    return tuple(b + (b - a) * (micro_batches - simulated) for a, b in rows)


def describe(shape: PipelineTemplate, chips: Sequence[str]) -> str:
    """Text such as ``A100 tp4 x3 [10,10,12] > V100 tp2 dp2 [4]``: runs of equal stages with their layers."""
    runs: list[tuple[tuple[int, int, int], list[StageTemplate]]] = []
    for stage in shape.stages:
        key = (stage.group, stage.tp, stage.dp)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(stage)
        else:
            runs.append((key, [stage]))
    words = []
    for (group, tp, dp), stages in runs:
        word = chips[group] + (f" tp{tp}" if tp > 1 else "") + (f" dp{dp}" if dp > 1 else "")
        counts = [s.layers for s in stages]
        layers = (
            f"{len(counts)}x{counts[0]}" if len(counts) > 3 and len(set(counts)) == 1 else ",".join(map(str, counts))
        )
        recompute = {s.recompute for s in stages} - {"none"}
        optimizer_shares = sorted({s.share for s in stages} - {1})
        away, offloaded = sum(s.offload for s in stages), dict.fromkeys(min(s.away, s.layers) for s in stages)
        words.append(
            f"{word} [{layers}]"
            + (f" recompute {'/'.join(sorted(recompute))}" if recompute else "")
            + (f" optimizer share {'/'.join(map(str, optimizer_shares))}" if optimizer_shares else "")
            + ("" if not away else " offload" if away == len(stages) else f" offload {away} of {len(stages)}")
            + (f" activations of {'/'.join(map(str, offloaded))} layers in host memory" if any(offloaded) else "")
        )
    return " > ".join(words)


Units = tuple[tuple[int, ...], ...]  # ranks of each TP group of a stage


@dataclass(frozen=True)
class PlacedTemplate:
    """Attributes:
        pipelines: per pipeline, its shape, number of micro-batches, and the ranks of each stage's TP groups.
        idle: ranks without work."""

    template: PlanTemplate
    pipelines: tuple[tuple[PipelineTemplate, int, tuple[Units, ...]], ...]
    idle: tuple[int, ...]


class _FreeChips:
    def __init__(self, group: DeviceGroup) -> None:
        self.group = group
        self.free = [list(ranks) for ranks in group.ranks]
        self.by_size: dict[int, list[int]] = defaultdict(list)  # free chips -> nodes, last one first
        self.by_size[group.per_node] = list(range(group.nodes))[::-1]

    def take(self, count: int) -> tuple[int, ...] | None:
        """``count`` chips of the fullest node that has them free; of several whole nodes when no node is that large;
        None when there are not enough."""
        sizes = [size for size, nodes in self.by_size.items() if nodes and size >= count]
        if sizes:
            size = min(sizes)
            node = self.by_size[size].pop()
            ranks, self.free[node] = self.free[node][:count], self.free[node][count:]
            if self.free[node]:
                self.by_size[size - count].append(node)
            return tuple(ranks)
        if count <= self.group.per_node:
            return None
        taken: list[int] = []
        for _ in range(-(-count // self.group.per_node)):
            part = self.take(min(self.group.per_node, count - len(taken)))
            if part is None:
                return None
            taken += part
        return tuple(taken)


def place(template: PlanTemplate, pool: DevicePool) -> PlacedTemplate | None:
    """Assign ranks to every TP group; None when they do not pack into the nodes."""
    shapes = [(part.shape, part.num_micro_batches) for part in template.parts for _ in range(part.copies)]
    requests: list[tuple[int, int, int, int]] = []  # (-tp, place in the order, pipeline, stage)
    for p, (shape, _) in enumerate(shapes):
        for s in range(len(shape.stages)):
            place_in_order = s * len(shapes) + p if template.order == "stage" else p * 1000 + s
            requests.append((-shape.stages[s].tp, place_in_order, p, s))
    mixed: dict[int, set[int]] = defaultdict(set)
    for shape, _ in shapes:
        for stage in shape.stages:
            mixed[stage.group].add(stage.tp)
    # Largest TP groups first where a group of nodes has TP groups of several sizes.
    requests.sort(key=lambda r: (r[0] if len(mixed[shapes[r[2]][0].stages[r[3]].group]) > 1 else 0, r[1]))
    shelves = [_FreeChips(group) for group in pool.groups]
    units: list[list[Units]] = [[() for _ in shape.stages] for shape, _ in shapes]
    for _, _, p, s in requests:
        stage = shapes[p][0].stages[s]
        tp_groups = [shelves[stage.group].take(stage.tp) for _ in range(stage.dp)]
        if any(t is None for t in tp_groups):
            return None
        units[p][s] = tuple(t for t in tp_groups if t is not None)
    used = {rank for pipeline in units for stage_units in pipeline for unit in stage_units for rank in unit}
    idle = tuple(r for g in pool.groups for node in g.ranks for r in node if r not in used)
    pipelines = tuple((shape, m, tuple(u)) for (shape, m), u in zip(shapes, units, strict=True))
    return PlacedTemplate(template, pipelines, tuple(sorted(idle)))


def to_plan(placed: PlacedTemplate, cluster: Cluster, seq_length: int, num_heads: int) -> Plan:
    """The concrete plan, on the cluster's ranks."""
    pipelines = []
    for shape, count, stages in placed.pipelines:
        start, built = 0, []
        for s, (stage, units) in enumerate(zip(shape.stages, stages, strict=True)):
            layers = ((start, start + stage.layers),) if stage.layers else ()
            start += stage.layers
            chip = cluster.ranks[units[0][0]].chip
            built.append(_stage(stage, units, shape, layers, s, seq_length, num_heads, chip))
        pipelines.append(Pipeline(shape.micro_batch_size, count, tuple(built)))
    batch = sum(p.batch_size for p in pipelines)
    return Plan(seq_length, batch, placed.template.schedule, tuple(pipelines))


def renumbered(plan: Plan, number: Mapping[int, int]) -> Plan:
    """The plan with every rank replaced by ``number[rank]``."""
    moved = plan.with_stages(lambda stage: stage.on_ranks(number.__getitem__))
    return Plan(plan.seq_length, plan.global_batch_size, plan.schedule, moved.pipelines)


def _stage(
    stage: StageTemplate,
    units: Units,
    shape: PipelineTemplate,
    layers: tuple[Interval, ...],
    index: int,
    seq_length: int,
    num_heads: int,
    chip: str,
) -> Stage:
    rows = shape.micro_batch_size // stage.dp
    stage_units = tuple(
        Unit(
            ranks,
            (1,) * stage.tp,
            (d * rows, (d + 1) * rows),
            ((0, seq_length),),
            (0, num_heads),
        )
        for d, ranks in enumerate(units)
    )
    recompute = Recompute(stage.recompute, stage.first) if stage.layers else Recompute()
    last = len(shape.stages) - 1
    away = min(stage.away, stage.layers)
    return Stage(
        layers, stage_units, index == 0, index == last, recompute, chip, Optimizer(stage.offload, share=stage.share),
        activations=ActivationOffload(away) if away else None,
    )  # fmt: skip


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
