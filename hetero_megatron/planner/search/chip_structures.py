"""Structures of concrete plans: which chips each stage has, before tokens, heads or experts are divided.

The chips are divided into equal pipelines. The stages of a pipeline have chips of one group each, or of all groups
together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.planner.problem import PlanningProblem, batch_sizes, tp_degrees
from hetero_megatron.planner.template.device_pool import DeviceGroup, DevicePool

CUTS = (1, 2, 4, 8)  # numbers of equal stages per group of chips
LARGEST = 32  # sequences of a micro-batch
FEW_GROUPS = 3  # up to so many groups every subset, and every order, is tried
Ranks = tuple[int, ...]
StageRanks = tuple[tuple[Ranks, ...], ...]


@dataclass(frozen=True)
class ChipStructure:
    """``ranks[p][s]``: ranks of stage s of pipeline p, corresponding ones alike; ``tp``: ranks of a TP group; ``size``:
    sequences of a micro-batch."""

    ranks: StageRanks
    tp: int
    size: int

    @property
    def stages(self) -> int:
        return len(self.ranks[0])

    @property
    def pipelines(self) -> int:
        return len(self.ranks)


def structures(
    problem: PlanningProblem, pool: DevicePool, ordered: bool, every_size: bool = False
) -> Iterator[ChipStructure]:
    """All structures whose stages have one communication library each, for every number of pipelines, TP degree and
    micro-batch size.

    Args:
        ordered: common stages have the groups in every order, else in one.
        every_size: micro-batches of all sizes that divide the batch, up to ``LARGEST``, where none are asked for:
            unlike chips of a stage divide 12 sequences as 2 to 1, but not 8 or 16.
    """
    library, tried_ranks = problem.cluster.library_of, set[StageRanks]()
    for ranks in _stage_ranks(problem.global_batch_size, pool, ordered):
        joined = all(len({library(r) for r in stage}) == 1 for stages in ranks for stage in stages)
        if ranks in tried_ranks or not joined or len(ranks[0]) > problem.model.num_layers:
            continue
        tried_ranks.add(ranks)
        pipeline_batch = problem.global_batch_size // len(ranks)
        sizes: Sequence[int] = batch_sizes(problem.space, pipeline_batch)
        if every_size and problem.space.micro_batch_sizes is None:
            sizes = range(1, min(pipeline_batch, LARGEST) + 1)
        sizes = [size for size in sizes if pipeline_batch % size == 0]
        for tp, size in itertools.product(_tp_sizes(problem, pool, ranks), sizes):
            yield ChipStructure(ranks, tp, size)


def _stage_ranks(batch: int, pool: DevicePool, ordered: bool) -> Iterator[StageRanks]:
    groups, few = range(len(pool.groups)), len(pool.groups) <= FEW_GROUPS
    sets = [c for n in groups for c in itertools.combinations(groups, n + 1)] if few else [tuple(groups)]
    for order in (o for chosen in sets for o in (itertools.permutations(chosen) if few else [chosen])):
        for copies in range(1, min(batch, max(pool.counts)) + 1):
            parts = [_divided(pool.groups[g], copies) for g in order] if batch % copies == 0 else [None]
            divisible = [part for part in parts if part is not None]
            if len(divisible) == len(parts):
                yield from _stagings(divisible, len(divisible) > 1 and (ordered or list(order) == sorted(order)))


def _divided(group: DeviceGroup, copies: int) -> list[Ranks] | None:
    """The chips of a group for each of ``copies`` pipelines, by node; None where they do not divide evenly."""
    if group.nodes % copies == 0:
        nodes_each = group.nodes // copies
        return [
            tuple(r for node in group.ranks[i * nodes_each : (i + 1) * nodes_each] for r in node) for i in range(copies)
        ]
    if copies % group.nodes or group.per_node % (copies // group.nodes):
        return None
    size = group.per_node // (copies // group.nodes)
    return [node[i : i + size] for node in group.ranks for i in range(0, group.per_node, size)]


def _stagings(parts: Sequence[Sequence[Ranks]], together: bool) -> Iterator[StageRanks]:
    """Each group cut into the same number of stages; ``together``: also stages with a share of every group."""
    for cuts in CUTS:
        if any(len(part[0]) % cuts for part in parts):
            return
        rows = [[_cut(ranks, cuts) for ranks in pipeline] for pipeline in zip(*parts, strict=True)]
        yield tuple(tuple(stage for stages in row for stage in stages) for row in rows)
        if together:
            yield tuple(tuple(tuple(itertools.chain(*stage)) for stage in zip(*row, strict=True)) for row in rows)


def _cut(ranks: Ranks, cuts: int) -> list[Ranks]:
    ranks_each = len(ranks) // cuts
    return [ranks[i * ranks_each : (i + 1) * ranks_each] for i in range(cuts)]


def _tp_sizes(problem: PlanningProblem, pool: DevicePool, ranks: StageRanks) -> Iterator[int]:
    """TP degrees that divide the ranks of every node of every stage."""
    places = problem.cluster.ranks
    sizes = {n for stage in ranks[0] for n in Counter(places[rank].node for rank in stage).values()}
    used = {rank for stage in ranks[0] for rank in stage}
    allowed = [
        set(tp_degrees(pool, g, problem.model, problem.space, False))
        for g, group in enumerate(pool.groups)
        if any(rank in used for node in group.ranks for rank in node)
    ]
    for tp in (1, 2, 4, 8):
        if all(size % tp == 0 for size in sizes) and all(tp in a for a in allowed):
            yield tp
