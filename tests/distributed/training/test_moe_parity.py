"""The central law with mixtures of experts: any plan, with experts divided anyhow, gives the single-process result."""

from __future__ import annotations

import os
import random

import pytest

from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import Case, check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.random_plans import random_experts, random_plan
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

SEED = int(os.environ.get("SEED", "2026"))
COUNT = int(os.environ.get("N", "30"))
QUICK = range(COUNT if "N" in os.environ else 6)  # in `make test`
QWEN = MOE_FAMILIES["qwen2_moe"] | {"num_hidden_layers": 3}


def moe_case(seed: int, family: str | None = None) -> Case:
    rng = random.Random(seed)
    model = dict(MOE_FAMILIES[family or rng.choice(sorted(MOE_FAMILIES))])
    ranks = rng.choice([1, 2, 3, 4, 4, 5, 6])
    spelled = random_plan(rng, model["num_hidden_layers"], model["num_attention_heads"], rng.randint(8, 14), ranks)
    count = model.get("num_experts") or model["num_local_experts"]
    for pipeline in spelled["pipelines"]:
        for one in pipeline["stages"]:
            if rng.random() < 0.8:
                columns = model.get("moe_intermediate_size", model["intermediate_size"])
                one["experts"] = random_experts(rng, one["ranks"], count, columns)
    return Case(
        seed, ranks, model, spelled, packed=rng.random() < 0.4, masked=rng.random() < 0.3,
        optimizer=rng.choice(["adamw", "sgd"]), clip_grad=rng.choice([0.0, 0.05]), chunked_loss=rng.random() < 0.2,
    )  # fmt: skip


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK))
def test_random_experts_equal_one_process(index: int) -> None:
    check_case(moe_case(SEED + index), shared_pool())


HAND_WRITTEN = {
    # A shared gate and a router see the tokens of their own rank only: a sum over all ranks, counted once each.
    "router_under_tensor_parallelism": plan([pipe(2, 2, stage([0, 1, 2], [0, 3], tp=3, tp_split=[1, 2, 1]))]),
    "unequal_experts_over_replicas": plan([pipe(2, 3, stage([0, 1], [0, 3], tp=1, dp_split=[1, 1], experts=[
        {"ranks": [1, 0], "experts": [[0, 4], [4, 5]]}]))]),
    "a_rank_without_experts_and_one_that_shares": plan([pipe(3, 2, stage([2, 0, 1], [0, 3], tp=1, experts=[
        {"ranks": [0, [1, 2]], "experts": [[], [0, 5]], "split": [[1], [2, 1]]}]))]),
    "replicated_experts": plan([pipe(2, 2, stage([0, 1], [0, 3], tp=1, recompute="full", experts=[
        {"ranks": [0, 1], "experts": [[0, 3], [1, 5]]}]))]),
    "two_groups_in_pipelines_with_deferred_weights": plan([
        pipe(2, 4, stage([0, 1], [0, 1], tp=2, experts=[{"ranks": [1, 0], "experts": [[0, 1], [1, 5]]}]),
             stage([2, 3], [1, 3], tp=1, experts=[{"ranks": [2, 3], "experts": [[0, 2], [2, 5]]}])),
        pipe(1, 1, stage([4], [0, 3])),
    ], schedule="zero-bubble"),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written(name: str) -> None:
    check_case(fixed_case(QWEN, HAND_WRITTEN[name], packed=True, masked=True), shared_pool())
