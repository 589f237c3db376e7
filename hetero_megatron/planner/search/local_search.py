"""Local search: small changes to the best templates, kept when the estimated step time falls.

Moves: layers between stages, swapped stages, optimizers to host memory or back, inner replicas as
pipelines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.problem import PlanningProblem, SearchSpace
from hetero_megatron.planner.search.incumbent import Incumbent, Row
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate

STARTS = 2  # numbers of templates and of structures to start from
EFFORT, LARGE = 240, 256  # neighbours evaluated per start; an eighth of that above LARGE chips
LEAST_GAIN = 1e-9


class LocalSearch:
    """Hill climbing from the best templates."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        effort = EFFORT if incumbent.scorer.pool.chips <= LARGE else EFFORT // 8
        return all(self.climb(row, problem.space, incumbent, effort) for row in _starts(incumbent.rows))

    @staticmethod
    def climb(
        start: Row,
        space: SearchSpace,
        incumbent: Incumbent,
        effort: int,
        more: Callable[[PlanTemplate], Iterator[PlanTemplate]] | None = None,
    ) -> bool:
        """Climb from one template; False where the incumbent said to stop. ``more``: further neighbours."""
        scorer, (best, _, template) = incumbent.scorer, start

        def fitting(current: PlanTemplate) -> Iterator[PlanTemplate]:
            changed = itertools.chain(neighbours(current, space), more(current) if more is not None else ())
            fitted = (_fitted(scorer, neighbour, space) for neighbour in changed)
            return (neighbour for neighbour in fitted if neighbour is not None)

        def improves(near: PlanTemplate) -> bool:
            nonlocal best
            limit = best * (1 - LEAST_GAIN)
            if incumbent.should_stop() or scorer.bounds.lower_bound(near) >= limit:
                return False
            score = incumbent.offer(near, limit)
            best = best if score is None else score.step_seconds
            return score is not None

        climb(template, fitting, improves, effort)
        return not incumbent.should_stop()


def climb(
    start: PlanTemplate, neighbours: Callable[[PlanTemplate], Iterator[PlanTemplate]],
    improves: Callable[[PlanTemplate], bool], most: int,
) -> None:  # fmt: skip
    """Hill climbing, from a template to the first neighbour that ``improves``, until ``most`` others were tried."""
    tried, candidates = {start}, neighbours(start)
    while len(tried) <= most and (candidate := next((x for x in candidates if x not in tried), None)) is not None:
        tried.add(candidate)
        if improves(candidate):
            candidates = neighbours(candidate)


def _starts(rows: Sequence[Row]) -> list[Row]:
    """The best template, the next, and the best with other numbers of stages: climbing does not change these."""
    by_stages: dict[object, Row] = {}
    for row in rows:
        by_stages.setdefault(tuple(sorted({len(part.shape.stages) for part in row[2].parts})), row)
    return list(dict.fromkeys([*rows[:STARTS], *list(by_stages.values())[:STARTS]]))


def neighbours(template: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    for p, part in enumerate(template.parts):
        for shape in shapes_near(part.shape, space):
            yield template.with_part(p, replace(part, shape=shape))
    for halved in inner_replicas_as_pipelines(template, space):
        for order in ("stage", "pipeline"):
            yield replace(halved, order=order)


def inner_replicas_as_pipelines(template: PlanTemplate, space: SearchSpace) -> Iterator[PlanTemplate]:
    """With the pipelines of one part as twice as many, which have half the inner data parallel of each stage."""
    for p, part in enumerate(template.parts):
        size, stages = part.shape.micro_batch_size, part.shape.stages
        halves = space.micro_batch_sizes is None and size % 2 == 0 and all(s.dp % 2 == 0 for s in stages)
        if halves and template.pipelines + part.copies <= (space.max_pipelines or template.sequences):
            shape = PipelineTemplate(size // 2, tuple(replace(s, dp=s.dp // 2) for s in stages))
            yield template.with_part(p, replace(part, shape=shape, copies=2 * part.copies))


def shapes_near(shape: PipelineTemplate, space: SearchSpace) -> Iterator[PipelineTemplate]:
    """Pipelines that differ by one move of a stage or a layer."""
    stages = shape.stages
    last = len(stages) - 1
    for i in range(last):
        if (i == 0 or stages[i + 1].layers) and (i + 1 == last or stages[i].layers):  # inner stages need layers
            yield shape.with_stages({i: stages[i + 1], i + 1: stages[i]})
    for i, giver in enumerate(stages):
        for j, taker in enumerate(stages):
            fewest = 0 if i in (0, last) and last else 1
            if i != j and giver.layers > fewest and (abs(i - j) <= 2 or len(stages) <= 8):
                moved = {i: replace(giver, layers=giver.layers - 1), j: replace(taker, layers=taker.layers + 1)}
                yield shape.with_stages(moved)
    if space.offload == "always":
        for i, stage in enumerate(stages):
            yield shape.with_stages({i: replace(stage, offload=not stage.offload)})


def _fitted(scorer: TemplateScorer, template: PlanTemplate, space: SearchSpace) -> PlanTemplate | None:
    """The template with the fastest recompute that fits; None if none fits."""
    if space.recompute is not None:
        return template
    parts = []
    for part in template.parts:
        count = part.num_micro_batches
        shape = best_recompute(scorer.tables, part.shape, template.schedule, count, template.pipelines)
        if shape is None:
            return None
        parts.append(replace(part, shape=shape))
    return replace(template, parts=tuple(parts))
