"""What goes into the programs over layers (the stages of each group, their rates, seconds of synchronisation), and from
the outlines of pipelines that come out to plan templates: batch shares, exact layers, recompute, schedule and placement
order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_time import best_split
from hetero_megatron.planner.estimate.stage_table import StageKind, per_layer
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.problem import PlanningProblem, options
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
)
from hetero_megatron.plans.buckets import BUCKET_BYTES, IN_FLIGHT
from hetero_megatron.utils.cached_method import cached_method

Floats = NDArray[np.float64]
Layers = NDArray[np.float32]  # whole numbers, so exact

FEW = 6  # chips of a small cluster


def rounded(replicas: int) -> int:
    """Rounded down to a power of four: fewer tables."""
    return 4 ** int(math.log(replicas, 4) + 1e-9)


class ProgramInputs:
    """What the programs of one search share: chips, stage options and their speeds.

    Attributes:
        counts: usable chips per group; few: the cluster is so small that nothing is rounded.
        capacities: cache of :meth:`LayersProgram.capacity`: (first grid position, layers [tau, in flight]).
    """

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer, counts: tuple[int, ...] | None = None) -> None:
        self.scorer, self.pool, self.model, self.space = scorer, scorer.pool, problem.model, problem.space
        self.batch, self.counts = problem.global_batch_size, counts or scorer.pool.counts
        self.few = sum(self.counts) <= FEW
        self.capacities: dict[tuple[object, ...], tuple[int, Layers]] = {}

    @property
    def most_pipelines(self) -> int:
        return max(1, min(self.batch, sum(self.counts), self.space.max_pipelines or sum(self.counts)))

    @cached_method
    def options(self, group: int, size: int) -> list[StageTemplate]:
        stage_options = options(
            self.pool, group, self.model, self.space, size, every=self.pool.groups[group].per_node <= 4
        )
        return [o for o in stage_options if o.dp <= 4]

    @cached_method
    def rates(self, group: int, size: int) -> list[tuple[int, float]]:
        """(chips, layers per second and chip) of a group's options, with memory as with the most replicas."""
        rates, replicas = [], self.most_pipelines if self.few else rounded(self.most_pipelines)
        stages, recompute = self.options(group, size), self.space.recompute
        kinds = [StageKind(group, x.tp, x.dp, size, False, False, replicas, recompute) for x in stages]
        for stage, table in zip(stages, self.scorer.tables.tables(kinds, 1), strict=True):
            per = per_layer(table.seconds[0])
            if np.isfinite(per) and per > 0:
                rates.append((stage.chips, 1 / (per * stage.chips)))
        return rates

    def sync_seconds(self, held: float, holders: Floats, groups: Iterable[int]) -> tuple[Floats, Floats]:
        """Estimated seconds of (reducing gradients, spreading parameters), as ``holders``. The holders of a stage send
        to each other bucket by bucket, inside a node where they fit into one.

        Args:
            held: elements on a rank; holders: ranks with elements of the same stage.
        """
        costs, links, message = self.scorer.costs, self.scorer.link_table, 0.0
        port, latency = np.zeros_like(holders), np.zeros_like(holders)  # seconds per byte of a rank; seconds
        for g in groups:
            group = self.pool.groups[g]
            (inside_rate, inside_latency), (outside_rate, outside_latency) = links.best(g, True), links.best(g, False)
            inside = (holders <= group.per_node) | math.isinf(outside_rate)
            port = np.maximum(
                port,
                np.where(inside, inside_rate if math.isfinite(inside_rate) else 0.0, outside_rate * group.per_node),
            )
            latency = np.maximum(
                latency, np.where(inside, inside_latency if math.isfinite(inside_latency) else 0.0, outside_latency)
            )
            message = max(message, costs.links.least_message(group.home))
        bucket_seconds = math.ceil(held * 4 / BUCKET_BYTES) / IN_FLIGHT * (latency + (holders - 1) * message)
        return held * costs.wide * port + bucket_seconds, held * costs.item * port + bucket_seconds


def added_seconds(sync: tuple[Floats, Floats], taus: Floats) -> Floats:
    """What reducing and spreading add to a step: the last backward, about two thirds of the bottleneck ``taus`` (s),
    hides a part of the reduction."""
    reduce, spread = sync
    return np.asarray(np.maximum(reduce - taus * (2 / 3), 0.0) + spread)


@dataclass(frozen=True)
class PipelineOutline:
    """``copies`` pipelines with these stages (without layers) and micro-batches of ``size`` sequences."""

    stages: tuple[StageTemplate, ...]
    size: int
    copies: int


