"""From pipeline outlines to plan templates: batch shares, exact layers, recompute, schedule and placement order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.planner.estimate.layer_partition import best_split
from hetero_megatron.planner.estimate.stage_table import StageKind
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
)
from hetero_megatron.utils.cached_method import cached_method


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
