"""Small clusters: what the search may never lose against."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hetero_megatron.cluster.subset import of_type
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.pipeline_time import closed_form, splits
from hetero_megatron.planner.estimate.template_score import best_recompute, make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import best_uniform
from hetero_megatron.planner.search.driver import search, search_or_error
from hetero_megatron.planner.search.incumbent import Incumbent, simulate_template
from hetero_megatron.planner.search.materialize import PipelineOutline, ProgramInputs, TemplateBuilder
from hetero_megatron.planner.search.stage_sequences import StageSequences
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from tests.support.planner_reference import Exhaustive, random_case, unequal_directions

ON_CHIPS = SearchSpace(offload="never", more_schedules="never")
PLAIN = SearchSpace(more_schedules="never")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kind", "batch", "space"),
    [
        (812, "open", 1, ON_CHIPS), (812, "open", 2, ON_CHIPS),  # prediction orders plans otherwise than evaluation
        (701, "fixed", 1, SearchSpace()), (701, "fixed", 2, PLAIN),
        # the fastest type needs its optimizer in host memory
        (709, "open", 2, PLAIN), (805, "fixed", 1, PLAIN),
    ],
)  # fmt: skip
def test_no_slower_than_a_type_alone_or_a_uniform_plan(seed: int, kind: str, batch: int, space: SearchSpace) -> None:
    case, options = random_case(seed, kind), SearchOptions(space=space)
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, batch, options)
    result = search(problem)
    rows: dict[str, float] = {}
    for chip in dict.fromkeys(group.chip for group in result.pool.groups):
        part = search_or_error(problem.on(of_type(case.cluster, chip)))
        if not isinstance(part, UserError):
            rows[chip] = part.best.step_seconds
    uniform = best_uniform(result, problem)[0]
    best = min([*rows.values(), *([] if uniform.problem else [uniform.step_seconds])], default=math.inf)
    assert math.isfinite(best)
    assert result.best.step_seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", [60, 125, 138])
def test_every_sequence_of_stages_is_ranked_by_its_best_layers(seed: int) -> None:
    """All that the exhaustive reference lists and that fit, a group on both sides of another too. Layers are divided
    greedily: never faster than the best of all splits by closed form, and mostly as fast."""
    case = random_case(seed, "open")
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, SearchOptions(space=ON_CHIPS))
    scorer = make_scorer(problem)
    builder, reference = TemplateBuilder(problem, scorer), Exhaustive(case, scorer, math.inf)
    found = {(x.stages, x.size): x.seconds for x in StageSequences(ProgramInputs(problem, scorer)).fastest(1)}
    around, ratios = 0, list[float]()
    for size in (size for size in (1, 2, 4) if case.batch % size == 0):
        m = case.batch // size
        for usage in itertools.product(*(range(n + 1) for n in scorer.pool.counts)):
            for stages in reference._stages(usage, size) if any(usage) else ():
                shape = builder.shape(PipelineOutline(stages, size, 1), m, 1, "1f1b")
                if shape is None:
                    continue
                assert (stages, size) in found
                ways = (
                    tuple(replace(x, layers=int(n), recompute="none") for x, n in zip(stages, way))
                    for way in splits(case.model.num_layers, len(stages))
                )
                divided = (best_recompute(scorer.tables, PipelineTemplate(size, x), "1f1b", m, 1) for x in ways)
                least = min(closed_form(*scorer.stage_seconds(x), scorer.links(x), m) for x in divided if x)
                if all(stage.dp == 1 for stage in stages):  # others also reduce gradients
                    assert 0.999 * least <= found[stages, size] <= 1.25 * least
                    ratios.append(found[stages, size] / least)
                groups = [stage.group for stage in stages]
                around += len([g for g, _ in itertools.groupby(groups)]) > len(set(groups))
    assert around > 0
    assert np.median(ratios) < 1.01


def test_layers_are_divided_with_the_update_in_mind() -> None:
    """The second kind of chip updates slowly: the fastest pipeline gives it more than that is worth."""
    case = unequal_directions(random_case(74, "open"), 74)
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch)
    stages = tuple(StageTemplate(g, 1, 1, n) for g, n in ((0, 3), (1, 1), (1, 1)))
    known = PlanTemplate((PipelineReplicas(PipelineTemplate(1, stages), 1, case.batch),))
    there = simulate_template(known, problem, make_scorer(problem))
    assert there is not None and not there.prediction.over
    assert search(problem).best.step_seconds <= there.step_seconds * (1 + 1e-9)


def test_communicators_do_not_hide_what_fits() -> None:
    """Plans that are faster by their estimate lack memory for communicators; the best that fits has only the head in
    its last stage."""
    case = random_case(129, "fixed")
    space = SearchSpace((1,), "none", offload="never", more_schedules="never")
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, SearchOptions(space=space))
    stages = tuple(StageTemplate(g, tp, 1, n) for g, tp, n in ((1, 1, 1), (1, 1, 1), (2, 2, 2), (0, 2, 0)))
    known = PlanTemplate((PipelineReplicas(PipelineTemplate(1, stages), 1, case.batch),))
    there = simulate_template(known, problem, make_scorer(problem))
    assert there is not None and not there.prediction.over
    assert search(problem).best.step_seconds <= there.step_seconds * (1 + 1e-9)


def test_a_rank_reduces_one_segment_after_the_other() -> None:
    """Of two unlike pipelines, whose middle stages wait for the node that also reduces the last ones."""
    case = random_case(100, "fixed")
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch)
    scorer = make_scorer(problem)
    shapes = [(StageTemplate(0, 1, 1, 3), StageTemplate(2, 2, 1, 1)),
              (StageTemplate(0, 1, 1, 2), StageTemplate(1, 1, 1, 1), StageTemplate(1, 1, 1, 1))]  # fmt: skip
    template = PlanTemplate(tuple(PipelineReplicas(PipelineTemplate(1, shape), 1, 2) for shape in shapes))
    simulated, score = simulate_template(template, problem, scorer), scorer.score(template)
    assert simulated is not None and score is not None
    assert score.step_seconds == pytest.approx(simulated.step_seconds, rel=0.04)


def test_equal_plans_are_kept_once() -> None:
    shape = PipelineTemplate(2, (StageTemplate(0, 1, 1, 4), StageTemplate(0, 1, 1, 4)))
    case = random_case(900, "open")
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, 1)
    best = Incumbent(problem, make_scorer(problem))
    for order in ("stage", "pipeline"):
        best.take(PlanTemplate((PipelineReplicas(shape, 1, 1),), order=order), 1.0)
        best.take(PlanTemplate((PipelineReplicas(shape, 1, 1), PipelineReplicas(shape, 1, 1)), order=order), 2.0)
        best.take(PlanTemplate((PipelineReplicas(shape, 1, 3),), order=order), 3.0)
    assert [row[0] for row in best.rows] == [1.0, 2.0, 2.0, 3.0]  # two by order


