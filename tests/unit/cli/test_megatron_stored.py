"""Arguments that Megatron checkpoints store: each is read, without effect on the model, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.cli.flags.megatron_checkpoint import spec_of_arguments
from hetero_megatron.cli.megatron_keys import KEYS, check_stored
from hetero_megatron.errors import UserError
from tests.support.paths import FIXTURES

LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 16, "seq_length": 32, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0, "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "vocab_size": 256,
    # What every namespace has, at Megatron's defaults.
    "add_position_embedding": True, "bias_gelu_fusion": False, "window_size": None, "softmax_type": "vanilla",
    "relative_attention_num_buckets": 32, "onnx_safe": None, "bert_binary_head": True, "retro_add_retriever": False,
    "hybrid_attention_ratio": 0.0, "mamba_state_dim": 128, "moe_router_load_balancing_type": "aux_loss",
    "moe_router_topk": 2, "moe_token_drop_policy": "probs", "attention_dropout": 0.1, "lr": 1e-4, "rank": 0,
    "world_size": 8, "no_load_optim": None, "patch_dim": 16, "data_path": ["a"], "kv_lora_rank": 32,
    "dino_norm_last_layer": False, "linear_conv_kernel_dim": 4, "mtp_num_layers": None, "use_mup": False,
    "apply_query_key_layer_scaling": False, "barrier_with_L1_time": True, "masked_softmax_fusion": True,
}  # fmt: skip


def spec(**changed: Any) -> Any:
    return spec_of_arguments(LLAMA | changed, None, 256)


def test_what_a_namespace_has_anyway_is_not_said() -> None:
    found, notices = spec()
    assert not notices and found.norm_eps == 1e-5 and found.num_kv_heads == 2


# What is not named as a flag is: names and defaults of core 0.7's parser, and what its run sets of itself.
OF_ITSELF: dict[str, Any] = {
    "encoder_num_layers": 2, "decoder_num_layers": None, "encoder_seq_length": 32, "decoder_seq_length": None,
    "overlap_p2p_comm": False, "apply_rope_fusion": True, "bias_swiglu_fusion": True, "bias_dropout_fusion": True,
    "clone_scatter_output_in_embedding": True, "tp_comm_overlap_ag": True, "tp_comm_bulk_wgrad": True,
    "tp_comm_split_rs": True, "check_for_nan_in_loss_and_grad": True, "log_learning_rate_to_tensorboard": True,
    "log_loss_scale_to_tensorboard": True, "mmap_bin_files": True, "create_attention_mask_in_dataloader": True,
    "data_sharding": True, "manual_gc_eval": True, "delay_grad_reduce": True, "retro_verify_neighbor_count": True,
    "scatter_gather_tensors_in_pipeline": True, "perform_initialization": True, "fp8": None, "fp8_wgrad": True,
    "bias_gelu_fusion": False, "num_classes": 1000, "img_h": 224, "dino_freeze_last_layer": 1, "yaml_cfg": None,
    "retro_attention_gate": 1, "enable_one_logger": False, "one_logger_project": "e2e-tracking", "hysteresis": 2,
    "vocab_extra_ids": 0, "classes_fraction": 1.0, "use_tp_pp_dp_mapping": False, "moe_extended_tp": False,
    "vision_backbone_type": "vit", "swin_backbone_type": "tiny", "mask_type": "random", "iter_per_epoch": 1250,
    "titles_data_path": None, "query_in_block_prob": 0.1, "indexer_batch_size": 128, "embedding_path": None,
    "start_weight_decay": 0.01, "end_weight_decay": 0.01, "straggler_ctrlr_port": 65535, "rotary_interleaved": False,
    "inference_batch_times_seqlen_threshold": 512, "max_tokens_to_oom": 12000, "output_bert_embeddings": False,
    "bert_embedder_type": "megatron", "lazy_mpu_init": None, "standalone_embedding_stage": False, "spec": None,
    "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False, "num_experts": None,
    "transformer_pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "rotary_seq_len_interpolation_factor": None, "variable_seq_lengths": False, "attention_softmax_in_fp32": False,
    "sample_rate": 1.0, "mask_prob": 0.15, "short_seq_prob": 0.1, "retriever_seq_length": 256, "test_mode": False,
    "adlr_autoresume": False, "adlr_autoresume_interval": 1000, "local_rank": 0, "use_one_sent_docs": False,
}  # fmt: skip


# Defaults of main in 2026, which makes an argument of every field of its configuration.
OF_2026: dict[str, Any] = {
    "muon_split_qkv": True, "csa_window_size": 128, "csa_compress_rotary_base": 4e4, "enable_hyper_connections": False,
    "num_residual_streams": 4, "mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01,
    "mok_fwd_num_comm_sms": 40,
    "mok_schedule_capacity_multiplier": 0.5, "mok_all_gather_top_experts_chunk_bytes": 2048, "mrope_interleaved": False,
    "mok_use_mxfp8_weights": True, "moe_hybridep_num_sms_preprocessing": 108, "moe_flex_dispatcher_backend": "deepep",
    "moe_paged_stash_page_size": 64, "moe_paged_stash_buffer_size_factor_cuda": 1.1, "mlp_chunks_for_training": 1,
    "activation_offload_fraction": 1.0, "create_attention_mask_in_dataloader": True, "cp_partition_mode": "zigzag",
    "kitchen_attention_backend": "sdpa", "cuda_graph_use_single_mempool": True, "use_mamba_mem_eff_path": True,
    "linear_cp_mode": "chunkwise", "dsa_indexer_rotate_activation": True, "bias_activation_fusion": True,
    "head_wise_attn_gate": False, "rotary_base_per_layer": None, "softmax_scale": None, "moe_n_hash_layers": 0,
}  # fmt: skip


# Defaults of forks (Megatron-DeepSpeed, MindSpeed-LLM), also without experts.
OF_FORKS: dict[str, Any] = {
    "expert_interval": 2, "moe_train_capacity_factor": 1.0, "moe_min_capacity": 4, "moe_model_type": "megatron_moe",
    "moe_expert_parallel_size": 1, "attention_mask_type": "causal", "cp_attention_mask_type": "causal",
    "kv_head_repeat_before_uly_alltoall": True, "cp_window_size": 1, "embedding_multiplier_scale": 1.0,
    "mlp_type": "standard",
}  # fmt: skip


def test_what_forks_store_of_experts_says_nothing_about_a_model_without() -> None:
    found, notices = spec(**OF_FORKS)
    assert found == spec()[0] and len(notices) == 1 and "moe_train_capacity_factor" in notices[0]
    for key in ("expert_interval", "moe_train_capacity_factor", "router_jitter"):
        with pytest.raises(UserError, match=f"{key} = 2.*not known to leave the model as it is"):
            check_stored({key: 2, "num_experts": 4}, "c")


def test_what_a_run_stores_of_itself_is_not_said() -> None:
    """Of core 0.7, and of the same with its own layers, and of forks whose default is another; of main."""
    for more in ({}, OF_2026, {"spec": ["local"]}, {"first_k_dense_replace": 0}, {"encoder_num_layers": None}):
        found, notices = spec(**(OF_ITSELF | more))
        assert not notices and found == spec()[0]


def test_every_flag_of_megatrons_is_known() -> None:
    names = [line[2:].replace("-", "_") for line in (FIXTURES / "megatron_flags.txt").read_text().split()]
    assert not [name for name in names if name.startswith("__") or name not in KEYS.accepted_keys]


def test_present_and_old_names_are_one_argument() -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "norm_epsilon"}
    assert spec_of_arguments(plain | {"layernorm_epsilon": 0.01}, None, 256)[0].norm_eps == 0.01
    assert spec_of_arguments(plain | {"layernorm_epsilon": 0.01, "norm_epsilon": None}, None, 256)[0].norm_eps == 0.01
    assert spec(layernorm_epsilon=1e-5)[0].norm_eps == 1e-5
    with pytest.raises(UserError, match=r"layernorm_epsilon = 0.01.*norm_epsilon says 1e-05"):
        spec(layernorm_epsilon=0.01)
    ungrouped = LLAMA | {"group_query_attention": False, "num_query_groups": 1}
    for name in ("num_key_value_heads", "num_attention_heads_kv"):
        assert spec_of_arguments(ungrouped | {name: 2}, None, 256)[0].num_kv_heads == 2
        assert spec_of_arguments(ungrouped | {name: 4}, None, 256)[0].num_kv_heads == 4
        with pytest.raises(UserError, match=name):
            spec(**{name: 1})


REFUSED_VALUES: dict[str, Any] = {
    "mtp_num_layers": 1, "softmax_type": "learnable", "window_attn_skip_freq": 2, "no_rope_freq": 4, "spec": ["a", "b"],
    "experimental_attention_variant": "gated_delta_net", "heterogeneous_layers_config_path": "x.json",
    "heterogeneous_layers_config_encoded_json": "{}", "hybrid_layer_pattern": "M*", "hybrid_override_pattern": "M*",
    "hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.5, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7,
    "moe_latent_size": 8, "moe_apply_probs_on_input": True, "decoder_num_layers": 2,
    "vocab_extra_ids": 100, "mrope_section": [1, 2, 3], "retro_add_retriever": True, "onnx_safe": True, "use_mup": True,
    "vision_pretraining": True, "moe_router_force_load_balancing": True, "moe_router_force_biased": 1.0,
    "moe_mlp_glu_interleave_size": 32, "moe_shared_expert_glu_interleave_size": 32, "embed_layernorm": True,
    "parallel_attn": True, "parallel_layernorm": True, "geglu": True, "glu_activation": "geglu", "use_rms_norm": True,
    "use_bias": False, "tie_embed_logits": True, "sliding_window_size": 64, "input_embeds_norm": True,
    "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256, "add_rmsnorm_offset": True,
    "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "post_norm": True,
    "output_multiplier_scale": 2.0,
    "partial_rotary_factor": 0.5, "add_lmhead_bias": True, "first_k_dense_replace": 1, "square_alibi_mask": True,
    "fill_neg_inf": True, "rope_theta": 1e6, "use_glm_rope": True, "enable_hyper_connections": True,
    "attention_mask_type": "general", "cp_attention_mask_type": "full", "embedding_multiplier_scale": 12.0,
    "mlp_type": "residual",
}  # fmt: skip


def test_arguments_of_other_models_are_refused_by_name() -> None:
    assert REFUSED_VALUES.keys() == KEYS.fixed.keys()
    for key, value in REFUSED_VALUES.items():
        with pytest.raises(UserError, match=key) as raised:
            spec(**{key: value})
        assert raised.value.field == key
    with pytest.raises(UserError, match=r"encoder_num_layers = 3.*num_layers \(2\)"):
        spec(encoder_num_layers=3)
    more = {"apply_layernorm_1p": True, "rotary_interleaved": True, "rotary_percent": 0.5, "qk_l2_norm": True,
            "rotary_seq_len_interpolation_factor": 2, "position_embedding_type": "yarn"}  # fmt: skip
    for key, value in more.items():
        with pytest.raises(UserError, match=key.replace("_", "-")):
            spec(**{key: value})
    for key in ("swiglu", "qk_layernorm", "group_query_attention", "add_bias_linear", "use_rope_scaling"):
        with pytest.raises(UserError, match=f"{key} = yes: is no switch"):
            spec(**{key: "yes"})
    with pytest.raises(UserError, match="without positions"):
        spec(position_embedding_type="learned_absolute", add_position_embedding=False)
    with pytest.raises(UserError, match="sinkhorn"):
        spec(num_experts=4, moe_ffn_hidden_size=32, moe_router_load_balancing_type="sinkhorn")


def test_unknown_arguments_are_named_with_the_nearest_known_one() -> None:
    _, notices = spec(train_itters=7, a_fork_does_this=True, and_not_this=False, nor_that=None, zero=0)
    assert len(notices) == 1 and "train_itters (did you mean train_iters?)" in notices[0]
    assert "a_fork_does_this" in notices[0] and "not_this" not in notices[0] and "zero" not in notices[0]


def test_unknown_arguments_whose_names_are_of_the_model_are_refused() -> None:
    """As forks name what they add to it; off, they say nothing, and fused kernels compute the same."""
    for key in ("use_sandwich_norm", "alibi", "embedding_scale", "attention_scale", "rope_thetas", "logit_softcap",
                "mlp_bias", "n_head_kv", "hidden_act", "residual_multiplier", "emb_dropout_scale",
                "use_post_attn_norm", "norm_epsilom", "sliding_pattern", "qk_clamp", "fused_alibi",
                "tied_head"):  # fmt: skip
        with pytest.raises(UserError, match=f"{key} = .*not known to leave the model as it is"):
            spec(**{key: 0.5})
        for off in (None, False, 0, "", []):
            assert spec(**{key: off})[1] == ()
    _, notices = spec(use_fused_rmsnorm=True, use_flash_attn_triton=True, overlap_router_comm=2)
    assert len(notices) == 1
