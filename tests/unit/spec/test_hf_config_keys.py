"""Every key of a config.json: the numbers that transformers computes with it, or a refusal that names it.

What we accept, transformers has to accept too.
"""

from __future__ import annotations

import copy
import json
import os
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.generation.configuration_utils import GenerationConfig

from hetero_megatron.errors import UserError
from hetero_megatron.spec import load_model
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.families.gpt2 import GPT2_ALIASES
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import export_config
from hetero_megatron.spec.hf_reader import FIXED, HARMLESS
from tests.support import mamba_keys
from tests.support.families import DENSE, PARALLEL_BLOCKS
from tests.support.hf_reference import attention_of, hf_to_logical, make_exact
from tests.support.moe_models import HYBRIDS, MAMBAS, MOE_FAMILIES
from tests.support.selection import quick
from tests.unit.model.test_hf import build, error, micro_batch

BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
QUICK = ("llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox")  # the others have what these have, in other combinations
MIXTURES = {c["model_type"]: c for c in reversed((MOE_FAMILIES | HYBRIDS | MAMBAS).values())}  # first of each
_PARALLEL_FAMILIES = {config["model_type"] for config in PARALLEL_BLOCKS.values()}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def base(family: str) -> dict[str, Any]:
    if family == "gpt2":
        return {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    if family in MIXTURES:
        of_every_head = {"num_key_value_heads": 4} if family.startswith(("deepseek", "kimi")) else {}
        mamba = family in ("granitemoehybrid", "bamba")
        of_every_head |= {"num_hidden_layers": 4} if FAMILIES[family].linear and not mamba else {}  # one with attention
        of_every_head |= {"layer_types": [LINEAR, FULL] * 2} if family == "kimi_linear" else {}
        of_every_head |= mamba_keys.SIZES if mamba else {}
        of_every_head |= {"num_hidden_layers": 3} if family == "nemotron_h" else {}
        config = MIXTURES[family] | BASE | of_every_head
        return config if family != "bamba" else {k: v for k, v in config.items() if k != "layer_types"}
    if family in ("gptj", "falcon"):
        return next(c for c in DENSE.values() if c["model_type"] == family) | {"num_hidden_layers": 2}
    plain = ("llama", "mistral", "qwen2", "qwen3")
    small = next((c for c in DENSE.values() if c["model_type"] == family and family not in plain), {})
    head_dim = {"head_dim": 16} if family == "qwen3" else {}
    return BASE | small | head_dim | {"model_type": family, "num_hidden_layers": 2}


ROPE: list[dict[str, Any]] = [
    {"rope_theta": 5e5}, {"rope_theta": 7}, {"rope_theta": None}, {"rope_theta": True}, {"rope_theta": -1.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
    {"rope_parameters": {"factor": 4.0}},
    {"rope_parameters": {}}, {"rope_parameters": []}, {"rope_parameters": None},
    {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_scaling": []}, {"rope_scaling": "linear"},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 5e5},
    {"rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 300.0}, "rope_theta": 5e5},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": YARN},
    {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
    {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "default", "type": "linear"}},
    {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "", "type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": True}}, {"rope_scaling": {"type": "linear", "factor": None}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": None}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": None}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": None},
    {"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}, "original_max_position_embeddings": 32},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}, "original_max_position_embeddings": None},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
    {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}}, {"original_max_position_embeddings": 16},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
    {"rope_scaling": {FULL: {"rope_type": "linear", "factor": 2.0}}},
    {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 300.0}}},
    {"rope_scaling": {"rope_type": "proportional"}}, {"rope_interleaved": True}, {"rope_ratio": 2},
]  # fmt: skip
WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": 5}, {"sliding_window": None}, {"sliding_window": 0}, {"sliding_window": 2.0},
    {"use_sliding_window": True, "sliding_window": 5}, {"use_sliding_window": False, "sliding_window": 5},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": None},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": -1},
    {"use_sliding_window": None, "sliding_window": 5}, {"use_sliding_window": 1, "sliding_window": 5},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING] * 2},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL] * 2, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    {"use_sliding_window": False, "sliding_window": 5, "layer_types": [SLIDING] * 2},
    {"use_sliding_window": True, "sliding_window": None, "layer_types": [SLIDING] * 2},
    {"layer_types": [FULL] * 2}, {"layer_types": [FULL] * 3}, {"layer_types": [SLIDING] * 2}, {"layer_types": FULL},
    {"layer_types": ["attention"] * 2}, {"layer_types": ["linear_attention"] * 2}, {"attention_chunk_size": 4},
]  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {"head_dim": 16}, {"head_dim": None}, {"head_dim": 0}, {"head_dim": 7}, {"num_key_value_heads": None},
    {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"num_key_value_heads": 3}, {"hidden_size": 36},
    {"hidden_size": 36, "num_attention_heads": 8, "head_dim": 8}, {"hidden_size": 32.0}, {"vocab_size": 2**63},
    {"num_hidden_layers": 2**40}, {"num_hidden_layers": True}, {"intermediate_size": {"a": 1}}, {"hidden_size": [32]},
    {"attention_bias": True}, {"attention_bias": None}, {"attention_bias": 1}, {"mlp_bias": True}, {"mlp_bias": None},
    {"tie_word_embeddings": True}, {"tie_word_embeddings": None}, {"rms_norm_eps": 0.1}, {"rms_norm_eps": None},
    {"rms_norm_eps": float("nan")}, {"rms_norm_eps": float("inf")}, {"rms_norm_eps": {"__float__": "Infinity"}},
    {"hidden_act": "gelu"}, {"hidden_act": "swish"}, {"hidden_act": None}, {"hidden_act": ["silu"]},
    {"hidden_activation": "gelu"}, {"attention_dropout": 0.5}, {"attention_dropout": 0}, {"attention_dropout": None},
    {"attention_dropout": False}, {"initializer_range": 0.5}, {"initializer_range": None}, {"n_embd": 64},
    {"max_position_embeddings": 16}, {"max_position_embeddings": None},
]  # fmt: skip
GPT2: list[dict[str, Any]] = [
    {"hidden_size": 64}, {"hidden_size": 32}, {"num_attention_heads": 2}, {"num_hidden_layers": 1},
    {"max_position_embeddings": 32}, {"max_position_embeddings": 64}, {"n_inner": 48}, {"n_inner": None},
    {"n_inner": 0}, {"intermediate_size": 48}, {"activation_function": "gelu"}, {"activation_function": "relu2"},
    {"activation_function": "gelu_pytorch_tanh"}, {"activation_function": "silu"}, {"activation_function": {"a": 1}},
    {"activation_function": None}, {"scale_attn_weights": False}, {"scale_attn_weights": 1},
    {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_by_inverse_layer_idx": None},
    {"reorder_and_upcast_attn": True}, {"add_cross_attention": True}, {"layer_norm_epsilon": 0.1},
    {"layer_norm_epsilon": None}, {"tie_word_embeddings": False}, {"resid_pdrop": 0.5}, {"resid_pdrop": 0},
    {"embd_pdrop": None}, {"summary_first_dropout": 0.5}, {"n_ctx": 16}, {"rope_scaling": {"type": "linear"}},
    {"n_embd": None}, {"n_layer": 10**6}, {"vocab_size": 10**25}, {"initializer_range": 0.5}, {"rms_norm_eps": 0.1},
]  # fmt: skip
EVERYWHERE: list[dict[str, Any]] = [
    {"is_causal": False}, {"is_causal": None}, {"is_causal": True}, {"is_decoder": True}, {"is_encoder_decoder": True},
    {"per_layer_config": {"0": {"intermediate_size": 8}}}, {"text_config": {}}, {"quantization_config": {"bits": 4}},
    {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, {"transformers_weights": "x.safetensors"},
    {"configuration_files": ["config.1.0.json"]}, {"attribute_map": {"vocab_size": "x"}}, {"fusion_config": {"a": 1}},
    {"final_logit_softcapping": 30.0}, {"logit_scale": 0.1}, {"embedding_multiplier": 2.0}, {"clip_qkv": 1.0},
    {"pad_token_id": 3, "eos_token_id": [4, 5], "bos_token_id": None}, {"use_cache": False}, {"pretraining_tp": 2},
    {"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"output_hidden_states": True}, {"return_dict": True},
    {"num_labels": 3}, {"chunk_size_feed_forward": 2}, {"gradient_checkpointing": True}, {"temperature": 0.1},
    {"some_note": None}, {"some_note": "x"}, {"attn_implementation": "eager"}, {"attn_implementation": "org/kernel"},
    {"pruned_heads": {"0": [1]}}, {"architectures": []}, {"architectures": None}, {"architectures": "LlamaForCausalLM"},
    {"architectures": ["LlamaForSequenceClassification"]}, {"architectures": ["MambaForCausalLM"]},
]  # fmt: skip


MOE: list[dict[str, Any]] = [
    {"num_experts_per_tok": 1}, {"num_experts_per_tok": 99}, {"num_experts_per_tok": None}, {"num_experts": 3},
    {"num_local_experts": 3}, {"num_experts": 0}, {"num_local_experts": True}, {"norm_topk_prob": True},
    {"norm_topk_prob": None}, {"decoder_sparse_step": 2}, {"decoder_sparse_step": 0}, {"mlp_only_layers": [0]},
    {"mlp_only_layers": [1, 7]}, {"mlp_only_layers": None}, {"mlp_only_layers": ["0"]}, {"moe_intermediate_size": 9},
    {"shared_expert_intermediate_size": 9}, {"shared_expert_intermediate_size": 0}, {"router_jitter_noise": 0.1},
    {"router_aux_loss_coef": 0.5}, {"output_router_logits": True}, {"clip_qkv": 2.0}, {"qkv_bias": False},
    {"num_experts_per_tok": 4, "norm_topk_prob": False}, {"swiglu_limit": 1.0}, {"swiglu_alpha": 1.0},
    {"swiglu_limit": None}, {"experts_per_token": 3}, {"experts_per_token": 2, "initial_context_length": 4096},
]  # fmt: skip


HYBRID: list[dict[str, Any]] = [
    {"layer_types": [LINEAR, FULL, FULL, LINEAR]}, {"layer_types": [LINEAR] * 3}, {"layer_types": ["mamba"] * 4},
    {"full_attention_interval": 2}, {"full_attention_interval": 1}, {"full_attention_interval": 0},
    {"full_attention_interval": 9, "layer_types": None}, {"linear_num_key_heads": 2}, {"linear_num_key_heads": 4},
    {"linear_num_value_heads": 3}, {"linear_num_value_heads": 7}, {"linear_key_head_dim": 9},
    {"linear_value_head_dim": 12}, {"linear_conv_kernel_dim": 2}, {"linear_conv_kernel_dim": 0},
    {"linear_key_head_dim": "6"}, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0},
    {"norm_topk_prob": False}, {"attention_bias": True}, {"rms_norm_eps": 0.1}, {"attn_output_gate": False},
    {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False},
    {"mamba_ssm_dtype": "float16"}, {"mtp_num_hidden_layers": 1}, {"mtp_num_hidden_layers": -1},
    {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []},
    {"rope_parameters": {"rope_theta": 9.0, "mrope_section": [3, 1, 2], "mrope_interleaved": True}},
    {"rope_scaling": YARN | {"mrope_section": [1, 1, 1]}}, {"rope_parameters": {"mrope_section": [3, 1]}},
    {"rope_parameters": {"mrope_section": "x"}}, {"rope_parameters": {"mrope_interleaved": 2}},
]  # fmt: skip

_LAYERS = {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
KIMI: list[dict[str, Any]] = [
    {"linear_attn_config": {"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 2}}, {"linear_attn_config": {}},
    {"linear_attn_config": _LAYERS, "layer_types": None}, {"linear_attn_config": _LAYERS | {"kda_layers": [1]}},
    {"linear_attn_config": _LAYERS | {"kda_layers": [1]}, "layer_types": None}, {"linear_attn_config": None},
    {"linear_attn_config": _LAYERS | {"kda_layers": [1, 2, 3]}, "layer_types": None}, {"linear_attn_config": {"a": 1}},
    {"linear_attn_config": {"kda_layers": [1, 2, 3, 4]}, "layer_types": None}, {"linear_attn_config": {"num_heads": 0}},
    {"linear_num_heads": 2}, {"linear_head_dim": 9}, {"linear_num_heads": None}, {"model_max_length": 32},
    {"num_experts": 3, "num_local_experts": 3}, {"num_experts_per_token": 3}, {"num_shared_experts": 1},
    {"moe_renormalize": False}, {"norm_topk_prob": False}, {"num_expert_group": 5, "topk_group": 2}, {"topk_group": 2},
    {"mlp_layer_types": ["dense", "sparse"] * 2}, {"mlp_layer_types": ["moe"] * 4}, {"first_k_dense_replace": 3},
    {"q_lora_rank": 7}, {"v_head_dim": 12}, {"qk_rope_head_dim": 2}, {"mla_use_nope": True}, {"mla_use_nope": False},
    {"moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "topk_method": "noaux_tc", "moe_layer_freq": 1},
    {"moe_router_activation_func": "softmax"}, {"moe_layer_freq": 2}, {"auto_map": {"AutoConfig": "a.B"}},
    {"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 0}, {"routed_scaling_factor": 1.0}, {"head_dim": 7},
]  # fmt: skip


PARALLEL: list[dict[str, Any]] = [
    {"use_parallel_residual": False}, {"use_parallel_residual": True}, {"use_parallel_residual": None},
    {"rotary_pct": 0.5}, {"rotary_pct": 1.0}, {"rotary_pct": 0.0}, {"rotary_pct": 1.5}, {"rotary_emb_base": 500},
    {"rotary_emb_base": 500, "rope_theta": 700}, {"rotary_pct": 0.5, "partial_rotary_factor": 0.25},
    {"rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 1.0}, "rotary_pct": 0.5},
    {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.75}, {"partial_rotary_factor": 0.3},
    {"attention_bias": True}, {"attention_bias": False}, {"use_qkv_bias": True}, {"bias": True}, {"bias": None},
    {"qk_layernorm": True}, {"qk_layernorm": True, "head_dim": 12}, {"use_qk_norm": True}, {"use_qk_norm": None},
    {"logit_scale": 2.0}, {"logit_scale": None}, {"logit_scale": 0}, {"layer_norm_eps": 0.1}, {"layer_norm_eps": None},
    {"hidden_act": "gelu"}, {"hidden_act": "gelu_new"}, {"hidden_act": "gelu_fast"}, {"hidden_act": "relu"},
    {"new_decoder_architecture": True}, {"new_decoder_architecture": True, "num_kv_heads": 2},
    {"new_decoder_architecture": True, "num_kv_heads": 3}, {"new_decoder_architecture": True, "parallel_attn": False},
    {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2, "multi_query": False},
    {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, {"num_ln_in_parallel_attn": 1},
    {"num_ln_in_parallel_attn": 2}, {"multi_query": False}, {"multi_query": False, "num_kv_heads": 2},
    {"multi_query": False, "num_kv_heads": 4}, {"num_kv_heads": 2}, {"parallel_attn": False}, {"alibi": True},
    {"alibi": None}, {"parallel_attn": False, "multi_query": False, "bias": True}, {"ffn_hidden_size": None},
    {"ffn_hidden_size": 128, "ff_factor": 4}, {"ff_factor": 3}, {"activation": "relu"}, {"activation": "gelu_new"},
    {"n_embed": 64}, {"n_embed": 32}, {"apply_residual_connection_post_layernorm": True},
    {"sliding_window": 5}, {"sliding_window": None}, {"sliding_window": 5, "sliding_window_pattern": 2},
    {"sliding_window_pattern": 1}, {"sliding_window_pattern": 2, "layer_switch": 2}, {"layer_switch": 2},
    {"rotary_dim": 4}, {"rotary_dim": 5}, {"rotary_dim": None}, {"rotary_dim": 64}, {"rotary": False}, {"n_inner": 7},
]  # fmt: skip


def mutations(family: str) -> list[dict[str, Any]]:
    if family in _PARALLEL_FAMILIES:
        known = FAMILIES[family].keys
        own = [change for change in PARALLEL if change.keys() & known]
        return own + (GPT2 if family == "gptj" else [*ROPE, *WINDOWS, *SHAPES]) + EVERYWHERE
    if family == "kimi_linear":
        return [*KIMI, *HYBRID, *ROPE, *SHAPES, *MOE, *EVERYWHERE]
    if family in ("granitemoehybrid", "bamba"):
        own = mamba_keys.GRANITE if family == "granitemoehybrid" else mamba_keys.BAMBA
        return [*mamba_keys.MAMBA, *own, *ROPE, *SHAPES, *EVERYWHERE]
    if family == "nemotron_h":
        return [*mamba_keys.NEMOTRON, *SHAPES, *EVERYWHERE]
    if FAMILIES[family].linear:
        return [*HYBRID, *ROPE, *SHAPES, *MOE, *EVERYWHERE]
    if family in MIXTURES:
        return [*ROPE, *WINDOWS, *SHAPES, *MOE, *EVERYWHERE]
    return (GPT2 if family == "gpt2" else [*ROPE, *WINDOWS, *SHAPES]) + EVERYWHERE


def compare(config: dict[str, Any]) -> str:
    """``refused`` by name, or ``equal`` logits; anything else fails."""
    try:
        spec = from_hf_config(config)
    except UserError as refusal:
        assert refusal.field and refusal.accepted, refusal
        return "refused"
    torch.manual_seed(0)
    theirs = AutoConfig.for_model(**copy.deepcopy(config))
    theirs._experts_implementation = "eager"
    kind = attention_of(config)
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float64, attn_implementation=kind).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            flat = 1.0 if ("norm" in name or ".ln_" in name) and name.endswith("weight") else 0.0
            param.copy_(torch.randn(param.shape) * (0.02 if flat else 0.15) + flat)
    make_exact(model, torch.float64)
    stage = build(spec, hf_to_logical(model, spec), torch.float64)
    batch = micro_batch(spec.vocab_size, None, b=1, s=12)
    with torch.no_grad():
        # Without a mask of ours: theirs is what their config says.
        want = model(input_ids=batch.tokens, use_cache=False).logits
        assert error(stage(batch.tokens, batch), want) < 1e-11, config
    return "equal"


@pytest.mark.parametrize("family", quick(FAMILIES, QUICK, sorted(FAMILIES)[::6]))
def test_each_key_gives_transformers_numbers_or_a_refusal(family: str) -> None:
    seen = [compare(base(family) | change) for change in mutations(family)]
    assert seen.count("equal") > 15 and seen.count("refused") > 30


@pytest.mark.parametrize("family", quick(FAMILIES, QUICK, sorted(FAMILIES)[::6]))
def test_keys_together_give_transformers_numbers_or_a_refusal(family: str) -> None:
    draw = random.Random(family)
    pool = [m for m in mutations(family) if _accepted(base(family) | m)]
    seen = []
    for _ in range(12):
        config = base(family)
        for change in draw.sample(pool, 3):
            config |= change
        seen.append(compare(config))
    assert seen.count("equal") > 3


def _accepted(config: dict[str, Any]) -> bool:
    try:
        from_hf_config(config)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "change", "outcome"),
    [
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e4}}, "equal"),
        ("qwen3", {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "equal"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "refused"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]}, "equal"),
        ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}, "equal"),
        ("llama", {"is_causal": False}, "refused"),
        ("qwen2", {"layer_types": [SLIDING] * 2}, "refused"),
        ("gpt2", {"hidden_size": 64}, "refused"),
        ("llama", {"pad_token_id": -1, "unsloth_version": "2024.9"}, "equal"),
        ("llama", {"_attn_implementation_autoset": True, "_flash_attn_2_enabled": True, "_comment": "ours"}, "equal"),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1}, "equal"),
    ],
)
def test_what_becomes_of_some_keys(family: str, change: dict[str, Any], outcome: str) -> None:
    assert compare(base(family) | change) == outcome


