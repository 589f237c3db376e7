"""Every argument that a Megatron checkpoint may store: what says which model it is, and what may only say one thing.

Of the hundreds that say how the run trained, each that is a flag here or there is harmless by the table of flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hetero_megatron.cli.flags.parse import index
from hetero_megatron.errors import UserError
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason, is_one_of

VALUES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length",
    "max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon", "init_method_std",
)  # fmt: skip
ROTARY = ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor")
EXPERTS = (
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
SWITCHES_OF_EXPERTS = ("moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_shared_expert_gate")
SWITCHES = (
    "swiglu", "squared_relu", "openai_gelu", "quick_geglu", "add_qkv_bias", "qk_layernorm", "qk_l2_norm",
    "untie_embeddings_and_output_weights", "apply_layernorm_1p", "rotary_interleaved",
    "apply_residual_connection_post_layernorm", "attention_output_gate", "is_hybrid_model",
)  # fmt: skip
# Key-value heads in Megatron-DeepSpeed and Megatron-LLM.
_HEADS = ("num_key_value_heads", "num_attention_heads_kv")
_DROPS = ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor")
# Read in another way than the flag of the same name, or only beside another argument.
_OTHERWISE = (
    "use_rotary_position_embeddings", "group_query_attention", "num_query_groups", "use_rope_scaling",
    "rope_scaling_factor", "add_bias_linear", "bias_gelu_fusion", "window_size", "vocab_size", "tokenizer_type",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "rope_type", "add_position_embedding", "encoder_num_layers", "moe_router_load_balancing_type", *_HEADS, *_DROPS,
)  # fmt: skip
_OTHER_SWITCHES = (
    "use_rotary_position_embeddings", "group_query_attention", "use_rope_scaling", "add_bias_linear",
    "bias_gelu_fusion", "multi_latent_attention", "add_position_embedding",
)  # fmt: skip
_NONE, _OFF, _ZERO = (None,), (None, False), (None, 0, 0.0)
_ONLY: dict[str, tuple[Any, ...]] = {
    "mtp_num_layers": (None, 0), "softmax_type": (None, "vanilla"), "window_attn_skip_freq": _NONE,
    "no_rope_freq": (None, 0), "experimental_attention_variant": _NONE, "heterogeneous_layers_config_path": _NONE,
    "heterogeneous_layers_config_encoded_json": (None, ""), "spec": (None, ["local"]), "hybrid_layer_pattern": _NONE,
    "hybrid_override_pattern": _NONE, "hybrid_attention_ratio": _ZERO, "hybrid_mlp_ratio": _ZERO,
    "glu_linear_offset": _ZERO, "activation_func_clamp_value": _NONE, "moe_latent_size": _NONE,
    "moe_apply_probs_on_input": _OFF, "decoder_num_layers": _NONE,
    "vocab_extra_ids": (None, 0), "mrope_section": _NONE, "retro_add_retriever": _OFF, "onnx_safe": _OFF,
    "use_mup": _OFF, "vision_pretraining": _OFF, "moe_router_force_load_balancing": _OFF,
    "moe_router_force_biased": _NONE, "moe_mlp_glu_interleave_size": _NONE,
    "moe_shared_expert_glu_interleave_size": _NONE, "enable_hyper_connections": _OFF,
    # Of forks (Megatron-DeepSpeed, Megatron-LLM, MindSpeed): other layers, or the same by another name.
    "embed_layernorm": _OFF, "parallel_attn": _OFF, "parallel_layernorm": _OFF, "geglu": _OFF, "glu_activation": _NONE,
    "use_rms_norm": _OFF, "use_bias": (None, True), "tie_embed_logits": _NONE, "sliding_window_size": _NONE,
    "input_embeds_norm": _OFF, "scale_emb": _NONE,
    "scale_depth": _NONE, "dim_model_base": _NONE, "add_rmsnorm_offset": _OFF, "query_pre_attn_scalar": _NONE,
    "attn_logit_softcapping": _NONE, "final_logit_softcapping": _NONE, "post_norm": _OFF,
    "output_multiplier_scale": _NONE, "partial_rotary_factor": (None, 1.0), "add_lmhead_bias": _OFF,
    "first_k_dense_replace": (None, 0),
    "attention_mask_type": (None, "causal"), "cp_attention_mask_type": (None, "causal"),
    "embedding_multiplier_scale": (None, 1.0), "mlp_type": (None, "standard"),
    "square_alibi_mask": _OFF, "fill_neg_inf": _OFF, "rope_theta": _NONE, "use_glm_rope": _OFF,
}  # fmt: skip
_HARMLESS = {
    "rounding, or how the same is computed": (
        "fp32_residual_connection transformer_impl moe_router_dtype moe_layer_recompute cache_mla_latents"
        " mla_down_proj_fusion attention_backend fp8_dot_product_attention fp8_multi_head_attention"
        " activation_func_fp8_input_store fallback_to_eager_attn memory_efficient_layer_norm bias_activation_fusion"
        " moe_hybridep_pad_variable_tokens moe_ncclep_use_symm_mem cp_partition_mode cuda_graph_use_single_mempool"
        " use_mamba_mem_eff_path kv_head_repeat_before_uly_alltoall cp_window_size"
    ),
    "first values": "init_method_xavier_uniform embedding_init_method_std moe_use_upcycling moe_upcycling_granularity",
    "of training": (
        "attention_dropout hidden_dropout moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate"
        " moe_token_drop_policy moe_input_jitter_eps qk_clip qk_clip_alpha qk_clip_threshold"
    ),
    "says something only beside an argument that is refused": (
        "mtp_standalone mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern"
        " yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int"
        " yaml_cfg mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim"
        " num_residual_streams mrope_interleaved"
        " mup_attn_scale_power yarn_rotary_scaling_factor yarn_mscale yarn_mscale_all_dim"
    ),
    "what a run works out for itself": (
        "rank world_size local_rank padded_vocab_size data_parallel_size consumed_train_samples consumed_valid_samples"
        " skipped_train_samples iteration curr_iteration params_dtype variable_seq_lengths do_train do_valid do_test"
        " dataloader_type model_type transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size"
        " num_floating_point_operations_so_far perform_initialization encoder_seq_length decoder_seq_length"
        " main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype fp8_param gradient_accumulation_fusion"
        " start_weight_decay end_weight_decay ckpt_convert_format ckpt_convert_save non_persistent_save_interval"
        " accumulate_allreduce_grads_in_fp32 use_cpu_initialization async_tensor_model_parallel_allreduce"
        " start_iteration consumed_valid_tokens encoder_tensor_model_parallel_size"
        " apply_rope_fusion delay_grad_reduce scatter_gather_tensors_in_pipeline"
        " encoder_pipeline_model_parallel_size train_data_exact_num_epochs micro_batch_size global_batch_size"
    ),
}
_FAMILIES_OFF = re.compile(
    r"(csa|dsa|gdn|mhc|mok|linear|mamba|retro|retriever|bert|biencoder|ict|dino|swin|vision|inference|mtp|yarn|mup"
    r"|logits_(save|load))_.*"
)
# Words of a name that says something about the model, and of one that says how the same is computed.
_OF_MODEL = re.compile(
    r"\w*norm|alibi|attention|attn|rope|rotary|bias|activation|act|embed\w*|emb|positions?|positional|pos|scale\w*"
    r"|scaling|multiplier|softmax|softcap\w*|logits?|residual|glu|\w+glu|\w*gelu|silu|\w*relu|experts?|router|moe|heads?"
    r"|headscale|qkv?|kv|query|gate|gated|tied?|untie|window|sliding|sandwich|eps|epsilon|mlp|ffn|mla|ssm|conv"
)
_OF_EXPERTS = frozenset(("moe", "expert", "experts", "router"))
_HOW = frozenset(
    (
        "fused", "fusion", "flash", "triton", "cudnn", "kernel", "kernels", "overlap", "recompute", "checkpoint",
        "checkpointing", "log", "logging", "profile", "backend", "swap", "offload", "cache", "comm", "loss",
    )
)  # fmt: skip


def _stored_names() -> set[str]:
    """Of all flags, the names by which Megatron may store them: ``--no-load-optim`` is ``no_load_optim``,
    ``--no-masked-softmax-fusion`` is ``masked_softmax_fusion``, ``--muon-no-split-qkv`` is ``muon_split_qkv``."""
    keys = {name[2:].replace("-", "_") for name in index()}
    return keys | {re.sub(r"(^|_)(no|disable)_", r"\1", key) for key in keys}


KEYS = KeyTable(
    honoured=frozenset((*VALUES, *ROTARY, *EXPERTS, *SWITCHES_OF_EXPERTS, *SWITCHES, *_OTHERWISE)),
    fixed=_ONLY,
    harmless=by_reason(_HARMLESS)
    | dict.fromkeys(_stored_names(), "a flag that does not change what the model computes, or not alone"),
    problem="this changes the model and is not supported",
)


def with_present_names(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments by the names that flags have (``layernorm_epsilon`` is ``norm_epsilon``).

    Raises:
        UserError: an old name and the present one contradict each other.
    """
    arguments, flags = dict(stored), index()
    for old in stored:
        flag = flags.get("--" + old.replace("_", "-"))
        if flag is None or flag.key == old or flag.key not in KEYS.honoured | KEYS.fixed.keys():
            continue
        value = arguments.pop(old)
        if value is not None and arguments.get(flag.key) is not None and not is_one_of(value, (arguments[flag.key],)):
            raise UserError(
                f"{flag.key} says {arguments[flag.key]}, which is the same argument by its present name", field=old,
                value=value, where=where, accepted="one value",
            )  # fmt: skip
        if value is not None or flag.key not in arguments:
            arguments[flag.key] = value
    for old in _HEADS:
        heads, present = arguments.pop(old, None), arguments.get("num_query_groups") if _grouped(arguments) else None
        if heads is not None and present is not None and heads != present:
            problem = f"num_query_groups says {present}"
            raise UserError(problem, field=old, value=heads, where=where, accepted="one value")
        if heads is not None and heads != arguments.get("num_attention_heads"):
            arguments |= {"group_query_attention": True, "num_query_groups": heads}
    return arguments


