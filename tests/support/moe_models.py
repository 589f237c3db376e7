"""Small mixtures of experts, by what is particular about them."""

from __future__ import annotations

from typing import Any

CHUNKED = "chunked_attention"
_BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "vocab_size": 37, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = _BASE | {"num_experts": 5, "moe_intermediate_size": 12}
GPT_OSS = _BASE | {
    "model_type": "gpt_oss", "num_local_experts": 5, "head_dim": 8, "sliding_window": 5, "pad_token_id": None,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
_DEEPSEEK = _BASE | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2,
    "moe_intermediate_size": 10, "first_k_dense_replace": 1, "kv_lora_rank": 12, "q_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "routed_scaling_factor": 1.5,
}  # fmt: skip
_DEEPSEEK_YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 16,
    "mscale": 0.707, "mscale_all_dim": 0.9,
}  # fmt: skip
DEEPSEEK_V2 = _DEEPSEEK | {"model_type": "deepseek_v2", "rope_scaling": _DEEPSEEK_YARN}
DEEPSEEK_V3 = _DEEPSEEK | {
    "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0,
    "rope_scaling": _DEEPSEEK_YARN, "num_experts_per_tok": 3,
}  # fmt: skip
_GLM_EXPERTS = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 10,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
GLM4_MOE = _BASE | _GLM_EXPERTS | {"model_type": "glm4_moe", "num_nextn_predict_layers": 0, "head_dim": 8}
DOTS1 = _BASE | _GLM_EXPERTS | {"model_type": "dots1", "norm_topk_prob": True}
LLAMA4 = _BASE | {
    "model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 4, "pad_token_id": None,
    "num_experts_per_tok": 1, "intermediate_size_mlp": 28, "attention_chunk_size": 6, "floor_scale": 3,
    "attn_scale": 0.3, "interleave_moe_layer_step": 2,
}  # fmt: skip
QWEN3_NEXT = _BASE | {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 8, "num_experts": 5, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "pad_token_id": None,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
QWEN3_5 = {key: size for key, size in QWEN3_NEXT.items() if key not in _EXPERTS} | {
    "model_type": "qwen3_5_text", "rope_parameters": _MROPE,
}
QWEN3_5_MOE = {key: size for key, size in QWEN3_NEXT.items() if key != "intermediate_size"} | {
    "model_type": "qwen3_5_moe_text", "rope_parameters": _MROPE,
}
KIMI = {key: size for key, size in _DEEPSEEK.items() if key not in ("n_routed_experts", "first_k_dense_replace")} | {
    "model_type": "kimi_linear", "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": None, "vocab_size": 97, "num_local_experts": 5, "linear_num_heads": 3, "linear_head_dim": 6,
    "linear_conv_kernel_dim": 4, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 8},
    "qwen2_moe": _QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 14, "norm_topk_prob": False},
    "qwen2_moe_dense_layers": _QWEN
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 9, "num_hidden_layers": 4,
       "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe": _QWEN
    | {"model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True, "num_experts_per_tok": 3,
       "tie_word_embeddings": True},
    "gpt_oss": GPT_OSS,
    "gpt_oss_sharp": GPT_OSS | {
        "num_hidden_layers": 3, "swiglu_limit": 0.3, "swiglu_alpha": 1.1, "num_experts_per_tok": 3,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"], "num_key_value_heads": 1,
        "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    },
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2_lite": DEEPSEEK_V2 | {"q_lora_rank": None, "mlp_bias": True, "attention_bias": True, "v_head_dim": 13},
    "deepseek_v2_groups": DEEPSEEK_V2 | {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "first_k_dense_replace": 0, "rope_scaling": None, "num_hidden_layers": 2,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_plain": DEEPSEEK_V3 | {
        "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False, "rope_scaling": None,
        "q_lora_rank": None, "attention_bias": True, "hidden_size": 30,
    },
    "glm4_moe": GLM4_MOE,
    "glm4_moe_norms": GLM4_MOE | {
        "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 1.0, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": False,
    },
    "dots1": DOTS1,
    "dots1_windows": DOTS1 | {
        "sliding_window": 5, "max_window_layers": 1, "attention_bias": True, "n_shared_experts": 2,
    },
    "llama4": LLAMA4,
    "llama4_other_layers": LLAMA4 | {
        "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True, "moe_layers": [0, 1, 3],
        "no_rope_layers": [0, 1, 1, 0], "layer_types": [CHUNKED, CHUNKED, "full_attention", "full_attention"],
        "attn_temperature_tuning": False, "num_key_value_heads": 4, "attention_chunk_size": 5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "olmoe": _BASE | {"model_type": "olmoe", "num_experts": 6, "norm_topk_prob": False, "pad_token_id": None},
}  # fmt: skip

# Linear attention in some layers.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next_odd": QWEN3_NEXT | {
        "num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 97,
        "head_dim": 12, "partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": True,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mlp_only_layers": [1],
        "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "norm_topk_prob": False,
    },
    "qwen3_5": QWEN3_5 | {
        "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 97, "head_dim": 12,
        "tie_word_embeddings": True, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
    },
    "qwen3_5_moe": QWEN3_5_MOE,
    "kimi_linear": KIMI,
    "kimi_linear_groups": KIMI | {
        "num_hidden_layers": 5, "layer_types": None, "q_lora_rank": 10, "attention_bias": True, "n_group": 3,
        "topk_group": 2, "num_local_experts": 6, "norm_topk_prob": False, "linear_num_heads": 4, "linear_head_dim": 5,
        "linear_conv_kernel_dim": 3, "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    },
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 37, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_expand": 2,
    "mamba_chunk_size": 8, "pad_token_id": None,
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention"], "hidden_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20, "vocab_size": 37,
    "max_position_embeddings": 64, "mamba_num_heads": 6, "n_groups": 3, "mamba_head_dim": 8, "ssm_state_size": 5,
    "pad_token_id": None,
}
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 14, "routed_scaling_factor": 1.5,
}
# Mamba-2 in some layers.
MAMBAS: dict[str, dict[str, Any]] = {
    "granite_hybrid_experts": _MAMBA | {
        "model_type": "granitemoehybrid", "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12,
        "shared_intermediate_size": 14, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mamba_n_groups": 1,
    },
    "granite_hybrid": _MAMBA | {
        "model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 20,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "embedding_multiplier": 1.5,
        "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 1.7,
    },
    "granite_hybrid_odd": _MAMBA | {
        "model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 28, "vocab_size": 97,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "hidden_size": 48,
        "num_attention_heads": 3, "num_key_value_heads": 3, "mamba_n_heads": 3, "mamba_n_groups": 1,
        "mamba_d_head": "auto", "mamba_expand": 1, "mamba_d_conv": 3, "mamba_conv_bias": False,
        "mamba_proj_bias": True, "position_embedding_type": "rope", "attention_bias": True,
        "tie_word_embeddings": True, "time_step_limit": [0.3, 1.1],
    },
    "bamba": _MAMBA | {
        "model_type": "bamba", "intermediate_size": 20, "attn_layer_indices": [1], "mlp_bias": True,
        "mamba_n_groups": 2, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
        "mamba_d_head": 12, "attention_bias": True,
    },
    # Every layer is a mixer, an MLP or a mixture of experts, without gates, alone.
    "nemotron_h_experts": NEMOTRON_H | _NEMOTRON_EXPERTS,
    "nemotron_h_experts_groups": NEMOTRON_H | _NEMOTRON_EXPERTS | {
        "layers_block_type": ["moe", "full_attention", "mlp"], "n_routed_experts": 6, "n_group": 3, "topk_group": 2,
        "norm_topk_prob": False, "mlp_bias": True, "num_experts_per_tok": 3,
    },
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_odd": {key: value for key, value in NEMOTRON_H.items() if key != "layers_block_type"} | {
        "hybrid_override_pattern": "*-M", "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3,
        "head_dim": 12, "vocab_size": 97, "mamba_num_heads": 3, "n_groups": 1, "conv_kernel": 3, "use_bias": True,
        "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.8,
    },
}
