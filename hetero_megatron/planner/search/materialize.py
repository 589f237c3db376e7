"""From pipeline outlines to plan templates: batch shares, exact layers, recompute, schedule and placement order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.planner.estimate.layer_partition import best_split
from hetero_megatron.planner.estimate.stage_table import StageKind
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.batch_partition import AffinePipelines, divide
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
        for outline, found in zip(outlines, counts):
            for m, copies in found:
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
        rows = []
        for s, stage in enumerate(stages):
            beside = self.tables.communicators.of_equal_pipelines(stages, s, replicas)
            kind = StageKind(
                stage.group, stage.tp, stage.dp, outline.size, s == 0, s == last, replicas, self.space.recompute,
                beside=beside,
            )  # fmt: skip
            table = self.tables.table(kind)
            rows.append(table.seconds[table.row(alive[s])])
        links = [
            self.tables.boundary(a, b, outline.size, self.tables.likely_same_node(a, b))
            for a, b in zip(stages, stages[1:])
        ]
        found = best_split(rows, links, m)
        if found is None:
            return None
        recompute = self.space.recompute or "none"
        made = PipelineTemplate(
            outline.size,
            tuple(
                StageTemplate(s.group, s.tp, s.dp, n, recompute, offload=self.tables.offloads(s.group))
                for s, n in zip(stages, found[1])
            ),
        )
        if self.space.recompute is not None:
            return made
        return best_recompute(self.tables, made, schedule, m, replicas)

    def _affine(self, outline: PipelineOutline, shape: PipelineTemplate) -> AffinePipelines:
        forward, backward = self.scorer.stage_seconds(shape)
        trips = [*map(sum, self.scorer.links(shape)), 0.0]
        seconds = tuple(f + b for f, b in zip(forward, backward))
        before, total = [], 0.0
        for t, trip in zip(seconds, trips):
            before.append(total)
            total += t + trip
        return AffinePipelines(outline.size, outline.copies, seconds, tuple(before))