def _grouped(stored: Mapping[str, Any]) -> bool:
    return stored.get("group_query_attention") is True


def check_stored(stored: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Notices of what nobody knows. UserError: an argument says that it is another model than is built here."""
    KEYS.check_fixed(stored, where)
    for key in (*SWITCHES, *SWITCHES_OF_EXPERTS, *_OTHER_SWITCHES):
        if not is_one_of(stored.get(key), (None, True, False)):
            raise UserError("is no switch", field=key, value=stored[key], where=where, accepted="true, false")
    if stored.get("encoder_num_layers") not in (None, stored.get("num_layers")):  # a run copies one into the other
        raise UserError(
            KEYS.problem, field="encoder_num_layers", value=stored["encoder_num_layers"], where=where,
            accepted=f"null, or num_layers ({stored.get('num_layers')})",
        )  # fmt: skip
    has_rope = stored.get("position_embedding_type") == "rope" or stored.get("use_rotary_position_embeddings") is True
    if stored.get("add_position_embedding") is False and not has_rope and "position_embedding_type" in stored:
        raise UserError(
            "a model without positions is not supported", field="add_position_embedding", value=False, where=where,
            accepted="true, or position_embedding_type rope",
        )  # fmt: skip
    balance = stored.get("moe_router_load_balancing_type")
    if stored.get("num_experts") and "sinkhorn" in (balance if isinstance(balance, list) else [balance]):
        raise UserError(
            "this router is not supported", field="moe_router_load_balancing_type", value=balance, where=where,
            accepted="none, aux_loss, seq_aux_loss, global_aux_loss",
        )  # fmt: skip
    messages = [
        f"{where}: {key} = {stored[key]}: tokens that the run dropped by it are not dropped here"
        for key in _DROPS if stored.get("num_experts") and stored.get(key) is not None
    ]  # fmt: skip
    unknown = [key for key in KEYS.unknown(stored) if not _FAMILIES_OFF.fullmatch(key) and _is_said(stored[key])]
    dense = not stored.get("num_experts")
    if of_model := [key for key in unknown if _says_which_model(key, dense)]:
        raise UserError(
            f"not known to leave the model as it is (in no table: {KEYS.named(of_model)})", field=of_model[0],
            value=stored[of_model[0]], where=where,
            accepted="arguments of Megatron-LM; null or false where it says nothing about the model",
        )  # fmt: skip
    if unknown:
        messages.append(f"{where}: not known, and taken to say nothing about the model: {KEYS.named(unknown)}")
    return tuple(messages)


def _says_which_model(key: str, dense: bool) -> bool:
    """``dense``: what is said of experts is of none."""
    words = [word for word in key.lower().split("_") if not (dense and word in _OF_EXPERTS)]
    return "alibi" in words or (any(map(_OF_MODEL.fullmatch, words)) and _HOW.isdisjoint(words))


def _is_said(value: Any) -> bool:
    """Objects of Python that a namespace holds say nothing; 0 is off."""
    return isinstance(value, bool | int | float | str | list | tuple | dict) and value not in (0, ())