@pytest.mark.parametrize(("key", "value"), [("n_group", 3), ("n_group", 8), ("n_group", 0), ("topk_group", 5)])
def test_groups_of_experts_that_cannot_be_are_refused_by_their_key(key: str, value: int) -> None:
    config = base("deepseek_v3") | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    from_hf_config(config)
    with pytest.raises(UserError, match=f"^config.json: {key} = {value}: "):
        from_hf_config(config | {key: value})


def test_gpt2_is_read_under_its_other_names() -> None:
    config = {GPT2_OTHER.get(key, key): value for key, value in base("gpt2").items()}
    assert "n_embd" not in config and from_hf_config(config) == from_hf_config(base("gpt2"))


GPT2_OTHER = {own: other for other, own in GPT2_ALIASES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attribute_of_transformers_classes_is_in_a_table(family: str) -> None:
    """Their own list: fields of the class, names it maps, and what its constructor takes from old files."""
    kind = CONFIG_MAPPING[family]
    theirs = {f.name for f in fields(kind)} | kind.attribute_map.keys()
    theirs |= GenerationConfig._get_default_generation_params().keys()
    theirs |= set(json.loads(kind().to_json_string(use_diff=False)))
    theirs |= {"torch_dtype", "name_or_path", "_commit_hash", "num_labels", "output_attentions", "attn_implementation"}
    theirs |= {"experts_implementation", "per_layer_config"}
    if family not in ("gpt2", "gptj"):
        theirs |= {"rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    assert not theirs - FAMILIES[family].keys - FIXED.keys() - HARMLESS.keys()


@pytest.mark.parametrize("key", sorted(FIXED))
def test_a_fixed_key_with_another_value_is_refused_by_name(key: str) -> None:
    for family in (name for name, one in FAMILIES.items() if key not in one.keys):
        for value in ({"a": [1]}, "other", 7):
            with pytest.raises(UserError) as caught:
                from_hf_config(base(family) | {key: value}, where="m/config.json")
            assert caught.value.field == key and "m/config.json" in str(caught.value)


def test_quantised_gpt_oss_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"quantised \(awq\).*from before the quantisation"):
        from_hf_config(base("gpt_oss") | {"quantization_config": {"quant_method": "awq", "bits": 4}})


def test_unknown_keys_are_listed_at_once() -> None:
    with pytest.raises(UserError, match=r"alpha = 1: not known .*\(nor are beta, gamma\)"):
        from_hf_config(base("llama") | {"gamma": 0, "beta": "x", "alpha": 1, "delta": None})


# What transformers would read from the exported file


def test_an_export_changes_only_what_changed() -> None:
    source = base("qwen3") | {
        "eos_token_id": [7, 8], "pad_token_id": 9, "use_cache": False, "torch_dtype": "bfloat16", "unsloth_fixed": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "some_note": None,
        "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    spec = from_hf_config(source)
    assert export_config(spec, source) == source
    assert export_config(spec, source, "float32") == source | {"torch_dtype": "float32"}
    longer = replace(spec, max_position_embeddings=512, name="other")
    assert export_config(longer, source) == source | {"max_position_embeddings": 512}
    cased = source | {"architectures": ["Qwen3Model"]}
    assert export_config(spec, cased)["architectures"] == ["Qwen3ForCausalLM"]


def test_an_export_of_stretched_llama3_keeps_its_frequencies() -> None:
    """original_max_position_embeddings stands for max_position_embeddings where it is absent."""
    source = base("llama") | {"rope_scaling": LLAMA3, "eos_token_id": 5}
    spec = replace(from_hf_config(source), max_position_embeddings=256)
    written = export_config(spec, source)
    assert from_hf_config(written) == spec and written["eos_token_id"] == 5


def test_an_export_without_a_readable_source_keeps_token_ids() -> None:
    spec = from_hf_config(base("llama"))
    for source in ({"model_type": "mamba", "eos_token_id": 5}, base("llama") | {"what": 1, "eos_token_id": 5}):
        written = export_config(spec, source)
        assert written["eos_token_id"] == 5 and from_hf_config(written) == spec


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "llama", "hidden_size": %s}' % ("9" * 5000),
        "[" * 100_000,
        '{"model_type": "\\ud800"}',
        '{"model_type": "llama", "vocab_size": 9223372036854775808}',
        json.dumps(base("llama") | {"hidden_size": 2**31 - 4, "vocab_size": 2**31 - 1}),
        json.dumps(base("llama") | {"num_hidden_layers": 100_001}),
        json.dumps(base("llama") | {"rms_norm_eps": float("nan")}),
        json.dumps(base("llama") | {"model_type": {"name": "llama"}}),
        json.dumps(base("llama") | {"rope_scaling": {"type": {"a": 1}}}),
        json.dumps(base("gpt2") | {"activation_function": ["gelu"]}),
        "\xff\xfe", "", "null",
    ],
)  # fmt: skip
def test_hostile_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        load_model(str(tmp_path))
    assert "config.json" in str(caught.value) or "hidden_size" in str(caught.value)


def test_what_is_no_file_in_the_directory_is_refused(tmp_path: Path) -> None:
    outside, folder = tmp_path / "secret.json", tmp_path / "model"
    outside.write_text(json.dumps(base("llama")))
    folder.mkdir()
    config = folder / "config.json"
    config.symlink_to(outside)
    with pytest.raises(UserError, match="outside its directory"):
        load_model(str(folder))
    config.unlink()
    config.symlink_to("nowhere")
    with pytest.raises(UserError, match="cannot read"):
        load_model(str(folder))
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(UserError, match="FIFO"):
        load_model(str(folder))
    for name in ("a" * 5000, "\0", str(config)):
        with pytest.raises(UserError):
            load_model(name)
