"""From template to plan: which chips of which nodes each stage gets.

Tensor-parallel groups lie inside one node wherever they fit (largest first). ``order="stage"`` places all pipelines'
first stages, then all second stages, and so on, as Megatron does: replicas of a stage share nodes. ``order="pipeline"``
places one pipeline after the other.

A plan's ranks are those of the cluster; chips without a stage are idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.template.device_pool import DeviceGroup, DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate
from hetero_megatron.plans import Interval, Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.plans.canonical import ActivationOffload, Optimizer

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
