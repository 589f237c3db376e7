"""Memory formulas of stages with and without linear attention, against dry runs of their ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import load_model
from hetero_megatron.training.config import RunConfig
from tests.support.moe_models import HYBRIDS, MAMBAS
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

LINEAR, FULL = "linear_attention", "full_attention"
MODEL = HYBRIDS["qwen3_next"] | {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "vocab_size": 160, "num_hidden_layers": 6,
    "max_position_embeddings": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts_per_tok": 5, "layer_types": [LINEAR] * 3 + [FULL, LINEAR, FULL],
}  # fmt: skip

KIMI = HYBRIDS["kimi_linear"] | {key: MODEL[key] for key in (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "num_hidden_layers", "layer_types",
    "max_position_embeddings",
)} | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16,
    "num_experts_per_tok": 3, "mlp_layer_types": ["sparse"] * 6,
}  # fmt: skip
CASES = [("qwen3_next", kind) for kind in ("none", "selective", "elementwise", "full")]
CASES += [("kimi_linear", kind) for kind in ("none", "selective", "full")]


def configured(
    directory: Path, config: dict[str, Any], stages: list[dict[str, Any]], words: tuple[str, ...] = ()
) -> RunConfig:
    """A dry run of the stages, of 192 tokens."""
    model, path = directory / "config.json", directory / "plan.yaml"
    model.write_text(json.dumps(config))
    path.write_text(dump_yaml(plan_from_dict(plan([pipe(2, 3, *stages)], 192), load_model(str(model)))))
    world = {"WORLD_SIZE": str(sum(len(one["ranks"]) for one in stages))}
    return configure(["--plan", str(path), "--model", str(model), "--dry-run", *words], world)


def check_stages(
    directory: Path, model: dict[str, Any], recompute: str, least: float, words: tuple[str, ...] = (),
    most: float = 1.11,
) -> None:  # fmt: skip
    """Estimates of three unlike stages, the first of two ranks, are ``least`` to ``most`` of the peaks of dry runs."""
    stages = [stage([0, 1], [0, 3], tp=2), stage([2], [3, 5]), stage([3], [5, 6])]
    run = configured(directory, model, [{**one, "recompute": recompute} for one in stages], words)
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in (0, 2, 3):
        dry = run_rank(run, rank)
        assert dry.parameters == estimates[rank].weights
        assert least * dry.peak <= estimates[rank].total <= most * dry.peak, estimates[rank].total / dry.peak


@pytest.mark.parametrize("case", quick(CASES, [], [CASES[3], CASES[5]]), ids="-".join)
def test_each_stage_holds_what_its_own_layers_keep(case: tuple[str, str], tmp_path: Path) -> None:
    check_stages(tmp_path, KIMI if case[0] == "kimi_linear" else MODEL, case[1], 0.995)


MAMBA = MAMBAS["granite_hybrid"] | {key: MODEL[key] for key in (
    "hidden_size", "vocab_size", "num_hidden_layers", "layer_types", "max_position_embeddings",
)} | {
    "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_head": 16, "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}  # fmt: skip
ADAPTERS = {
    "qwen3_next": (MODEL, "--lora-rank 4 --lora-targets q_proj in_proj_qkvz out_proj --lora-dropout 0.1", 1.11),
    "kimi_linear": (KIMI, "--lora-rank 4", 1.11),
    "attention": (MAMBA, "--lora-rank 4 --lora-targets q_proj o_proj", 1.15),  # the first stage is forward alone
}


@pytest.mark.parametrize("case", quick(ADAPTERS, [], ["attention"]))
def test_adapters_of_each_kind_of_layer_are_counted(case: str, tmp_path: Path) -> None:
    model, words, most = ADAPTERS[case]
    check_stages(tmp_path, model, "none", 0.995, tuple(words.split()), most)


@pytest.mark.slow
def test_members_of_context_groups_hold_what_their_own_tokens_keep(tmp_path: Path) -> None:
    model = MODEL | {"num_hidden_layers": 2, "layer_types": [FULL, LINEAR]}
    run = configured(tmp_path, model, [stage(
        [0, 1, 2], [0, 2], tp_split=[[1, 1], [1]], kv={"block": 64}, context=[
            {"ranks": [[0, 1]], "tokens": [128], "heads": [4]}, {"ranks": [2], "tokens": [64], "heads": [4]}],
    )])  # fmt: skip
    estimate, dry = estimate_memory(run.plan, run.spec, run.dtype)[1], run_rank(run, 1)
    assert 0.995 * dry.peak <= estimate.total <= 1.11 * dry.peak, estimate.total / dry.peak


# A dense MLP is many times as wide as what a token passes of the experts in the layers beside it.
DENSE_AND_SPARSE = KIMI | {
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense", "sparse"], "intermediate_size": 768,
    "moe_intermediate_size": 32, "num_experts_per_tok": 1, "layer_types": [LINEAR, FULL] * 2 + [LINEAR] * 2,
}  # fmt: skip


@pytest.mark.slow
def test_a_dense_layer_that_is_made_again_between_experts(tmp_path: Path) -> None:
    check_stages(tmp_path, DENSE_AND_SPARSE, "full", 0.99)
