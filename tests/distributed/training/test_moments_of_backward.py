"""Memory of ranks whose backwards are not split: the formulas against dry runs, whatever a stage is and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import Lora, adapted, load_model
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

LENGTH = 2048
BASE: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 704, "vocab_size": 256, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 192, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "first_k_dense_replace": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
}  # fmt: skip
GELU = {"model_type": "gpt_neox", "num_key_value_heads": 8, "use_parallel_residual": False, "intermediate_size": 1024}
MODELS = {
    "swiglu": BASE | {"model_type": "llama"}, "gelu": BASE | GELU,
    "experts": BASE | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32},
    "latents": BASE | LATENT | {"model_type": "deepseek_v3"},
    "normed heads": BASE | {"model_type": "qwen3", "head_dim": 32},
    "norms after": BASE | {"model_type": "olmo2"}, "one input": BASE | GELU | {"use_parallel_residual": True},
}  # fmt: skip


def spelled(*recompute: Any, kv: dict[str, Any] | None = None) -> dict[str, Any]:
    """1F1B over two stages: plain ones, a TP group, unequal context groups; two equal rings and a ring of TP groups.
    ``recompute``: of the stages in turn."""
    kinds = iter(recompute * 8)
    groups = [
        {"ranks": [5, 6], "tokens": [LENGTH * 3 // 8, LENGTH // 4], "heads": [5, 3]},
        {"ranks": [7], "tokens": [LENGTH * 3 // 8], "heads": [8]},
    ]
    half = LENGTH // 2
    ring = [{"ranks": [9], "tokens": [half], "heads": [8]}, {"ranks": [10], "tokens": [half], "heads": [8]}]
    equal = [{"ranks": [[11, 12], [13, 14]], "tokens": [half, half], "heads": [4, 4]}]

    def made(ranks: list[int], part: int, **more: Any) -> dict[str, Any]:
        return stage(ranks, [2 * part, 2 * part + 2], recompute=next(kinds), **more)

    way = {} if kv is None else {"kv": kv}
    return plan([
        pipe(1, 6, made([0], 0), made([1], 1)),
        pipe(1, 6, made([2, 3], 0, tp=2), made([4], 1)),
        pipe(1, 6, made([5, 6, 7], 0, context=groups, **way), made([8], 1)),
        pipe(1, 6, made([9, 10], 0, context=ring), made([11, 12, 13, 14], 1, context=equal)),
    ], LENGTH)  # fmt: skip


# (model, dtype, recompute of the stages in turn, ranks)
CASES: dict[str, tuple[str, str, tuple[Any, ...], tuple[int, ...]]] = {
    "few": ("swiglu", "bf16", ("elementwise", "none"), (2, 5)),
    "plain": ("swiglu", "bf16", ("none",), (0, 1, 2, 5, 7, 9, 11)),
    "fp32": ("swiglu", "fp32", ("full", "elementwise"), (0, 1, 2, 4, 5, 7)),
    "mixed": ("swiglu", "bf16", ("elementwise", "selective", "selective"), (0, 1, 2, 4, 5)),
    "first": ("swiglu", "bf16", ({"first": 1}, "full"), (0, 1, 5, 11)),
    "gelu": ("gelu", "bf16", ("none", "full"), (0, 1, 2, 5, 7, 11)),
    "gelu fp32": ("gelu", "fp32", ("full", "none"), (0, 1, 5)),
    "experts": ("experts", "bf16", ("none", "full"), (0, 1, 2, 5, 7)),
    "experts fp32": ("experts", "fp32", ("full", "none"), (0, 1, 2)),
    "latents": ("latents", "bf16", ("none", "full"), (0, 1, 2)),
    "latents fp32": ("latents", "fp32", ("elementwise", "none"), (0, 1)),
    "normed heads": ("normed heads", "bf16", ("none", "full"), (0, 2, 5, 7)),
    "norms after": ("norms after", "bf16", ("none", "full"), (0, 1, 2)),
    "one input": ("one input", "bf16", ("none", "elementwise"), (0, 1, 2, 5)),
}
EVERY_TIME = ["mixed", "gelu fp32", "experts fp32", "latents fp32"]


@pytest.mark.parametrize("case", quick(CASES, [], EVERY_TIME))
def test_memory_is_that_of_a_dry_run(case: str, tmp_path: Path) -> None:
    model, dtype, recompute, ranks = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    made = plan_from_dict(spelled(*recompute), load_model(str(tmp_path / "config.json")))
    (tmp_path / "plan.yaml").write_text(dump_yaml(made))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run"]
    run = configure([*words, "--dtype", dtype], {})
    estimates = estimate_memory(run.plan, run.spec, dtype)
    for rank in ranks:
        peak = run_rank(run, rank).peak
        assert 0.98 * peak <= estimates[rank].total <= 1.05 * peak, (rank, estimates[rank].total / peak)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_memory_of_adapters_is_that_of_a_dry_run(recompute: str, tmp_path: Path) -> None:
    """Where a layer with adapters is made again, what its last projection and adapter put out is there with it all."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["swiglu"]))
    spec = adapted(load_model(str(tmp_path / "config.json")), Lora(4, 4.0))
    stages = [stage([0, 1], [0, 2], tp=2, recompute=recompute), stage([2], [2, 4], recompute=recompute)]
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan_from_dict(plan([pipe(2, 2, *stages)], 512), spec)))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run"]
    run = configure([*words, "--lora-rank", "4", "--lora-alpha", "4", "--dtype", "fp32"], {})
    estimates = estimate_memory(run.plan, run.spec, "fp32")
    for rank, most in ((0, 1.05), (2, 1.15)):
        peak = run_rank(run, rank).peak
        assert 0.98 * peak <= estimates[rank].total <= most * peak, (rank, estimates[rank].total / peak)


@pytest.mark.slow
def test_attention_of_a_dry_run_has_no_scores(tmp_path: Path) -> None:
    """Of a chip none are in memory, also where they are capped or of a window."""
    peaks, length = set(), 256
    for cap, window in ((None, length), (50.0, length // 2)):
        small = BASE | {"model_type": "gemma2", "head_dim": 32, "num_hidden_layers": 2}
        plain = small | {"attn_logit_softcapping": cap, "sliding_window": window, "max_position_embeddings": length}
        (tmp_path / "config.json").write_text(json.dumps(plain))
        made = plan_from_dict(plan([pipe(1, 1, stage([0], [0, 2]))], length), load_model(str(tmp_path / "config.json")))
        (tmp_path / "plan.yaml").write_text(dump_yaml(made))
        words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run"]
        run = configure([*words, "--dtype", "bf16"], {})
        peaks.add(run_rank(run, 0).peak)
    assert len(peaks) == 1
