"""Plans with optimizers in host memory: against exhaustive search, by default only where nothing fits without."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import BRIEF, summarize
from hetero_megatron.planner.report.text import format_summary
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.pipeline_dp import PipelineDP
from hetero_megatron.planner.search.small_clusters import SmallClusters
from hetero_megatron.planner.whatif.replan import WarmPlanner
from hetero_megatron.plans import dump_yaml, plan_from_dict, validate
from hetero_megatron.predictor.cost.cost_options import CostOptions, StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.spec.flops import parameter_count
from tests.support.planner_reference import GIB, Case, Exhaustive, random_case
from tests.support.selection import quick


def _search(case: Case, offload: str, schedules: str = "auto") -> SearchResult | None:
    try:
        return search(
            PlanningProblem(
                case.model, case.cluster, case.seq_length, case.batch,
                SearchOptions(space=SearchSpace(offload=offload, more_schedules=schedules)),
            )
        )
    except UserError:
        return None


def _short_of_memory(bytes_per_parameter: float, nodes: int = 2) -> Case:
    """Two chips, each a node of its own, with so much memory together for the model's states."""
    model = random_case(0, "open").model
    memory = GIB + bytes_per_parameter * parameter_count(model) / 2
    cluster = cluster_from_dict({
        "nodes": [{"name": "n", "chip": "c", "count": nodes}],
        "chips": {"c": {"memory": f"{int(memory)} B", "tflops": {"bf16": 100}, "memory_bandwidth": "1 TB/s"}},
        "links": {"inter_node": {"bandwidth": "10 GB/s", "latency": "10 us"}},
    })  # fmt: skip
    return Case(model, cluster, 1024, 8)


def _offloaded(result: SearchResult) -> list[bool]:
    return [s.optimizer.offload for p in result.best.plan.pipelines for s in p.stages]


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(range(12), [1, 3, 4, 10], [0, 7, 8]))
def test_as_good_as_exhaustive_search(seed: int) -> None:
    """A sample; benchmarks/bench_planner_optimal.py --offload runs hundreds."""
    case = random_case(100 + seed, "open")
    # The reference knows whole backwards only.
    found, without = _search(case, "always", "never"), _search(case, "never", "never")
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    if found is None:
        assert without is None
        assert Exhaustive(case, scorer, math.inf, offload=True).run() == math.inf
        return
    validate(found.best.plan, case.model, found.best.cluster, dtype="bf16")
    assert not found.best.prediction.over
    assert without is None or found.best.step_seconds <= without.best.step_seconds * (1 + 1e-9)
    score = scorer.score(found.best.template)
    assert score is not None
    best = Exhaustive(case, scorer, score.step_seconds, offload=True).run()
    assert score.step_seconds <= 1.01 * best


def test_by_default_only_where_nothing_fits_without() -> None:
    """States take 2 + 4 bytes per parameter and 12 of the optimizer's."""
    for memory in (12, 40):
        case = _short_of_memory(memory)
        chosen, without, always = (_search(case, offload, "never") for offload in ("auto", "never", "always"))
        assert chosen is not None and always is not None
        assert (without is None) == (memory == 12) == any(_offloaded(chosen)) == chosen.offload_tried
        if memory == 12:
            assert chosen.best.plan == always.best.plan
            assert any(m.host > 0 and m.optimizer == 0 for m in chosen.best.prediction.memory.values())
            written = dump_yaml(chosen.best.plan)
            assert plan_from_dict(yaml.safe_load(written), case.model) == chosen.best.plan
        else:
            assert chosen.best.plan == without.best.plan  # type: ignore[union-attr]


def test_the_report_says_so_and_its_bound_holds() -> None:
    case = _short_of_memory(12)
    options = SearchOptions()
    result = search(PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, options))
    summary = summarize(
        result, PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, options), BRIEF
    )
    assert "offload" in format_summary(summary)
    assert summary.bound is not None and summary.bound.seconds <= result.best.step_seconds


def test_a_smaller_cluster_is_planned_again_with_optimizers_where_they_were() -> None:
    case = _short_of_memory(13, nodes=3)
    options = SearchOptions(space=SearchSpace(offload="always", more_schedules="never"))
    planner = WarmPlanner(PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, options))
    assert any(_offloaded(planner.result))
    plan, cluster, _ = planner.without(["n-2"])
    validate(plan, case.model, cluster, dtype="bf16")
    assert any(s.optimizer.offload for p in plan.pipelines for s in p.stages)


def test_an_update_in_host_memory_takes_what_its_links_and_memory_take() -> None:
    case = _short_of_memory(40)
    options = CostOptions(host_bandwidth=1e9, host_memory_bandwidth=4e9)
    costs = CostModel(case.model, case.cluster, case.seq_length, "bf16", options)
    stage = StageChoice("c", 1, 1, 2, False, False, "none")
    here, there = (costs.optimizer_seconds(replace(stage, offload=x), 1) for x in (False, True))
    owned = costs.owned_elements(stage, 1)
    fixed = costs.chip_rates("c").step_seconds
    assert here - fixed == pytest.approx(owned * 28 / costs.chip_rates("c").bytes_per_second)
    assert there - fixed == pytest.approx(owned * (28 / 4e9 + 6 / 1e9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SearchOptions(dtype="fp64", space=SearchSpace(offload="always")), "the update in host memory is fp32"),
        (SearchOptions(space=SearchSpace(offload="always"), costs=CostOptions(moments=1)), "only Adam"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(options: SearchOptions, message: str) -> None:
    case = _short_of_memory(40)
    with pytest.raises(UserError, match=f"--offload.*{message}"):
        search(PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, options))


def test_where_nothing_fits_the_search_on_the_chips_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: list[SmallClusters | PipelineDP] = []
    for kind in (SmallClusters, PipelineDP):

        def propose(
            self: SmallClusters | PipelineDP,
            problem: PlanningProblem,
            incumbent: Incumbent,
            kept: Callable[..., bool] = kind.propose,
        ) -> bool:
            if not incumbent.scorer.tables.offload:
                plain.append(self)
            return kept(self, problem, incumbent)

        monkeypatch.setattr(kind, "propose", propose)
    found = _search(_short_of_memory(12), "auto", "never")
    assert found is not None and found.offload_tried
    assert plain and len(plain) == len({type(proposer) for proposer in plain})
