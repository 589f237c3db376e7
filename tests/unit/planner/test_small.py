"""The complete enumeration: its bounds of many splits at once, and what it may never lose against."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.subset import of_type
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.layer_partition import best_split, listed
from hetero_megatron.planner.estimate.lower_bounds import SyncBounds, affine_lower_bound, split_lower_bound
from hetero_megatron.planner.estimate.stage_table import StageKind
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.report.comparison import BRIEF, best_uniform, summarize
from hetero_megatron.planner.report.text import summary_json
from hetero_megatron.planner.search.driver import SearchResult, search, search_or_error
from hetero_megatron.planner.search.incumbent import Incumbent, simulate_template
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from tests.support.planner_reference import random_case

ON_CHIPS = SearchSpace(offload="never", more_schedules="never")
PLAIN = SearchSpace(more_schedules="never")


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
    assert result.method == "enumeration"
    rows: dict[str, float] = {}
    for chip in dict.fromkeys(group.chip for group in result.pool.groups):
        part = search_or_error(problem.on(of_type(case.cluster, chip)))
        if not isinstance(part, UserError):
            rows[chip] = part.best.step_seconds
    assert rows == {row.name: row.step_seconds for row in summarize(result, problem).alone if not row.problem}
    uniform = best_uniform(result, problem)[0]
    best = min([*rows.values(), *([] if uniform.problem else [uniform.step_seconds])], default=math.inf)
    assert math.isfinite(best)
    assert result.best.step_seconds <= best * (1 + 1e-9)
    assert result.lower_bound <= result.best.step_seconds


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
    assert score.step_seconds == pytest.approx(simulated.step_seconds, rel=0.03)


def test_equal_plans_are_kept_once() -> None:
    shape = PipelineTemplate(2, (StageTemplate(0, 1, 1, 4), StageTemplate(0, 1, 1, 4)))
    case = random_case(900, "open")
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, 1)
    best = Incumbent(problem, make_scorer(problem))
    for schedule in ("1f1b", "gpipe"):
        for order in ("stage", "pipeline"):
            best.take(PlanTemplate((PipelineReplicas(shape, 1, 1),), schedule, order), 1.0)
            best.take(
                PlanTemplate((PipelineReplicas(shape, 1, 1), PipelineReplicas(shape, 1, 1)), schedule, order), 2.0
            )
            best.take(PlanTemplate((PipelineReplicas(shape, 1, 3),), schedule, order), 3.0)
    # One; two by order; one with two schedules.
    assert [row[0] for row in best.rows] == [1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("seed", range(8))
def test_bounds_of_all_splits_are_those_of_each(seed: int) -> None:
    case = random_case(900 + seed, "open")
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    tables, layers = scorer.tables, case.model.num_layers
    groups = [g for g, n in enumerate(scorer.pool.counts) for _ in range(n)][:3]
    stages = [StageTemplate(g, 1, 1) for g in groups]
    last, tails = len(stages) - 1, SyncBounds(scorer.bounds, layers)
    found = [tables.table(StageKind(g, 1, 1, 1, s == 0, s == last, 2.0)) for s, g in enumerate(groups)]
    times, forward = [t.seconds[0] for t in found], [t.forward for t in found]
    links = [tables.boundary(a, b, 1, tables.likely_same_node(a, b)) for a, b in zip(stages, stages[1:])]
    for m in (1, 4):
        best = best_split(times, links, m, "1f1b", forward)
        low = split_lower_bound([affine_lower_bound(t) for t in times], layers, links, m)
        assert best is None or low <= best[0] * (1 + 1e-12)
    ways, _, seconds = listed(times, links, 1, "1f1b", forward)
    first = np.stack([forward[s][ways[:, s]] for s in range(len(stages))], axis=1)
    for pipelines in (1, 3):
        after = tails.sync_tail(stages, ways, seconds - first, links, pipelines)
        for way, value, row in zip(ways.tolist(), after.tolist(), seconds):
            made = []
            for s, (stage, table) in enumerate(zip(stages, found)):
                recompute, count = table.choice(1, way[s])
                made.append(replace(stage, layers=way[s], recompute=recompute, first=count))
            if np.isfinite(row).all():
                one = scorer.bounds.sync_tail(PipelineTemplate(1, tuple(made)), links, pipelines)
                assert value == pytest.approx(one, rel=1e-9, abs=1e-15)


def _fast_links(batch: int, unlike: bool, schedules: str = "never") -> SearchResult:
    chips = (("A100-80-SXM", 2), ("L40S", 1))
    link = {"bandwidth": "200 GB/s", "latency": "5 us"}
    nodes = [{"name": f"n{i}", "chip": chip, "chips_per_node": n} for i, (chip, n) in enumerate(chips)]
    cluster = cluster_from_dict({"version": 1, "nodes": nodes, "links": {"intra_node": link, "inter_node": link}})
    options = SearchOptions(space=SearchSpace(unlike_tp=unlike, more_schedules=schedules))
    return search(PlanningProblem(load_model("llama2-7b"), cluster, 2048, batch, options))


def test_tensor_parallel_groups_of_unlike_chips_are_cut_by_speed() -> None:
    """Where links between unlike chips are as fast as those inside a node, and few sequences have to be done."""
    plain, result = _fast_links(1, False), _fast_links(1, True)
    assert not plain.best.text and result.unlike_groups
    assert result.best.step_seconds < plain.best.step_seconds
    plan, costs = result.best.plan, result.scorer.costs
    (unit,) = plan.pipelines[0].stages[0].units
    assert len(set(unit.tp_split)) > 1 and len({result.best.cluster.ranks[r].chip for r in unit.ranks}) > 1
    again = predict(plan, costs.model, result.best.cluster, "bf16", costs)
    assert again.step_seconds == pytest.approx(result.best.step_seconds, rel=1e-12) and not again.over
    stage = plan.pipelines[0].stages[0]
    even = replace(stage, units=(replace(unit, tp_split=(1,) * unit.tp),))
    equal = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(even,)),))
    assert result.best.step_seconds < predict(equal, costs.model, result.best.cluster, "bf16", costs).step_seconds
    # The bound counts all plans then.
    summary = summarize(result, PlanningProblem(costs.model, result.best.cluster, 2048, 1), BRIEF)
    assert summary.bound is not None and summary.bound.seconds <= result.best.step_seconds
    assert summary_json(summary)
    # Under further schedules a pipeline of unlike chips is faster still: searching more never finds less.
    wider, narrower = (_fast_links(1, unlike, "auto").best.step_seconds for unlike in (True, False))
    assert wider <= min(narrower, result.best.step_seconds)
