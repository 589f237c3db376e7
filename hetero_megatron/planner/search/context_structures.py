"""Structures of plans with context stages: which chips each stage has, before tokens and heads are divided.

The chips are divided into equal pipelines. The stages of a pipeline have chips of one kind each, or of all kinds
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.device_pool import DeviceGroup, DevicePool
from hetero_megatron.planner.template.search_space import tp_degrees

CUTS = (1, 2, 4, 8)  # numbers of equal stages per kind of chip
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ContextStructure:
    """``ranks[p][s]``: ranks of stage s of pipeline p, in corresponding order; ``tp``: ranks per context member."""

    ranks: tuple[tuple[Ranks, ...], ...]
    tp: int

    @property
    def stages(self) -> int:
        return len(self.ranks[0])


def structures(problem: PlanningProblem, pool: DevicePool) -> Iterator[ContextStructure]:
    """All structures: sets of chip groups, together in one stage or each with stages of its own, for every number of
    pipelines."""
    groups = range(len(pool.groups))
    few = len(pool.groups) <= 3
    sets = [c for n in groups for c in itertools.combinations(groups, n + 1)] if few else [tuple(groups)]
    seen: set[ContextStructure] = set()
    for chosen in sets:
        orders = itertools.permutations(chosen) if few else iter([chosen])
        for order in orders:
            for copies in range(1, min(problem.global_batch_size, max(pool.counts)) + 1):
                if problem.global_batch_size % copies:
                    continue
                parts = [divide(pool.groups[g], copies) for g in order]
                if any(p is None for p in parts):
                    continue
                together = list(order) == sorted(order)  # the order does not matter for one common stage
                for ranks in stagings([p for p in parts if p is not None], copies, together):
                    for tp in tp_sizes(problem, pool, ranks):
                        one = ContextStructure(ranks, tp)
                        if (
                            one not in seen
                            and 1 <= one.stages <= problem.model.num_layers
                            and _joined(problem.cluster, one)
                        ):
                            seen.add(one)
                            yield one


def _joined(cluster: Cluster, structure: ContextStructure) -> bool:
    """Whether one communication library connects all ranks of every stage."""
    library = cluster.library_of
    return all(len({library(r) for r in ranks}) == 1 for stages in structure.ranks for ranks in stages)


def tp_sizes(problem: PlanningProblem, pool: DevicePool, ranks: tuple[tuple[Ranks, ...], ...]) -> Iterator[int]:
    """TP degrees that divide the ranks of every node of every stage."""
    sizes = set()
    for stage in ranks[0]:
        nodes: dict[str, int] = {}
        for rank in stage:
            nodes[problem.cluster.ranks[rank].node] = nodes.get(problem.cluster.ranks[rank].node, 0) + 1
        sizes |= set(nodes.values())
    used = {rank for stage in ranks[0] for rank in stage}
    allowed = [
        set(tp_degrees(pool, g, problem.model, problem.space, False))
        for g, group in enumerate(pool.groups)
        if any(rank in used for node in group.ranks for rank in node)
    ]
    for tp in (1, 2, 4, 8):
        if all(size % tp == 0 for size in sizes) and all(tp in a for a in allowed):
            yield tp


def divide(group: DeviceGroup, copies: int) -> list[list[Ranks]] | None:
    """The chips of a group for each of ``copies`` pipelines, by node; None where they do not divide evenly."""
    if group.nodes % copies == 0:
        each = group.nodes // copies
        return [list(group.ranks[i * each : (i + 1) * each]) for i in range(copies)]
    if copies % group.nodes or group.per_node % (copies // group.nodes):
        return None
    size = group.per_node // (copies // group.nodes)
    return [[node[i : i + size]] for node in group.ranks for i in range(0, group.per_node, size)]


def stagings(
    parts: Sequence[list[list[Ranks]]], copies: int, together: bool
) -> Iterator[tuple[tuple[Ranks, ...], ...]]:
    """Ranks by pipeline and stage: all groups in one stage, or each group cut into the same number of stages."""
    if len(parts) > 1 and together:
        yield tuple((tuple(r for part in parts for node in part[p] for r in node),) for p in range(copies))
    for cuts in CUTS:
        rows: list[tuple[Ranks, ...]] = []
        for p in range(copies):
            row: list[Ranks] = []
            for part in parts:
                flat = [rank for node in part[p] for rank in node]
                if len(flat) % cuts:
                    return
                each = len(flat) // cuts
                row += [tuple(flat[i * each : (i + 1) * each]) for i in range(cuts)]
            rows.append(tuple(row))
        yield tuple(rows)