class TemplateBuilder:
    """Makes templates from combinations of outlines; caches pipeline shapes."""

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.scorer, self.tables, self.model = scorer, scorer.tables, problem.model
        self.batch, self.space = problem.global_batch_size, problem.space

    def templates(self, outlines: Sequence[PipelineOutline], schedule: str) -> Iterator[PlanTemplate]:
        """Templates in both placement orders; nothing when a pipeline does not fit or the batch cannot be divided."""
        replicas = sum(s.copies for s in outlines)
        if replicas > self.batch:
            return
        guess = self.batch / sum(s.copies * s.size for s in outlines)
        affine = []
        for outline in outlines:
            shape = self.shape(outline, max(1, round(guess)), replicas, schedule)
            if shape is None:
                return
            affine.append(self._affine(outline, shape))
        counts = divide(affine, self.batch)
        if counts is None:
            return
        parts: list[PipelineReplicas] = []
        for outline, divided in zip(outlines, counts):
            for m, copies in divided:
                shape = self.shape(outline, m, replicas, schedule)
                if shape is None:
                    return
                parts.append(PipelineReplicas(shape, copies, m))
        for order in ("stage", "pipeline") if replicas > 1 else ("stage",):
            yield PlanTemplate(tuple(parts), schedule, order).merged()

    @cached_method
    def shape(self, outline: PipelineOutline, m: int, replicas: int, schedule: str) -> PipelineTemplate | None:
        """The pipeline with exact layers and recompute for ``m`` micro-batches; None when it does not fit."""
        stages, last = outline.stages, len(outline.stages) - 1
        alive = in_flight(schedule, len(stages), m)
        if max(alive) > self.tables.depth:
            return None
        rows, update = [], []
        for s, stage in enumerate(stages):
            communicators = self.tables.communicators.of_equal_pipelines(stages, s, replicas)
            kind = StageKind(
                stage.group, stage.tp, stage.dp, outline.size, s == 0, s == last, replicas, self.space.recompute,
                beside=communicators,
            )  # fmt: skip
            table = self.tables.table(kind)
            rows.append(table.seconds[table.row(alive[s])])
            update.append(self.tables.update_seconds(kind))
        links = [
            self.tables.boundary(a, b, outline.size, self.tables.likely_same_node(a, b))
            for a, b in zip(stages, stages[1:])
        ]
        split = best_split(rows, links, m, update)
        if split is None:
            return None
        recompute = self.space.recompute or "none"
        pipeline = PipelineTemplate(
            outline.size,
            tuple(
                StageTemplate(s.group, s.tp, s.dp, n, recompute, offload=self.tables.offloads(s.group))
                for s, n in zip(stages, split[1])
            ),
        )
        if self.space.recompute is not None:
            return pipeline
        return best_recompute(self.tables, pipeline, schedule, m, replicas)

    def _affine(self, outline: PipelineOutline, shape: PipelineTemplate) -> AffinePipelines:
        forward, backward = self.scorer.stage_seconds(shape)
        trips = [*map(sum, self.scorer.links(shape)), 0.0]
        seconds = tuple(f + b for f, b in zip(forward, backward))
        starts, total = [], 0.0
        for t, trip in zip(seconds, trips):
            starts.append(total)
            total += t + trip
        return AffinePipelines(outline.size, outline.copies, seconds, tuple(starts))


@dataclass(frozen=True)
class AffinePipelines:
    """``copies`` equal pipelines with micro-batches of ``size`` sequences. m micro-batches take ``max_i(before[i] + m x
    seconds[i])`` over the stages i."""

    size: int
    copies: int
    seconds: tuple[float, ...]
    before: tuple[float, ...]

    def most(self, limit: float) -> int:
        """Largest number of micro-batches within ``limit`` seconds."""
        return max(0, int(min((limit - b) / s for b, s in zip(self.before, self.seconds)) + 1e-9))

    def end(self, micro_batches: int) -> float:
        return max(b + micro_batches * s for b, s in zip(self.before, self.seconds))


def divide(kinds: Sequence[AffinePipelines], batch: int) -> list[list[tuple[int, int]]] | None:
    """Divide ``batch`` sequences so that all pipelines finish at about the same time.

    Returns:
        Per kind, [(micro-batches, copies)]; None when no division sums to ``batch``.
    """
    low, high = 0.0, max(kind.end(batch) for kind in kinds) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(kind.most(middle) * kind.size * kind.copies for kind in kinds) >= batch:
            high = middle
        else:
            low = middle
    kind_of = [i for i, kind in enumerate(kinds) for _ in range(kind.copies)]  # each pipeline's kind
    counts = [max(1, kinds[i].most(high)) for i in kind_of]
    surplus = sum(n * kinds[i].size for n, i in zip(counts, kind_of)) - batch
    if surplus < 0 or _drop_surplus(kinds, kind_of, counts, surplus):
        return None
    copies_by_count: list[dict[int, int]] = [{} for _ in kinds]
    for count, i in zip(counts, kind_of):
        copies_by_count[i][count] = copies_by_count[i].get(count, 0) + 1
    return [sorted(row.items(), reverse=True) for row in copies_by_count]


def _drop_surplus(kinds: Sequence[AffinePipelines], of: Sequence[int], counts: list[int], surplus: int) -> int:
    """Remove micro-batches from the pipelines that finish last until ``surplus`` sequences are gone; returns what is
    left of it."""
    heap = [(-kinds[i].end(counts[p]), p) for p, i in enumerate(of) if counts[p] > 1]
    heapq.heapify(heap)
    while surplus and heap:
        _, p = heapq.heappop(heap)
        kind = kinds[of[p]]
        if kind.size > surplus:
            continue
        counts[p] -= 1
        surplus -= kind.size
        if counts[p] > 1:
            heapq.heappush(heap, (-kind.end(counts[p]), p))
    if surplus:  # exchange one micro-batch of a larger size for some of a smaller size
        for p, size in enumerate(kinds[i].size for i in of):
            for q, smaller in enumerate(kinds[i].size for i in of):
                if counts[p] > 1 and size > surplus and smaller < size and (size - surplus) % smaller == 0:
                    counts[p] -= 1
                    counts[q] += (size - surplus) // smaller
                    return 0
    return surplus
