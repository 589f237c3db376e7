"""The central law with mixtures of experts: any plan, with experts divided anyhow, gives the single-process result."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import Case, check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.random_plans import divide_weights, random_experts, random_plan, random_stage
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

SEED = int(os.environ.get("SEED", "2026"))
COUNT = int(os.environ.get("N", "14"))
QUICK, SLOW = range(3), (4, 6)
MODELS = {
    "qwen2_moe": MOE_FAMILIES["qwen2_moe"] | {"num_hidden_layers": 3},
    # Sinks and query heads are cut, biases of experts are added once by ranks that share columns.
    "gpt_oss": MOE_FAMILIES["gpt_oss"] | {"num_hidden_layers": 3},
    # Latents are the same on all ranks, and heads of unlike sizes are cut.
    "deepseek_v2": MOE_FAMILIES["deepseek_v2"] | {"n_routed_experts": 5},
    # Attention in chunks across context groups; the weights of tokens reach the experts before anything else does.
    "llama4": MOE_FAMILIES["llama4"] | {
        "num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2, "attention_chunk_size": 3,
        "no_rope_layers": [1, 0, 1], "moe_layers": [0, 2], "floor_scale": 2,
    },
    "deepseek_v3": MOE_FAMILIES["deepseek_v3"] | {"n_routed_experts": 5, "n_group": 1, "topk_group": 1},
}


def two_islands(rng: random.Random, group: dict[str, Any]) -> list[list[int]]:
    """The ranks of an expert group, cut in two anywhere: tokens go in two hops where that saves any."""
    ranks = [rank for entry in group["ranks"] for rank in (entry if isinstance(entry, list) else [entry])]
    rng.shuffle(ranks)
    cut = rng.randint(1, len(ranks) - 1)
    return [ranks[:cut], ranks[cut:]]


def wide_plan(rng: random.Random, layers: int, heads: int, seq_length: int, ranks: int) -> dict[str, Any]:
    """One stage of all ranks, which share the experts."""
    spelled = random_stage(rng, rng.sample(range(ranks), ranks), [[0, layers]], ranks, heads, seq_length)
    return plan([pipe(ranks, rng.randint(1, 2), spelled)], seq_length)


def moe_case(seed: int, family: str | None = None) -> Case:
    rng, wide = random.Random(seed), seed % 3 == 0
    model = dict(MOE_FAMILIES[family or rng.choice(sorted(MOE_FAMILIES))])
    ranks = rng.choice([3, 4, 5] if wide else [1, 2, 3, 4, 4, 5, 6])
    sizes = model["num_hidden_layers"], model["num_attention_heads"], rng.randint(8, 14), ranks
    spelled = wide_plan(rng, *sizes) if wide else random_plan(rng, *sizes)
    count = next(model[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in model)
    for pipeline in spelled["pipelines"]:
        for one in pipeline["stages"]:
            if wide or rng.random() < 0.8:
                columns = model.get("moe_intermediate_size", model["intermediate_size"])
                one["experts"] = random_experts(rng, one["ranks"], count, columns, 1 if wide else 3)
    divide_weights(random.Random(f"weights {seed}"), spelled, model["num_attention_heads"])
    if wide:
        spelled["islands"] = two_islands(rng, spelled["pipelines"][0]["stages"][0]["experts"][0])
    return Case(
        seed, ranks, model, spelled, packed=rng.random() < 0.4, masked=rng.random() < 0.3,
        optimizer=rng.choice(["adamw", "sgd"]), clip_grad=rng.choice([0.0, 0.05]), chunked_loss=rng.random() < 0.2,
    )  # fmt: skip


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_experts_equal_one_process(index: int) -> None:
    check_case(moe_case(SEED + index), shared_pool())


HAND_WRITTEN = {
    # A shared gate and a router see the tokens of their own rank only: a sum over all ranks, counted once each.
    "router_under_tensor_parallelism": plan([
        pipe(2, 2, stage([0, 1, 2], [0, 3], tp=3, tp_split=[1, 2, 1], recompute="elementwise"))]),
    "unequal_experts_over_replicas": plan([pipe(2, 3, stage([0, 1], [0, 3], tp=1, dp_split=[1, 1], experts=[
        {"ranks": [1, 0], "experts": [[0, 4], [4, 5]]}]))]),
    "a_rank_without_experts_and_one_that_shares": plan([pipe(3, 2, stage([2, 0, 1], [0, 3], tp=1, experts=[
        {"ranks": [0, [1, 2]], "experts": [[], [0, 5]], "split": [[1], [2, 1]]}]))]),
    "replicated_experts": plan([pipe(2, 2, stage([0, 1], [0, 3], tp=1, recompute="full", experts=[
        {"ranks": [0, 1], "experts": [[0, 3], [1, 5]]}]))]),
    "two_groups_in_pipelines_with_deferred_weights": plan([
        pipe(2, 4, stage([0, 1], [0, 1], tp=2, experts=[{"ranks": [1, 0], "experts": [[0, 1], [1, 5]]}]),
             stage([2, 3], [1, 3], tp=1, recompute="elementwise", experts=[
                 {"ranks": [2, 3], "experts": [[0, 2], [2, 5]]}])),
        pipe(1, 1, stage([4], [0, 3], recompute="elementwise")),
    ], schedule="zero-bubble"),
    "context_groups_and_experts": plan([pipe(1, 2, stage([0, 1, 2, 3], [0, 3], kv={"block": 2}, context=[
        {"ranks": [3, 0], "tokens": [4, 3], "heads": [1, 3]}, {"ranks": [1, 2], "tokens": [2, 1], "heads": [4, 0]},
    ], experts=[{"ranks": [0, [1, 2], 3], "experts": [[0, 1], [1, 4], [4, 5]], "split": [[1], [1, 2], [1]]}]))]),
    "tokens_in_two_hops": plan([pipe(5, 2, stage([0, 1, 2, 3, 4], [0, 3], tp=1, dp_split=[1] * 5, experts=[
        {"ranks": [4, [0, 3], 1, 2], "experts": [[0, 1], [1, 3], [2, 5], []], "split": [[1], [2, 1], [1], [1]]}],
        recompute="full"))]) | {"islands": [[0, 1], [2, 3, 4]]},
    "unequal_nodes_in_a_pipeline": plan([
        pipe(4, 3, stage([0, 1, 2, 3], [0, 1], tp=2, dp_split=[1, 3], experts=[
                 {"ranks": [3, 1, 2, 0], "experts": [[0, 1], [1, 2], [2, 4], [4, 5]]}]),
             stage([4, 5, 6], [1, 3], tp=1, dp_split=[1, 2, 1], experts=[
                 {"ranks": [4, 5, 6], "experts": [[0, 2], [2, 4], [4, 5]]}])),
    ], schedule="zero-bubble") | {"islands": [[0, 2, 3], [4], [5, 6]]},
}  # fmt: skip
CASES = [(model, name) for model in MODELS for name in HAND_WRITTEN]
IN_MAKE_TEST = [
    *(case for case in CASES if case[0] == "qwen2_moe"), ("gpt_oss", "router_under_tensor_parallelism"),
    ("gpt_oss", "context_groups_and_experts"), ("deepseek_v3", "context_groups_and_experts"),
    ("llama4", "context_groups_and_experts"), ("llama4", "two_groups_in_pipelines_with_deferred_weights"),
    ("deepseek_v2", "router_under_tensor_parallelism"), ("gpt_oss", "a_rank_without_experts_and_one_that_shares"),
]  # fmt: skip


@pytest.mark.parametrize("case", quick(CASES, IN_MAKE_TEST[::3], IN_MAKE_TEST), ids=lambda case: "-".join(case))
def test_hand_written(case: tuple[str, str]) -> None:
    model, name = case
    check_case(fixed_case(MODELS[model], HAND_WRITTEN[name], packed=True, masked=True), shared_pool())


VENDORS = ("cpu", "cpu", "walled", "walled", "walled", "cpu", "walled", "cpu")  # nothing but the bridge joins the two


@pytest.mark.slow
def test_tokens_cross_vendors_in_two_hops() -> None:
    """Islands that a run adds by itself, where no communication library joins all ranks."""
    case = HAND_WRITTEN["tokens_in_two_hops"] | {"islands": []}
    check_case(fixed_case(MODELS["qwen2_moe"], case, packed=True, masked=True), shared_pool(VENDORS))
