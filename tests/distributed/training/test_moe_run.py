"""Balanced experts as users run them: Megatron's flags on two ranks, on with another division on three; as one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.plans import plan_from_dict, to_dict
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import Case, check_case
from tests.support.pool import shared_pool
from tests.support.programs import run_ranks
from tests.support.selection import quick

MODEL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-experts 8 --moe-router-topk 4
    --moe-ffn-hidden-size 12 --moe-layer-freq [0]*1+[1]*2 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-router-num-groups 4
    --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 10
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01
"""
RUN = "--mock-data --vocab-size 100 --fp64 --seed 3 --train-iters 6 --lr 1e-2 --lr-decay-style constant"
UNIFORM = ["--seq-length", "24", "--global-batch-size", "4", "--micro-batch-size", "1"]
UNEVEN = """
version: 1
seq_length: 24
global_batch_size: 4
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 2
    stages:
      - {ranks: [0, 1, 2], layers: [0, 3], tp: 3, recompute: full,
         experts: [{ranks: [2, 0, 1], experts: [[0, 5], [], [4, 8]]}]}
"""


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_under_another_division_of_its_experts(tmp_path: Path) -> None:
    one, two, plan, stats = tmp_path / "one", tmp_path / "two", tmp_path / "plan.yaml", str(tmp_path / "stats.json")
    words = [*MODEL.split(), *RUN.split(), "--log-interval", "1"]
    run_ranks(1, [*words, *UNIFORM, "--save", str(one), "--routing-stats", stats])
    divided = ["--expert-model-parallel-size", "2", "--exit-interval", "3"]
    run_ranks(2, [*words, *UNIFORM, *divided, "--save", str(two)])
    plan.write_text(UNEVEN)
    out = run_ranks(3, [*words, "--seq-length", "24", "--plan", str(plan), "--save", str(two), "--load", str(two)])
    want, got = lines(one), lines(two)
    assert [row["step"] for row in got] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(want, got, strict=True):
        for key in ("loss", "grad_norm", "load_balancing_loss", "z_loss"):
            assert a[key] == pytest.approx(b[key], rel=1e-9), (a["step"], key)
        assert a["expert_load"]["max_over_mean"] == b["expert_load"]["max_over_mean"]
        assert sum(a["expert_load"]["rank_rows"]) == 4 * 24 * 4 * 2
    assert "the router's bias moves by 0.02 per step" in str(out)
    found = json.loads(Path(stats).read_text())
    assert found["tokens"] == 6 * 4 * 24 and sorted(found["layers"]) == ["1", "2"]
    assert all(sum(counts) == 4 * found["tokens"] and min(counts) > 0 for counts in found["layers"].values())


FLAGS = {
    "over_replicas_in_a_pipeline": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "inside_a_tp_group": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
                          "expert_tensor_parallel_size": 1},
    "tp_groups_share_columns": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "over_context_parallel": {"context_parallel_size": 2, "expert_model_parallel_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", quick(FLAGS, ["over_replicas_in_a_pipeline"]))
def test_megatron_flags_train_as_one_process(name: str) -> None:
    model = MOE_FAMILIES["mixtral"]
    spec = from_hf_config(model)
    flags = MegatronParallel(world_size=4, seq_length=10, micro_batch_size=2, **FLAGS[name])
    described = to_dict(from_megatron(flags, spec))
    assert plan_from_dict(described, spec).ranks == (0, 1, 2, 3)
    _, ranks = check_case(Case(11, 4, model, described, packed=True, masked=True), shared_pool())
    assert all(np.isfinite(seen["losses"]).all() for seen in ranks)
