"""Configurations as their makers released them are read, and give the numbers of parameters of the model cards.

Left out is what is refused: formats of quantised weights and multi-token prediction.
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
RELEASED = {
    "gpt-oss-20b": (GPT_OSS, 20.91e9),
    "gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "layer_types": [SLIDING, FULL] * 18, "num_local_experts": 128}, 116.83e9,
    ),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.7e9), "DeepSeek-V3": (DEEPSEEK_V3, 671e9),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30.5e9),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_the_model_card(name: str) -> None:
    config, parameters = RELEASED[name]
    AutoConfig.for_model(**config)
    spec = from_hf_config(config)
    assert parameter_count(spec) == pytest.approx(parameters, rel=2e-3)
    assert from_hf_config(export_config(spec, None)) == spec and export_config(spec, config) == config


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        (DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quantization_config"),
        (DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ],
)
def test_what_they_have_besides_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(config)
    assert caught.value.field == key
