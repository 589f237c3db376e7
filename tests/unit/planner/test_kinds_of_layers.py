"""Layers of several kinds: what heads, adapters, experts and elementwise recompute cost beside them, and how
calibrations are shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.rates_section import format_rates
from hetero_megatron.planner.estimate import lower_bounds
from hetero_megatron.planner.estimate.lower_bounds import most_tokens, work_bound
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.modelled_operators import ModelledOperators
from hetero_megatron.predictor.cost.rates import load_rates, model_fingerprint
from hetero_megatron.predictor.rate_fitting import PARTS
from hetero_megatron.predictor.simulate.ring_attention import ContextSeconds
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.spec.flops import layers_alone, layers_by_kind
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import Lora, Sites
from hetero_megatron.spec.model_spec import LayerKind
from tests.support.moe_models import DEEPSEEK_V3, HYBRIDS, MOE_FAMILIES
from tests.support.small_plans import pipe, plan, stage

LENGTH, CHIP = 64, "A100-80-SXM"
TARGETS = ("q_proj", "v_proj", "up_proj")
HALVES = replace(load_model("tiny"), num_layers=4, layer_kinds=(*2 * (LayerKind(window=8),), *2 * (LayerKind(),)))
WINDOWS = replace(load_model("tiny"), num_layers=4, layer_kinds=(LayerKind(window=8), LayerKind()))


def cost_model(model: ModelSpec, rates: object = None) -> CostModel:
    return CostModel(replace(model, max_position_embeddings=LENGTH), cluster(rates), LENGTH, "bf16")


def cluster(rates: object = None) -> Cluster:
    chips = {CHIP: {"bf16": rates}} if rates else {}
    return cluster_from_dict({"nodes": [{"name": "n", "chip": CHIP, "chips_per_node": 2}], "rates": {"chips": chips}})


def layer_rows(model: ModelSpec, factor: float = 1.0, tp: int = 1) -> list[list[object]]:
    """Measured layers of each kind, ``factor`` times as slow as modelled, where launches take no time."""
    rows = []
    for kind, _ in layers_by_kind(model):
        operators = cost_model(kind, {"layer_seconds": 0.0}).operators(CHIP)
        seconds = operators.layer_by_operators(1 / tp, 1, LENGTH)
        rows.append([model_fingerprint(kind), tp, 1, LENGTH, *(factor * s for s in seconds)])
    return rows


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4", "kimi_linear", "qwen3_5"])
def test_modules_that_predict_further_tokens_have_the_last_layers_kind(family: str) -> None:
    model = replace(from_hf_config((MOE_FAMILIES | HYBRIDS)[family]), mtp_layers=1)
    last = layers_by_kind(model)[-1][0]
    rows = [[*row[:4], 1.0 if row[0] == model_fingerprint(last) else 0.1, 2.0] for row in layer_rows(model)]
    for rates in (None, {"layers": rows}):
        costs = cost_model(model, rates)
        one = plan_from_dict(plan([pipe(1, 2, stage([0], [0, model.num_layers]))], LENGTH), model)
        of_plan = StageCosts(one, costs).of(one.pipelines[0]).parts[0]
        estimated = costs.parts(StageChoice(CHIP, 1, 1, model.num_layers, True, True), 1)
        for part in ("layer", "head", "embed"):
            assert getattr(of_plan, part) == pytest.approx(getattr(estimated, part), rel=1e-6), part


@pytest.mark.parametrize("lora", [None, Lora(4, 4.0, TARGETS), Lora(4, 4.0, TARGETS, base_dtype="nf4")])
@pytest.mark.parametrize("model", [WINDOWS, from_hf_config(MOE_FAMILIES["mixtral"])], ids=["windows", "experts"])
def test_a_layer_as_fast_as_modelled_has_elementwise_recompute_as_modelled(
    model: ModelSpec, lora: Lora | None
) -> None:
    """Adapters, and making weights of few bits, are no small operators."""
    model = replace(model, lora=lora)
    operators = cost_model(model, {"layers": layer_rows(model), "layer_seconds": 0.0}).operators(CHIP)
    assert operators.layers_measured
    modelled = ModelledOperators.elementwise(operators, 1.0, 1, LENGTH)
    assert operators.elementwise(1.0, 1, LENGTH) == pytest.approx(modelled)


def test_adapters_of_single_layers_are_those_of_the_whole_model() -> None:
    sites = (Sites((2, 3), TARGETS, 4, 4.0),)
    model = replace(WINDOWS, lora=Lora(4, 4.0, TARGETS, sites=sites))
    assert layers_by_kind(model) == ((model, 1.0),) and layers_alone(model, (2, 3)) is model
    seconds = cost_model(model).operators(CHIP, False, layers_alone(model, (2, 3))).adapters(1.0, LENGTH)
    everywhere = replace(model, lora=Lora(4, 4.0, TARGETS))
    assert seconds == pytest.approx(cost_model(everywhere).operators(CHIP).adapters(1.0, LENGTH) / 2) and seconds > 0


@pytest.mark.parametrize("few", [LayerKind(window=8), LayerKind(chunk=16)], ids=["window", "chunk"])
def test_layers_of_a_context_stage_cost_what_each_sees(few: LayerKind) -> None:
    """All keys are gathered, so that blocks of a ring, which suit the widest window, make no difference."""
    groups = [{"ranks": [rank], "tokens": [LENGTH // 2], "heads": [8]} for rank in (0, 1)]

    def seconds(*kinds: LayerKind, rates: object = None) -> tuple[float, float]:
        model = replace(load_model("tiny"), num_layers=len(kinds), layer_kinds=kinds)
        there = stage([0, 1], [0, len(kinds)], context=groups, kv={"transport": "gather"})
        one = plan_from_dict(plan([pipe(1, 1, there)], LENGTH), model)
        return ContextSeconds(cost_model(model, rates)).layer(one.pipelines[0].stages[0])

    rates = {"layer_seconds": 0.0, "attention_flops": 1e6}
    narrow, wide = (seconds(kind, rates=rates) for kind in (few, LayerKind()))
    mixed = seconds(few, few, few, LayerKind(), rates=rates)
    assert narrow[0] != wide[0]
    assert mixed == pytest.approx([(3 * a + b) / 4 for a, b in zip(narrow, wide, strict=True)])


def test_a_context_stage_without_layers_costs_its_embedding() -> None:
    nodes = [{"name": "n", "chip": CHIP, "chips_per_node": 3}]
    model, three = replace(WINDOWS, max_position_embeddings=LENGTH), cluster_from_dict({"nodes": nodes})
    members = [{"ranks": [0], "tokens": [16], "heads": [8]}, {"ranks": [1], "tokens": [48], "heads": [8]}]
    stages = [{**stage([0, 1], [0, 0]), "context": members, "order": "contiguous"}, stage([2], [0, 4])]
    both = predict(plan_from_dict(plan([pipe(1, 1, *stages)], LENGTH), model, three), model, three, "bf16")
    assert both.step_seconds > 0.0


def test_no_plan_is_faster_than_the_bound_where_chips_are_good_at_unlike_kinds() -> None:
    """Of two chips each has the kind of layer that it computes ten times as fast as the other one."""
    kinds = [model_fingerprint(kind) for kind, _ in layers_by_kind(HALVES)]
    rows = {"a": (1.0, 10.0), "b": (10.0, 1.0)}
    tables = {
        name: [[kind, 1, 1, LENGTH, s, 2 * s] for kind, s in zip(kinds, seconds, strict=True)]
        for name, seconds in rows.items()
    }  # fmt: skip
    free = [[kind, 1, 1, LENGTH, 1e-12, 1e-12] for kind in kinds]
    more = {"attention": [[LENGTH, 4, 16, 1e-9, 2e-9]], "embed": free, "head": free, "step_seconds": 0.0}
    chips = {name: {"memory": "80 GB", "dtypes": ["bf16"], "tflops": {"bf16": 100}, "memory_bandwidth": "1 TB/s"}
             for name in rows}  # fmt: skip
    data = {
        "nodes": [{"name": name, "chip": name, "chips_per_node": 1} for name in rows], "chips": chips,
        "links": {"inter_node": {"bandwidth": "50 GB/s", "latency": "1 us"}},
        "rates": {"chips": {name: {"bf16": {"layers": table, **more}} for name, table in tables.items()}},
    }  # fmt: skip
    problem = PlanningProblem(HALVES, cluster_from_dict(data), LENGTH, 64)
    scorer = make_scorer(problem)
    apart = plan_from_dict(plan([pipe(1, 64, stage([0], [0, 2]), stage([1], [2, 4]))], LENGTH), HALVES)
    seconds = predict(apart, HALVES, problem.cluster, "bf16", scorer.costs).step_seconds
    bound = work_bound(scorer, HALVES, 64)
    assert bound <= seconds < 2 * bound
    most = most_tokens(scorer.costs, list(rows), np.array([[1.0, 1.0], [2.0, 0.0]]))
    assert 64 * LENGTH / bound <= most[0] * (1 + 1e-5)
    assert most[1] < most[0] / 2  # one of the two types has all of the work


def test_the_bound_of_several_kinds_of_work_is_nearly_that_of_the_linear_program() -> None:
    linprog, rng = pytest.importorskip("scipy.optimize").linprog, np.random.default_rng(0)
    for _ in range(5):
        chips, works = (int(n) for n in rng.integers(2, 6, 2))
        counts, seconds = rng.integers(1, 9, chips), np.exp(rng.normal(0, 1, (chips, works)))
        busy = np.hstack([np.kron(np.eye(chips), np.ones(works)) * seconds.ravel(), -counts[:, None]])
        done = np.hstack([np.tile(np.eye(works), chips), np.zeros((works, 1))])
        best = linprog(np.eye(chips * works + 1)[-1], busy, np.zeros(chips), done, np.ones(works)).fun
        assert 0.97 * best <= lower_bounds._least_seconds(seconds, counts.tolist()) <= best * (1 + 1e-6)


def test_experts_that_were_measured_for_the_whole_model_count() -> None:
    model = from_hf_config(DEEPSEEK_V3)
    assert model.moe is not None
    for fingerprint in (model_fingerprint(model), model_fingerprint(layers_by_kind(model)[0][0])):
        rows = [[fingerprint, model.moe.ffn_hidden_size, 1.0, 2.0, *[1e-20] * 8]]
        operators = cost_model(model, {"experts": rows}).operators(CHIP)
        load = operators.plain(1.0, LENGTH)
        assert load is not None
        assert operators.experts(load) == pytest.approx((model.moe.num_experts, 2 * model.moe.num_experts))


def test_what_a_fit_of_layers_scales_is_all_that_was_measured_of_them() -> None:
    tables = load_rates(cluster({"layers": layer_rows(WINDOWS)}), "bf16").chips[CHIP]
    assert all(hasattr(tables, part) for parts in PARTS.values() for part in parts)
    assert "elementwise" in PARTS["layers"]


def test_a_calibration_shows_the_seconds_of_each_kind() -> None:
    rows = [[kind, tp, 1, LENGTH, s, 2 * s] for kind, s in (("a" * 12, 0.001), ("b" * 12, 0.005)) for tp in (1, 2)]
    rates = {"chips": {"c": {"fp32": {"layers": rows, "embed": rows, "head": rows}}}, "links": []}
    lines = [line.split() for line in format_rates(rates).splitlines() if line.startswith("c ")]
    assert [(row[1], row[3], row[-1]) for row in lines] == [
        ("1", "1.000", "1"), ("2", "1.000", "1"), ("1", "5.000", "2"), ("2", "5.000", "2"),
    ]  # fmt: skip
    del rows[2:]
    assert "kind" not in format_rates(rates)
