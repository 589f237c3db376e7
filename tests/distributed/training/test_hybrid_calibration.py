"""Layers of several kinds (linear attention, windows, experts) cost unlike much: each is measured, and stages cost what
they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.calibration import CalibrationOptions, Job, calibrate
from hetero_megatron.calibration.layers import train
from hetero_megatron.calibration.pipelines import Run
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.emulation.clock import EmulatedClock, OperatorSeconds
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layers_alone, layers_by_kind
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.train import optimizer_factory
from tests.support.moe_models import DOTS1, HYBRIDS, LLAMA4
from tests.support.pool import shared_pool

LENGTH = 64
MODEL = replace(from_hf_config(HYBRIDS["qwen3_next"]), max_position_embeddings=LENGTH)
LAYERS = MODEL.num_layers
DENSE_FIRST = from_hf_config(DOTS1 | {"first_k_dense_replace": 2, "num_hidden_layers": LAYERS})
MODELS = {"linear attention": MODEL, "dense first": replace(DENSE_FIRST, max_position_embeddings=LENGTH)}
CUTS = [(1, "none"), (2, "none"), (3, "none"), (2, "selective")]  # layers of the first of two stages, recompute
CLUSTER = {
    "nodes": [{"name": "n", "count": 2, "chip": "c"}],
    "chips": {"c": {"memory": "1 GiB", "dtypes": ["fp32"], "emulate": {"speed": 0.5}}},
    "links": {"inter_node": {"bandwidth": "100 MB/s", "latency": "10 us"}},
}


def test_a_stage_costs_what_its_kinds_of_layers_do() -> None:
    (linear, three), (attention, one) = layers_by_kind(MODEL)
    assert (three, one) == (0.75, 0.25) and linear.delta is not None
    seconds = {model_fingerprint(linear): (1.0, 2.0), model_fingerprint(attention): (3.0, 7.0)}
    assert len(seconds) == 2
    rows = [[model, 1, 1, LENGTH, *s] for model, s in seconds.items()]
    tables = {"layers": rows, "embed": [[*r[:4], 0.5, 0.25] for r in rows], "head": [[*r[:4], 0.5, 1.0] for r in rows]}
    tables["split_layers"] = [[*r[:4], r[5] / 2, r[5] / 2] for r in rows]
    rates = {"chips": {"c": {"fp32": {**tables, "action_seconds": 0.0}}}}
    costs = CostModel(MODEL, cluster_from_dict({**CLUSTER, "rates": rates}), LENGTH, "fp32")
    for layers, expected in (
        (range(4), (1.5, 3.25)), (range(3), (1.0, 2.0)), (range(3, 4), (3.0, 7.0)), (range(2, 4), (2.0, 4.5)),
    ):  # fmt: skip
        operators = costs.operators("c", False, layers_alone(MODEL, tuple(layers)))
        assert operators.layer(1.0, 1, LENGTH) == pytest.approx(expected)
        assert operators.split_measured and sum(operators.split_layer(1.0, 1, LENGTH)) == pytest.approx(expected[1])
        assert operators.embed(1.0, 1, LENGTH) == pytest.approx((0.5, 0.25))
        assert operators.head(1.0, 1, LENGTH) == pytest.approx((0.5, 1.0))
    assert costs.operators("c").layer(1.0, 1, LENGTH) == pytest.approx((1.5, 3.25))


def test_kinds_differ_by_what_they_cost() -> None:
    """Llama 4 has layers with and without chunks, each with experts or without; whose rotation differs is no kind."""
    kinds = layers_by_kind(from_hf_config(LLAMA4))
    assert [share for _, share in kinds] == [0.5, 0.25, 0.25] and all(model.num_layers == 1 for model, _ in kinds)
    assert layers_by_kind(DENSE_FIRST)[0][0].moe_share == 0.0 and layers_by_kind(DENSE_FIRST)[1][0].moe_share == 1.0
    plain = from_hf_config(DOTS1 | {"first_k_dense_replace": 0})
    assert layers_by_kind(plain) == ((plain, 1.0),)


def test_where_only_the_whole_model_was_measured_each_layer_is_like_the_average() -> None:
    rows = [[model_fingerprint(MODEL), 1, 1, LENGTH, 1.5, 3.25]]
    cluster = cluster_from_dict({**CLUSTER, "rates": {"chips": {"c": {"fp32": {"layers": rows}}}}})
    costs = CostModel(MODEL, cluster, LENGTH, "fp32")
    for layers in (range(4), range(3), range(3, 4)):
        operators = costs.operators("c", False, layers_alone(MODEL, tuple(layers)))
        assert operators.layer(1.0, 1, LENGTH) == pytest.approx((1.5, 3.25))


def test_sizes_between_and_beyond_measured_ones_are_on_their_line() -> None:
    """Also where another TP degree was measured, whose layers take half; beyond them never less than modelled."""
    plain = from_hf_config(DOTS1 | {"first_k_dense_replace": 0})
    name = model_fingerprint(plain)
    rows = [[name, tp, n, 16, (0.5 + 0.25 * n) / tp, (1.0 + n) / tp] for tp in (1, 2) for n in (2, 4, 8)]
    cluster = cluster_from_dict({**CLUSTER, "rates": {"chips": {"c": {"fp32": {"layers": rows}}}}})
    operators = CostModel(plain, cluster, 16, "fp32").operators("c")
    for tp in (1, 2):
        for n in (2, 3, 4, 6, 8, 12, 64):
            expected = ((0.5 + 0.25 * n) / tp, (1.0 + n) / tp)
            assert operators.layer(1 / tp, n, 16) == pytest.approx(expected)
    modelled, flat = operators.layer_by_operators(1.0, 10**6, 16), [[name, 1, n, 16, 1e-6, 1e-6] for n in (1, 2)]
    cluster = cluster_from_dict({**CLUSTER, "rates": {"chips": {"c": {"fp32": {"layers": flat}}}}})
    assert CostModel(plain, cluster, 16, "fp32").operators("c").layer(1.0, 10**6, 16) == pytest.approx(modelled)


def cut(model: ModelSpec, layers: int, cluster: Cluster, recompute: str) -> Run:
    """Both chips, the first with so many layers."""
    stages = [{"ranks": [0], "layers": [0, layers]}, {"ranks": [1], "layers": [layers, LAYERS]}]
    stages = [{**stage, "recompute": recompute} for stage in stages]
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 4, "stages": stages}
    head = {"version": 1, "seq_length": LENGTH, "global_batch_size": 4, "schedule": "1f1b"}
    plan = plan_from_dict({**head, "pipelines": [pipeline]}, model, cluster)
    return Run(plan, model, model_fingerprint(model), "", 4)


def _observe(comm: Any, model: ModelSpec) -> tuple[dict[str, Any], list[list[tuple[float, float]]]]:
    """(measured rates, by cut and stage the seconds of a forward and a backward) on an emulated clock."""
    cluster = cluster_from_dict({**CLUSTER, "nodes": [{"name": "n", "count": 8, "chip": "c"}]})
    comm.clock = EmulatedClock(lambda: 0.5, OperatorSeconds())
    job = Job(comm, torch.float32, optimizer_factory(OptimizerConfig()))
    options = CalibrationOptions(LENGTH, "fp32", (1,), (1,), (LENGTH,), steps=1)
    try:
        rates = calibrate(job, cluster, model, options, lambda _: None).rates
        took = []
        for layers, recompute in CUTS:
            run = cut(model, layers, cluster, recompute)
            runtime = job.runtime(run)
            if runtime is not None:
                train(runtime, run, 4)
                actions = train(runtime, run, 4).actions
                took.append([sum(t.computed for t in actions if t.action.kind == kind) / 4 for kind in "FB"])
    finally:
        comm.clock = comm.hooks.clock
    return rates, took


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_stages_take_what_calibration_says(model: ModelSpec) -> None:
    answers = shared_pool().run(_observe, model)
    cluster = cluster_from_dict({**CLUSTER, "rates": answers[0][0]})
    costs = CostModel(model, cluster, LENGTH, "fp32")
    for i, (layers, recompute) in enumerate(CUTS):
        plan = cut(model, layers, cluster, recompute).plan
        stages = StageCosts(plan, costs).of(plan.pipelines[0]).costs
        for rank in range(2):
            forward, backward = answers[rank][1][i]
            # What an action takes besides its layers is one number, of forwards and backwards.
            assert stages.forward[rank] + stages.backward[rank] == pytest.approx(forward + backward, rel=0.01)
            assert stages.forward[rank] == pytest.approx(forward, rel=0.06)
