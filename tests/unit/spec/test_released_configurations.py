"""Configurations as their makers released them are read, and give the numbers of parameters of the model cards.

Those that are quantised or predict further tokens are read as plain ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from hetero_megatron.errors import UserError
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import export_config

SLIDING, FULL = "sliding_attention", "full_attention"
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": [SLIDING, FULL] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
    "use_cache": True, "vocab_size": 201088,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": DEEPSEEK_YARN, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536, "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "vocab_size": 129280, "ep_size": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "first_k_dense_replace": 1, "head_dim": 72,
    "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "kv_lora_rank": 512, "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [i for i in range(1, 27) if i % 4],
    }, "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
NEMOTRON_3: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
    "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
    "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "eos_token_id": 248044,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
    "num_hidden_layers": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                        "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
GPT_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 32, "num_hidden_layers": 32,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50432,
}  # fmt: skip
GPTJ: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "bos_token_id": 50256,
    "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28,
    "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "tie_word_embeddings": False,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
    "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0", "use_cache": True, "vocab_size": 50400,
}  # fmt: skip
PHI_2: dict[str, Any] = {
    "_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "phi", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.37.0",
    "use_cache": True, "vocab_size": 51200,
}  # fmt: skip
FALCON_7B: dict[str, Any] = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "hidden_size": 4544, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
}  # fmt: skip
COMMAND_R: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
    "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
    "num_key_value_heads": 64, "pad_token_id": 0, "pretraining_tp": 1, "rope_theta": 8000000.0,
    "torch_dtype": "float16", "transformers_version": "4.38.2", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R7B = COMMAND_R | {
    "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "layer_switch": 4, "logit_scale": 0.25, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_scaling": None,
    "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": False,
}  # fmt: skip
STABLELM_2: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 100257,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5632, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096,
    "model_type": "stablelm", "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.38.0", "use_cache": True, "use_qkv_bias": True, "vocab_size": 100352,
}  # fmt: skip
RELEASED = {
    "Pythia-6.9B": (GPT_NEOX, 6.857e9), "GPT-J-6B": (GPTJ, 6.051e9), "Phi-2": (PHI_2, 2.780e9),
    "GPT-NeoX-20B": (
        GPT_NEOX | {"hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64, "num_hidden_layers": 44,
                    "hidden_act": "gelu_fast", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}, 20.555e9,
    ),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79.674e9),
    "Falcon-7B": (FALCON_7B, 6.922e9), "Command-R": (COMMAND_R, 34.98e9), "Command-R7B": (COMMAND_R7B, 8.028e9),
    "Falcon-40B": (
        FALCON_7B | {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
                     "new_decoder_architecture": True}, 41.30e9,
    ),
    "Falcon2-11B": (
        FALCON_7B | {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
                     "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 16384,
                     "ff_factor": 4, "rope_theta": 500042, "rope_scaling": None, "tie_word_embeddings": False,
                     "max_position_embeddings": 8192}, 11.1e9,
    ),
    "StableLM-2-1.6B": (STABLELM_2, 1.645e9),
    "StableLM-2-12B": (
        STABLELM_2 | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
                      "num_key_value_heads": 8, "qk_layernorm": True, "use_parallel_residual": True,
                      "use_qkv_bias": False}, 12.14e9,
    ),
    "gpt-oss-20b": (GPT_OSS, 20.91e9),
    "gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "layer_types": [SLIDING, FULL] * 18, "num_local_experts": 128}, 116.83e9,
    ),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.7e9), "DeepSeek-V3": (DEEPSEEK_V3, 671e9),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30.5e9),
    "Kimi-Linear-48B-A3B": (KIMI_LINEAR, 49.12e9), "Nemotron-3-Nano-30B-A3B": (NEMOTRON_3, 31.58e9),
    "Qwen3.5-27B": (QWEN3_5 | {"architectures": ["Qwen3_5ForCausalLM"]}, 26.9e9),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_the_model_card(name: str) -> None:
    config, parameters = RELEASED[name]
    AutoConfig.for_model(**config)
    spec = from_hf_config(config)
    assert parameter_count(spec) == pytest.approx(parameters, rel=2e-3)
    assert from_hf_config(export_config(spec, None)) == spec and export_config(spec, config) == config


@pytest.mark.parametrize("name", ["gpt-oss-20b", "DeepSeek-V3"])
def test_as_released_they_are_the_same_models(name: str) -> None:
    """Quantised, and with a layer of multi-token prediction."""
    config, _ = RELEASED[name]
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    added = {"quantization_config": mxfp4 if name == "gpt-oss-20b" else fp8}
    added |= {"num_nextn_predict_layers": 1} if name == "DeepSeek-V3" else {}
    spec = from_hf_config(config | added)
    plain = from_hf_config(config)
    assert spec == plain and len(spec.notices) == len(plain.notices) + len(added)
    assert export_config(spec, config | added) == config


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GPT_OSS | {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (DEEPSEEK_V3 | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers"),
        (DEEPSEEK_V2_LITE | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ],
)
def test_what_they_have_besides_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(config)
    assert caught.value.field == key


def test_of_a_model_with_images_the_language_model_is_read() -> None:
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
        "text_config": QWEN3_5, "vision_config": {"depth": 27}, "tie_word_embeddings": False,
    }  # fmt: skip
    spec = from_hf_config(whole)
    assert spec == from_hf_config(QWEN3_5) and any("language model" in notice for notice in spec.notices)
    assert from_hf_config(export_config(spec, whole)) == spec
