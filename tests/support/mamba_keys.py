"""Values of the keys of config.json that hybrids with Mamba-2 have, good and bad."""

from __future__ import annotations

from typing import Any

FULL, LINEAR = "full_attention", "linear_attention"
SIZES: dict[str, Any] = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 16, "layer_types": [FULL, LINEAR]}
MAMBA: list[dict[str, Any]] = [
    {"mamba_n_heads": 8, "mamba_d_head": 8}, {"mamba_n_heads": 8}, {"mamba_n_heads": 5}, {"mamba_n_heads": 0},
    {"mamba_n_groups": 1}, {"mamba_n_groups": 3}, {"mamba_n_groups": None}, {"mamba_d_head": "auto"},
    {"mamba_d_head": None}, {"mamba_d_head": "16"}, {"mamba_d_state": 9}, {"mamba_d_state": 0}, {"mamba_d_conv": 2},
    {"mamba_d_conv": 1}, {"mamba_d_conv": 0}, {"mamba_expand": 1, "mamba_d_head": 8}, {"mamba_expand": 3},
    {"mamba_expand": 0.5}, {"mamba_conv_bias": False}, {"mamba_conv_bias": None}, {"mamba_proj_bias": True},
    {"mamba_chunk_size": 4}, {"time_step_limit": [0.5, 0.9]}, {"time_step_limit": [0.9, 0.5]},
    {"time_step_limit": [0.8]}, {"time_step_limit": None},
    {"time_step_limit": [0.6, float("inf")]}, {"time_step_limit": "all"}, {"rms_norm_eps": 0.1},
    {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
]  # fmt: skip
GRANITE: list[dict[str, Any]] = [
    {"layer_types": [LINEAR, LINEAR]}, {"layer_types": [FULL, FULL]}, {"layer_types": ["mamba", "attention"]},
    {"layer_types": ["mamba"]}, {"layer_types": None}, {"layer_types": ["recurrent", FULL]}, {"layer_types": FULL},
    {"layer_types": [FULL, LINEAR], "layers_block_type": [LINEAR, LINEAR]},
    {"position_embedding_type": "rope"}, {"position_embedding_type": "nope"}, {"position_embedding_type": "alibi"},
    {"position_embedding_type": "rope", "rope_theta": 50.0}, {"shared_intermediate_size": 9},
    {"shared_intermediate_size": 0}, {"num_local_experts": 0}, {"num_local_experts": 7}, {"num_local_experts": None},
    {"num_local_experts": -1}, {"embedding_multiplier": 3}, {"embedding_multiplier": None}, {"logits_scaling": 0.5},
    {"residual_multiplier": 0.1}, {"residual_multiplier": 0}, {"attention_multiplier": 0.02},
    {"normalization_function": "rmsnorm"}, {"normalization_function": "layernorm"}, {"init_method": "mup"},
]  # fmt: skip
BAMBA: list[dict[str, Any]] = [
    {"attn_layer_indices": []}, {"attn_layer_indices": None}, {"attn_layer_indices": [0, 1]},
    {"attn_layer_indices": [0]}, {"attn_layer_indices": [2]}, {"attn_layer_indices": [-1]}, {"attn_layer_indices": 1},
    {"attn_layer_indices": [True]}, {"z_loss_coefficient": 0.1}, {"z_loss_coefficient": 0.0},
    {"num_logits_to_keep": None}, {"partial_rotary_factor": 0.5}, {"layer_types": [FULL, LINEAR]},
]  # fmt: skip
MLP = "mlp"
NEMOTRON: list[dict[str, Any]] = [
    {"layers_block_type": [LINEAR, FULL, MLP]}, {"layers_block_type": ["mamba", "attention", MLP]},
    {"layers_block_type": [MLP, MLP, MLP]}, {"layers_block_type": [FULL, MLP, FULL]}, {"layers_block_type": [LINEAR]},
    {"layers_block_type": [LINEAR, "moe", MLP]}, {"layers_block_type": "mlp"}, {"layers_block_type": None},
    {"hybrid_override_pattern": "***"}, {"layers_block_type": None, "hybrid_override_pattern": "*M-"},
    {"layers_block_type": None, "hybrid_override_pattern": "*M"}, {"num_hidden_layers": None}, {"num_hidden_layers": 5},
    {"layers_block_type": None, "hybrid_override_pattern": "M|-"}, {"mamba_num_heads": 3}, {"mamba_num_heads": 4},
    {"n_groups": 1}, {"n_groups": 4}, {"n_groups": None}, {"ssm_state_size": 9}, {"mamba_head_dim": 5},
    {"conv_kernel": 2}, {"conv_kernel": 0}, {"use_bias": True}, {"use_conv_bias": False}, {"mlp_bias": True},
    {"mamba_proj_bias": True}, {"attention_bias": True}, {"time_step_min": 0.9}, {"time_step_min": 0},
    {"time_step_limit": [0.5, 0.9]}, {"time_step_max": 0.01}, {"layer_norm_epsilon": 0.1}, {"rms_norm_eps": 0.1},
    {"mlp_hidden_act": "gelu"}, {"mlp_hidden_act": "silu"}, {"mamba_hidden_act": "gelu"}, {"expand": 7},
    {"chunk_size": 4}, {"residual_in_fp32": True}, {"n_routed_experts": 3}, {"moe_latent_size": 7},
    {"n_routed_experts": 1}, {"n_routed_experts": None}, {"num_local_experts": 5}, {"num_local_experts": 4},
    {"n_routed_experts": 6, "n_group": 3, "topk_group": 2}, {"n_group": 2}, {"n_group": 5}, {"topk_group": 2},
    {"num_experts_per_tok": 5}, {"num_experts_per_tok": 6}, {"num_experts_per_tok": 0}, {"norm_topk_prob": False},
    {"norm_topk_prob": None}, {"routed_scaling_factor": 2}, {"routed_scaling_factor": 0}, {"n_shared_experts": 2},
    {"moe_intermediate_size": 9}, {"moe_intermediate_size": 0}, {"moe_shared_expert_intermediate_size": 9},
    {"moe_shared_expert_intermediate_size": 0}, {"moe_shared_expert_overlap": False}, {"moe_latent_size": None},
    {"layers_block_type": ["moe"] * 3}, {"layers_block_type": [MLP, "moe", FULL]},
    {"layers_block_type": None, "hybrid_override_pattern": "EM*"},
    {"num_nextn_predict_layers": 1}, {"attention_head_dim": 9}, {"sliding_window": 3}, {"rope_theta": 5.0},
]  # fmt: skip
