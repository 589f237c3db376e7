"""Small changes to a good plan, kept where the exact evaluation likes them: layers moved between stages, stages
swapped, optimizers moved to host memory or back, the other schedules, other micro-batch sizes, the other placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.planner.time_budget import Late, never

Improve = Callable[[PlanTemplate, float], bool]


def polish(
    evaluator: TemplateScorer, candidate: PlanTemplate, seconds: float, space: SearchSpace, most: int, improve: Improve,
    late: Late = never,
) -> bool:  # fmt: skip
    """Hill climbing from ``candidate``, with at most ``most`` evaluations; False when ``improve`` or ``late`` asks to
    stop."""
    left, better = most, True
    tried = {candidate}
    while better and left > 0:
        better = False
        for other in _neighbours(evaluator, candidate, space):
            if other in tried:
                continue
            tried.add(other)
            if left <= 0:
                return True
            left -= 1
            if late():
                return False
            if evaluator.least(other) >= seconds * (1 - 1e-9):
                continue
            score = evaluator.score(other, seconds)
            if score is None or score.over > 0 or score.step_seconds >= seconds * (1 - 1e-9):
                continue
            candidate, seconds, better = other, score.step_seconds, True
            if not improve(candidate, seconds):
                return False
            break
    return True


def _neighbours(evaluator: TemplateScorer, candidate: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    for schedule in space.schedules:
        if schedule != candidate.schedule:
            yield from _fitted(evaluator, replace(candidate, schedule=schedule), space)
    if candidate.pipelines > 1:
        yield replace(candidate, order="pipeline" if candidate.order == "stage" else "stage")
    for p, part in enumerate(candidate.parts):
        for shape, m in _shapes(part, space):
            parts = (*candidate.parts[:p], PipelineReplicas(shape, part.copies, m), *candidate.parts[p + 1 :])
            yield from _fitted(evaluator, replace(candidate, parts=parts), space)


def _shapes(part: PipelineReplicas, space: SearchSpace) -> Iterator[tuple[PipelineTemplate, int]]:
    stages, m, size = part.shape.stages, part.num_micro_batches, part.shape.micro_batch_size
    last = len(stages) - 1
    if space.offload == "always":
        for i, stage in enumerate(stages):
            yield _with(part.shape, {i: replace(stage, offload=not stage.offload)}), m
    for i in range(last):
        if (i == 0 or stages[i + 1].layers) and (i + 1 == last or stages[i].layers):  # only ends may have no layers
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


def _fitted(evaluator: TemplateScorer, candidate: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    """The candidate with the fastest recompute that fits; nothing where none does."""
    if space.recompute is not None:
        yield candidate
        return
    parts = []
    for part in candidate.parts:
        count = part.num_micro_batches
        if candidate.schedule == "gpipe" and count > evaluator.tables.depth:
            return
        shape = best_recompute(evaluator.tables, part.shape, candidate.schedule, count, candidate.pipelines)
        if shape is None:
            return
        parts.append(replace(part, shape=shape))
    yield replace(candidate, parts=tuple(parts))
