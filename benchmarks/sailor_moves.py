"""Other tensor-parallel degrees inside the pipelines of a good plan, for Sailor's rules, where stages of one group gain
from unlike degrees; under our own prices no recorded case does, so the planner does not try them.

:mod:`layers_program` gives all stages of a node group the same degree. Here each run of stages of one group is split
again in every way (2 + 2 + 2 chips may become 4 + 2 or 2 + 4). Layers and batch shares are solved exactly again; what
cannot be faster even with all chips always busy is skipped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

from hetero_megatron.planner.estimate.stage_table import StageKind
from hetero_megatron.planner.problem import PlanningProblem, SearchSpace, batch_sizes, tp_degrees
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.materialize import PipelineOutline, TemplateBuilder
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate

MOST_CHIPS = 8  # per run of stages
ORDERED = 6  # up to so many chips all orders of degrees are tried; above, only falling and rising ones
MOST_WAYS = 4000  # per pipeline


def resplit_stages(template: PlanTemplate, problem: PlanningProblem, incumbent: Incumbent, most: int) -> None:
    """Offer at most ``most`` other splits of the stages of one template."""
    seconds, builder = incumbent.seconds, incumbent.builder
    for outline, bound in itertools.islice(_promising(builder, template, seconds, problem.space), most):
        if bound >= seconds:
            break
        for other in builder.templates([outline], template.schedule):
            score = incumbent.offer(other, seconds)
            seconds = seconds if score is None else score.step_seconds


def _promising(
    builder: TemplateBuilder, template: PlanTemplate, seconds: float, space: SearchSpace
) -> Iterator[tuple[PipelineOutline, float]]:
    """(outline, lower bound in seconds), most promising first; nothing for templates of different pipelines."""
    shapes = {tuple((s.group, s.tp, s.dp) for s in part.shape.stages) for part in template.parts}
    if len(shapes) > 1 or any(dp > 1 for _, _, dp in next(iter(shapes))):
        return
    old = next(iter(shapes))
    pool, copies = builder.scorer.pool, template.pipelines
    runs = []
    for group, stages in itertools.groupby(old, key=lambda s: s[0]):
        chips = sum(tp for _, tp, _ in stages)
        if chips > MOST_CHIPS:
            return
        degrees = tp_degrees(pool, group, builder.model, space, every=False)
        runs.append([tuple((group, tp) for tp in way) for way in compositions(chips, degrees)])
    if math.prod(len(r) for r in runs) > MOST_WAYS:
        return
    found = []
    for size in batch_sizes(space, builder.batch // copies, 8):
        micro_batches = builder.batch / (copies * size)
        rates = {key: _rate(builder, *key, size) for run in runs for way in run for key in way}
        for ways in itertools.product(*runs):
            made = tuple(itertools.chain(*ways))
            rate = sum(rates[key] for key in made)
            bound = (micro_batches + len(made) - 1) * builder.model.num_layers / rate if rate else math.inf
            if bound < seconds and (size != template.parts[0].shape.micro_batch_size or made != _pairs(old)):
                found.append((bound, size, made))
    for bound, size, made in sorted(found):
        cut = tuple(StageTemplate(group, tp, 1) for group, tp in made)
        yield PipelineOutline(cut, size, copies), bound


def _pairs(stages: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple((group, tp) for group, tp, _ in stages)


def _rate(builder: TemplateBuilder, group: int, tp: int, size: int) -> float:
    """Layers per second of one micro-batch; 0 where not even two layers fit."""
    seconds = builder.tables.table(StageKind(group, tp, 1, size, False, False, 1, builder.space.recompute)).seconds[0]
    if len(seconds) <= 2 or not math.isfinite(seconds[2]):
        return 0.0
    return 1 / max(float(seconds[2] - seconds[1]), 1e-12)


@lru_cache(maxsize=256)
def compositions(total: int, parts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Sequences of ``parts`` that sum to ``total``: all up to :data:`ORDERED`, above only monotone ones."""
    if total <= ORDERED:
        return _sequences(total, parts, False)
    falling = _sequences(total, tuple(sorted(parts, reverse=True)), True)
    return tuple(dict.fromkeys((*falling, *(way[::-1] for way in falling))))


@lru_cache(maxsize=4096)
def _sequences(total: int, parts: tuple[int, ...], falling: bool) -> tuple[tuple[int, ...], ...]:
    """``falling``: no part is larger than the one before (``parts`` must be in falling order)."""
    if total == 0:
        return ((),)
    return tuple(
        (p, *rest)
        for i, p in enumerate(parts)
        if p <= total
        for rest in _sequences(total - p, parts[i:] if falling else parts, falling)
    )
