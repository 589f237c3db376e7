"""Local search: small changes to the best templates, kept when the estimated step time falls.

Moves: layers between stages, swapped stages, optimizers to host memory or back, other schedules, other micro-batch
sizes, the other placement order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.hill_climb import HillClimb
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, Row
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from hetero_megatron.planner.template.search_space import SearchSpace

STARTS = 2  # number of templates to start from
EFFORT, LARGE = 240, 256  # neighbours evaluated per start; an eighth of that above LARGE chips
LEAST_GAIN = 1e-9


class LocalSearch:
    """Hill climbing from the best templates. ``effort``: neighbours evaluated per start; None: by the size of the
    cluster."""

    def __init__(self, effort: int | None = None) -> None:
        self.effort = effort

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        effort = self.effort
        if effort is None:
            effort = EFFORT if incumbent.scorer.pool.chips <= LARGE else EFFORT // 8
        return all(self.climb(row, problem.space, incumbent, effort) for row in list(incumbent.rows[:STARTS]))

    @staticmethod
    def climb(start: Row, space: SearchSpace, incumbent: Incumbent, effort: int) -> bool:
        """Climb from one template; False where the incumbent said to stop."""
        scorer, best, stopped = incumbent.scorer, start[0], False

        def improves(template: PlanTemplate) -> bool:
            nonlocal best, stopped
            stopped = stopped or incumbent.should_stop()
            limit = best * (1 - LEAST_GAIN)
            if stopped or scorer.bounds.lower_bound(template) >= limit:
                return False
            score = incumbent.offer(template, limit)
            if score is None:
                return False
            best = score.step_seconds
            return True

        for _ in HillClimb[PlanTemplate](effort).run(start[2], lambda t: _neighbours(scorer, t, space), improves):
            if incumbent.should_stop():
                return False
        return not stopped


def _neighbours(scorer: TemplateScorer, template: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    for schedule in space.schedules:
        if schedule != template.schedule:
            yield from _fitted(scorer, replace(template, schedule=schedule), space)
    if template.pipelines > 1:
        yield replace(template, order="pipeline" if template.order == "stage" else "stage")
    for p, part in enumerate(template.parts):
        for shape, m in shapes_near(part, space):
            parts = (*template.parts[:p], PipelineReplicas(shape, part.copies, m), *template.parts[p + 1 :])
            yield from _fitted(scorer, replace(template, parts=parts), space)


def shapes_near(part: PipelineReplicas, space: SearchSpace) -> Iterator[tuple[PipelineTemplate, int]]:
    """(pipeline, its micro-batches) that differ from a part of a template by one move."""
    stages, m, size = part.shape.stages, part.num_micro_batches, part.shape.micro_batch_size
    last = len(stages) - 1
    if space.offload == "always":
        for i, stage in enumerate(stages):
            yield _with(part.shape, {i: replace(stage, offload=not stage.offload)}), m
    for i in range(last):
        if (i == 0 or stages[i + 1].layers) and (i + 1 == last or stages[i].layers):  # inner stages need layers
            yield _with(part.shape, {i: stages[i + 1], i + 1: stages[i]}), m
    for i, giver in enumerate(stages):
        for j, taker in enumerate(stages):
            least = 0 if i in (0, last) and last else 1
            if i != j and giver.layers > least and (abs(i - j) <= 2 or len(stages) <= 8):
                moved = {i: replace(giver, layers=giver.layers - 1), j: replace(taker, layers=taker.layers + 1)}
                yield _with(part.shape, moved), m
    if space.micro_batch_sizes is None:
        if m % 2 == 0:
            yield replace(part.shape, micro_batch_size=size * 2), m // 2
        if size % 2 == 0 and all((size // 2) % s.dp == 0 for s in stages):
            yield replace(part.shape, micro_batch_size=size // 2), m * 2


def _with(shape: PipelineTemplate, changed: Mapping[int, StageTemplate]) -> PipelineTemplate:
    return replace(shape, stages=tuple(changed.get(i, s) for i, s in enumerate(shape.stages)))


def _fitted(scorer: TemplateScorer, template: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    """The template with the fastest recompute that fits; nothing if none fits."""
    if space.recompute is not None:
        yield template
        return
    parts = []
    for part in template.parts:
        count = part.num_micro_batches
        if template.schedule == "gpipe" and count > scorer.tables.depth:
            return
        shape = best_recompute(scorer.tables, part.shape, template.schedule, count, template.pipelines)
        if shape is None:
            return
        parts.append(replace(part, shape=shape))
    yield replace(template, parts=tuple(parts))
