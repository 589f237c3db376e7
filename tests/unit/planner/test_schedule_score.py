"""The estimate of a template under a schedule made for it, against the step simulator; what effort changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import outline
from hetero_megatron.planner.report.text import format_plan
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.search.incumbent import simulate_template
from hetero_megatron.planner.search.schedule_search import LEAST_WORK, adapted, interleaved
from hetero_megatron.planner.search.schedule_times import ScheduleScorer
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from hetero_megatron.predictor.simulate.step import predict
from tests.support.planner_cases import MODEL, SEQ, cluster

SPEEDS = (1.0, 1.7, 1.3, 1.0)
EFFORT = 30_000
SLACK = 100_000  # of work: what was begun is finished


def template(layers: tuple[int, ...], copies: int, micro_batches: int) -> PlanTemplate:
    stages = tuple(StageTemplate(g, 1, 1, n) for g, n in enumerate(layers))
    return PlanTemplate((PipelineReplicas(PipelineTemplate(1, stages), copies, micro_batches),))


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_estimate_is_near_to_the_simulated_step(chunks: int) -> None:
    """Of unlike stages with transfers and gradient reduction, the schedule made from the estimate's seconds takes what
    the one made for the concrete plan does."""
    where = cluster(speeds=SPEEDS, beta=1e-8, model=MODEL)
    for layers in ((3, 2, 3, 3), (4, 2, 2, 3), (2, 3, 3, 3)):
        problem = PlanningProblem(MODEL, where, SEQ, 8, SearchOptions(dtype="fp32"))
        scorer = make_scorer(problem)
        start = simulate_template(template(layers, 1, 8), problem, scorer)
        assert start is not None
        cut = start.plan if chunks == 1 else interleaved(start.plan, chunks)
        assert cut is not None
        made = adapted(cut, start.prediction, scorer.costs, EFFORT) or cut
        found = predict(made, MODEL, where, costs=scorer.costs).step_seconds
        estimate, rules = ScheduleScorer(scorer).estimate(template(layers, 1, 8), chunks, EFFORT)
        assert len(rules) == 1 and estimate == pytest.approx(found, rel=0.02)
        assert estimate <= start.step_seconds * 1.02 or chunks > 1


def test_what_no_schedule_can_make_faster_is_not_estimated() -> None:
    where = cluster(speeds=SPEEDS, model=MODEL)
    problem = PlanningProblem(MODEL, where, SEQ, 8, SearchOptions(dtype="fp32"))
    score = ScheduleScorer(make_scorer(problem))
    seconds, _ = score.estimate(template((3, 2, 3, 3), 1, 8), 1, EFFORT)
    assert score.estimate(template((3, 2, 3, 3), 1, 8), 1, EFFORT, 0.5 * seconds) == (math.inf, ())
    assert score.estimate(template((0, 2, 3, 6), 1, 8), 2, EFFORT)[0] == math.inf  # a stage without two chunks


def test_equal_questions_have_equal_answers_and_more_effort_is_no_worse() -> None:
    where = cluster(speeds=SPEEDS[:2], beta=1e-8, model=MODEL)
    options = SearchOptions(dtype="fp32", space=SearchSpace(more_schedules="always"))
    problem = PlanningProblem(MODEL, where, SEQ, 4, options)
    found = [search(problem).best for _ in range(2)]
    assert found[0].plan == found[1].plan
    more = replace(options, space=replace(options.space, schedule_effort=3.0))
    assert search(replace(problem, options=more)).best.step_seconds <= found[0].step_seconds * (1 + 1e-9)


def test_a_search_ends_when_its_work_is_done() -> None:
    """Work is counted, not timed: however fast the machine, a search that has a plan ends soon after its work is used
    up, says so, and finds the same again; one that a time limit ends is not ended by its work."""
    where = cluster(speeds=SPEEDS[:2], beta=1e-8, model=MODEL)

    def found(work: float, more: str = "always", **options: Any) -> SearchResult:
        chosen = SearchOptions(dtype="fp32", work=work, space=SearchSpace(more_schedules=more), **options)
        return search(PlanningProblem(MODEL, where, SEQ, 8, chosen))

    whole, before = found(SearchOptions.work), found(0, "never").scorer.work.done
    assert not whole.work_ended
    for work in (20_000.0, 0.8 * (whole.scorer.work.done - before)):
        one, again = found(work), found(work)
        most = max(work, before + LEAST_WORK * work)
        assert one.work_ended and before < one.scorer.work.done < min(most + SLACK, whole.scorer.work.done)
        assert one.scorer.work.done == again.scorer.work.done and one.best.plan == again.best.plan
        assert one.best.step_seconds >= whole.best.step_seconds * (1 - 1e-9)
    patient = found(20_000.0, time_limit=1e6)
    assert not patient.work_ended and patient.best.plan == whole.best.plan
    assert "--schedule-effort 4 looks further" in format_plan(outline(one, PlanningProblem(MODEL, where, SEQ, 8)))
