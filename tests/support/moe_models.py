"""Small mixtures of experts, by what is particular about them."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "vocab_size": 37, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = _BASE | {"num_experts": 5, "moe_intermediate_size": 12}
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 8},
    "qwen2_moe": _QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 14, "norm_topk_prob": False},
    "qwen2_moe_dense_layers": _QWEN
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 9, "num_hidden_layers": 4,
       "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe": _QWEN
    | {"model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True, "num_experts_per_tok": 3,
       "tie_word_embeddings": True},
    "olmoe": _BASE | {"model_type": "olmoe", "num_experts": 6, "norm_topk_prob": False, "pad_token_id": None},
}  # fmt: skip
