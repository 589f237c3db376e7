"""Small configurations of every family, as its config.json would say them; several shapes of its features."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "pad_token_id": None,  # a padding token's row of the embedding gets no gradient in transformers
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # one frequency kept, one blended, the rest stretched
}  # fmt: skip


def longrope(pairs: int, original: int) -> dict[str, Any]:
    """Short factors up to ``original`` positions, long ones beyond."""
    short, long = ([1 + step * i for i in range(pairs)] for step in (0.1, 0.7))
    return {
        "rope_scaling": {"rope_type": "longrope", "short_factor": short, "long_factor": long},
        "original_max_position_embeddings": original,
    }


LLAMA = BASE | {"model_type": "llama", "rope_theta": 10000.0}
GEMMA2 = BASE | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}
GEMMA3 = BASE | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
PHI3 = BASE | {"model_type": "phi3"}
OLMO2 = BASE | {"model_type": "olmo2"}
OLMO3 = BASE | {"model_type": "olmo3", "sliding_window": 4, "num_hidden_layers": 4}
SMOLLM3 = BASE | {"model_type": "smollm3", "num_hidden_layers": 4}
GLM = BASE | {"model_type": "glm", "head_dim": 16}
GLM4 = BASE | {"model_type": "glm4", "head_dim": 16}
GRANITE = BASE | {
    "model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
}  # fmt: skip
GROWTH = {"llama_4_scaling_beta": 0.3, "rope_theta": 500.0}
NEOX = BASE | {"model_type": "gpt_neox", "num_key_value_heads": 4, "layer_norm_eps": 1e-3}
GPTJ = {
    "model_type": "gptj", "num_hidden_layers": 3, "n_embd": 48, "num_attention_heads": 3, "vocab_size": 97,
    "n_positions": 64, "rotary_dim": 6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FALCON = {"model_type": "falcon", "ffn_hidden_size": 40}
FALCON = {key: BASE[key] for key in BASE.keys() - {"num_key_value_heads", "intermediate_size", "rms_norm_eps"}} | FALCON
COHERE = BASE | {"model_type": "cohere", "layer_norm_eps": 1e-3, "logit_scale": 0.3}
STABLELM = BASE | {"model_type": "stablelm", "num_key_value_heads": 4, "partial_rotary_factor": 0.5}
PHI = BASE | {"model_type": "phi", "hidden_act": "gelu_new"}
MINISTRAL = BASE | {"model_type": "ministral", "head_dim": 8, "sliding_window": 6}
MIXED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]}

# Attention and MLP on one input, and what these families do in turn instead.
PARALLEL_BLOCKS: dict[str, dict[str, Any]] = {
    "gpt_neox": NEOX,
    "gpt_neox_in_turn": NEOX | {
        "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "rotary_emb_base": 500,
        "tie_word_embeddings": True,
    },
    "gpt_neox_three_heads": NEOX | {
        "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "vocab_size": 97,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "hidden_act": "gelu_new",
    },
    "gptj": GPTJ,
    "gptj_whole_heads_tied": GPTJ | {"rotary_dim": 16, "tie_word_embeddings": True, "n_inner": 50},
    "phi": PHI | {"partial_rotary_factor": 0.5},
    "phi_qk_norm": PHI | {"qk_layernorm": True, "num_attention_heads": 2, "num_key_value_heads": 1,
                          "tie_word_embeddings": True},
    "phi_odd": PHI | {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "vocab_size": 97,
                      "head_dim": 12, "partial_rotary_factor": 0.34},
    "falcon_7b": FALCON,
    "falcon_three_heads": FALCON | {
        "num_attention_heads": 3, "hidden_size": 48, "vocab_size": 97, "bias": True, "tie_word_embeddings": False,
    },
    "falcon_40b": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_11b": FALCON | {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "rope_theta": 500.0,
        "tie_word_embeddings": False,
    },
    "falcon_40b_one_group": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 1, "ffn_hidden_size": None},
    "falcon_in_turn": FALCON | {"parallel_attn": False, "multi_query": False, "bias": True},
    "cohere": COHERE,
    "cohere_qk_norm": COHERE | {"use_qk_norm": True, "attention_bias": True, "head_dim": 12},
    "cohere_three_heads": COHERE | {
        "use_qk_norm": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "vocab_size": 97,
        "tie_word_embeddings": False,
    },
    "cohere2": COHERE | {"model_type": "cohere2", "sliding_window": 5, "num_hidden_layers": 5},
    "cohere2_mixed": COHERE | {
        "model_type": "cohere2", "sliding_window": 4, "layer_types": [FULL, SLIDING, FULL], "head_dim": 12,
        "num_key_value_heads": 1,
    },
    "stablelm": STABLELM,
    "stablelm_parallel": STABLELM | {
        "use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "stablelm_three_heads": STABLELM | {
        "use_parallel_residual": True, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48,
        "vocab_size": 97, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "llama_yarn": LLAMA | {"rope_scaling": YARN, "head_dim": 16, "rope_theta": 500.0},
    "llama_yarn_untruncated": LLAMA
    | {"rope_scaling": YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}, "head_dim": 24},
    "llama_proportional": LLAMA | {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
    "mistral_longrope": LLAMA | {"model_type": "mistral", "sliding_window": None, "head_dim": 8} | longrope(4, 64),
    "ministral": MINISTRAL,
    "ministral3": BASE | {"model_type": "ministral3", "head_dim": 8, "rope_parameters": YARN | GROWTH},
    "ministral3_window": BASE | {
        "model_type": "ministral3", "head_dim": 12, "sliding_window": 6, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 3} | GROWTH,
    },
    "gemma": BASE | {"model_type": "gemma", "head_dim": 8},
    "gemma_untied_silu": BASE | {
        "model_type": "gemma", "head_dim": 12, "tie_word_embeddings": False, "hidden_act": "silu",
        "attention_bias": True, "num_key_value_heads": 1,
    },
    "ministral_mixed": MINISTRAL | {"layer_types": [FULL, SLIDING, SLIDING]},
    "qwen2_mixed": LLAMA | {"model_type": "qwen2"} | MIXED,
    "qwen2_last_layers": LLAMA | {"model_type": "qwen2"} | MIXED | {"layer_types": None, "max_window_layers": 2},
    "qwen3_mixed": LLAMA | {"model_type": "qwen3", "head_dim": 16} | MIXED,
    "gemma2": GEMMA2,
    "gemma2_untied_silu": GEMMA2 | {
        "tie_word_embeddings": False, "hidden_activation": "silu", "attn_logit_softcapping": 2.0, "hidden_size": 36,
        "final_logit_softcapping": 4.0, "attention_bias": True, "num_key_value_heads": 4,
    },
    "gemma2_without_caps": GEMMA2 | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 1,
        "layer_types": [FULL, FULL, SLIDING],
    },
    "gemma3": GEMMA3 | {"num_hidden_layers": 7},
    "gemma3_old_names": GEMMA3 | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0, "rope_theta": 2000.0,
        "sliding_window_pattern": 2, "hidden_activation": "gelu", "num_key_value_heads": 4,
    },
    "gemma3_new_names": GEMMA3 | {
        "rope_parameters": {FULL: YARN | {"rope_theta": 3000.0}, SLIDING: {"rope_type": "default"}}, "head_dim": 16,
        "layer_types": [SLIDING, FULL, FULL], "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 20,
    },
    "phi3": PHI3,
    "phi3_window_mha": PHI3 | {"sliding_window": 6, "num_key_value_heads": 4},
    "phi3_longrope": PHI3 | longrope(4, 64),
    "phi3_longrope_long": PHI3 | longrope(4, 8),
    "phi4_mini": PHI3 | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True} | longrope(3, 8),
    "olmo2": OLMO2,
    "olmo2_mha_biases": OLMO2 | {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 6},
    "olmo2_one_kv_head": OLMO2 | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "olmo3": OLMO3,
    "olmo3_yarn": OLMO3 | {"rope_scaling": YARN | {"attention_factor": 1.2}, "rope_theta": 800.0, "head_dim": 16},
    "smollm3": SMOLLM3,
    "smollm3_windows": SMOLLM3 | {
        "use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1, 1, 0], "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": False,
    },
    "glm": GLM,
    "glm_quarter": GLM | {"partial_rotary_factor": 0.25, "attention_bias": False},
    "glm4": GLM4,
    "glm4_whole_heads": GLM4 | {"partial_rotary_factor": 1.0, "num_key_value_heads": 4},
    "granite": GRANITE,
    "arcee": BASE | {"model_type": "arcee", "rope_scaling": YARN},
    "arcee_biases": BASE | {"model_type": "arcee", "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "seed_oss": BASE | {"model_type": "seed_oss", "head_dim": 12},
    "seed_oss_biases": BASE | {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True, "head_dim": 8,
                               "attention_bias": False, "num_key_value_heads": 1},
    "helium": BASE | {"model_type": "helium", "head_dim": 8},
    "helium_biases": BASE | {"model_type": "helium", "head_dim": 12, "hidden_size": 48, "attention_bias": True,
                             "mlp_bias": True, "num_key_value_heads": 4},
    "ernie4_5": BASE | {"model_type": "ernie4_5", "head_dim": 12},
    "ernie4_5_biases": BASE | {"model_type": "ernie4_5", "head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    "exaone4": BASE | {"model_type": "exaone4", "sliding_window": 5, "num_hidden_layers": 4},
    "exaone4_full": BASE | {
        "model_type": "exaone4", "sliding_window": None, "layer_types": [FULL] * 3, "tie_word_embeddings": True,
        "num_key_value_heads": 4, "rope_scaling": LLAMA3, "head_dim": 16,
    },
    "exaone4_mixed": BASE | {"model_type": "exaone4", "sliding_window": 4, "layer_types": [FULL, SLIDING, SLIDING]},
    "starcoder2": BASE | {"model_type": "starcoder2", "norm_epsilon": 1e-3},
    "starcoder2_window": BASE | {
        "model_type": "starcoder2", "use_bias": False, "sliding_window": 5, "tie_word_embeddings": False,
        "hidden_act": "gelu",
    },
    "nemotron": BASE | {"model_type": "nemotron", "norm_eps": 1e-3},
    "nemotron_whole_heads": BASE | {
        "model_type": "nemotron", "partial_rotary_factor": 1.0, "attention_bias": True, "mlp_bias": True,
        "hidden_act": "gelu", "head_dim": 12,
    },
    **PARALLEL_BLOCKS,
    "granite_biases_tied": GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}  # fmt: skip
