"""Recomputing the first layers of a stage costs what these take, not what an average layer of the stage takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_megatron.cluster import load_cluster
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import NEMOTRON_H
from tests.support.paths import ROOT
from tests.support.small_plans import pipe, plan, stage

LENGTH = 2048
MODEL = from_hf_config(NEMOTRON_H | {
    "layers_block_type": ["mlp", "mlp", "full_attention", "linear_attention"], "hidden_size": 1024, "head_dim": 64,
    "num_attention_heads": 16, "intermediate_size": 16384, "max_position_embeddings": LENGTH,
})  # fmt: skip


def step_seconds(model: ModelSpec, recompute: str | dict[str, int]) -> float:
    cluster = load_cluster(str(ROOT / "examples/clusters/mixed_small.yaml"))
    made = plan_from_dict(plan([pipe(1, 1, stage([0], [0, 4], recompute=recompute))], LENGTH), model)
    return predict(made, model, cluster).step_seconds


def test_first_layers_cost_what_they_are() -> None:
    last_first = replace(MODEL, layer_kinds=MODEL.layer_kinds[::-1])
    of_mlps, of_others = (
        step_seconds(model, {"first": 2}) - step_seconds(model, "none") for model in (MODEL, last_first)
    )
    both = step_seconds(MODEL, "full") - step_seconds(MODEL, "none")
    assert of_mlps > 1.5 * of_others > 0
    assert of_mlps + of_others == pytest.approx(both, rel=0.05)  # not exactly: launching kernels takes its time, too
    assert step_seconds(MODEL, "none") == pytest.approx(step_seconds(last_first, "none"))
