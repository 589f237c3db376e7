"""Layers that cost unlike much: moving single ones ends at the fastest borders between stages, in every pipeline."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import Incumbent, simulated_plan
from hetero_megatron.planner.search.unlike_layers import UnlikeLayers
from hetero_megatron.plans import Plan, plan_from_dict, to_dict
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import HYBRIDS
from tests.support.paths import ROOT
from tests.support.small_plans import pipe, plan, stage

LENGTH, LONG = 256, 65536
MODEL = from_hf_config(HYBRIDS["qwen3_next"] | {
    "num_hidden_layers": 8, "hidden_size": 512, "max_position_embeddings": LENGTH, "linear_value_head_dim": 64,
    "linear_num_value_heads": 12, "linear_key_head_dim": 64,
    "layer_types": ["linear_attention"] * 5 + ["full_attention"] * 3, "moe_intermediate_size": 64,
})  # fmt: skip


def test_single_layers_go_where_the_step_is_fastest_in_pipelines_that_are_alike() -> None:
    cluster = load_cluster(str(ROOT / "examples/clusters/mixed_small.yaml"))
    problem = PlanningProblem(MODEL, cluster, LENGTH, 8, SearchOptions())
    scorer = make_scorer(problem)

    def cut(border: int) -> Plan:
        rows = (pipe(1, 4, stage([a], [0, border]), stage([a + 1], [border, 8])) for a in (0, 2))
        return plan_from_dict(plan(list(rows), LENGTH), MODEL)

    def predicted(made: Plan) -> Prediction:
        return predict(made, MODEL, problem.cluster, problem.dtype, scorer.costs)

    best = min(predicted(cut(border)).step_seconds for border in range(1, 8))
    for start in (1, 7):
        incumbent = Incumbent(problem, scorer)
        incumbent.plans[:] = [simulated_plan(problem, scorer, cut(start), predicted(cut(start)), "")]
        assert incumbent.plans[0].step_seconds > best
        assert UnlikeLayers().propose(problem, incumbent)
        found = incumbent.plans[0]
        assert found.step_seconds == best and predicted(found.plan).step_seconds == best
        assert len({pipeline.stages[0].layers for pipeline in found.plan.pipelines}) == 1


def test_long_sequences_get_context_groups_where_layers_with_attention_gain() -> None:
    nodes = [{"name": name, "chip": chip, "chips_per_node": 1} for name, chip in (("a", "A100-80-SXM"), ("b", "L40S"))]
    cluster = cluster_from_dict({"nodes": nodes, "links": {"inter_node": {"bandwidth": "50 GB/s", "latency": "10 us"}}})
    model = replace(MODEL, max_position_embeddings=LONG, num_layers=3, layer_kinds=MODEL.layer_kinds[4:7])
    without, found = (
        search(PlanningProblem(
            model, cluster, LONG, 1, SearchOptions(space=SearchSpace(max_tp=1, context=kind, more_schedules="never"))
        ))
        for kind in ("never", "always")
    )  # fmt: skip
    best = found.best
    assert "; chosen" in found.context and best.step_seconds < without.best.step_seconds
    assert plan_from_dict(to_dict(best.plan), model) == best.plan  # what the runtime takes
    assert predict(best.plan, model, cluster).step_seconds == best.step_seconds
    for rank, memory in best.prediction.memory.items():
        assert memory.total <= best.prediction.limits[rank]
    wider = replace(model, delta=replace(model.delta, value_dim=2 * model.delta.value_dim))  # type: ignore[arg-type]
    assert predict(best.plan, wider, cluster).step_seconds > best.step_seconds
