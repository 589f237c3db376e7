"""Nemotron-H and Nemotron 3: every layer is Mamba-2, attention without positions, an MLP, or a mixture of experts
without gates, one of them alone, behind one norm."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    FULL,
    LINEAR,
    Defaults,
    Family,
    activation_name,
    decoder,
    decoder_config,
    read_activation,
)
from hetero_megatron.spec.families.mamba_hybrids import fused_in, groups_serve_heads
from hetero_megatron.spec.families.mixtral import read_moe
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import ROPE_KEYS
from hetero_megatron.spec.model_spec import MAX_LAYERS, LayerKind, ModelSpec
from hetero_megatron.spec.moe import MoE
from hetero_megatron.spec.state_space import StateSpace

_DEFAULTS = Defaults(positions=4096, kv_heads=8, kv_nullable=False, head_dim=128, eps=1e-5)
_SIZES = {  # key of config.json -> field of StateSpace, and what an absent one means
    "mamba_num_heads": ("value_heads", 128), "n_groups": ("key_heads", 8), "ssm_state_size": ("key_dim", 128),
    "mamba_head_dim": ("value_dim", 64), "conv_kernel": ("kernel", 4),
}  # fmt: skip
_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
_TYPES = {kind: kind for kind in _LETTERS.values()} | {"mamba": LINEAR, "attention": FULL}  # the last two are older
_KINDS = {
    LINEAR: LayerKind(rope=None, mlp="none", mixer="mamba2"), FULL: LayerKind(rope=None, mlp="none"),
    _MLP: LayerKind(rope=None, mixer="none"), _EXPERTS: LayerKind(rope=None, mlp="moe", mixer="none"),
}  # fmt: skip


def _types(read: ConfigReader) -> list[str]:
    """Of every layer; ``layers_block_type`` counts before ``hybrid_override_pattern``, as in transformers."""
    listed = "layer_types" if read.config.get("layers_block_type") is None else "layers_block_type"
    types, pattern = read.value(listed, None, nullable=True), read.value("hybrid_override_pattern", None, nullable=True)
    if types is None:
        valid = isinstance(pattern, str) and bool(pattern) and all(letter in _LETTERS for letter in pattern)
        if not valid:
            accepted = "layers_block_type, or a letter for each layer: M (Mamba-2), * (attention), - (MLP), E (experts)"
            raise read.refuse("does not say what the layers are", "hybrid_override_pattern", accepted)
        key, types = "hybrid_override_pattern", [_LETTERS[letter] for letter in pattern]
    else:
        key = listed
        if not isinstance(types, list) or not types or not all(isinstance(x, str) and x in _TYPES for x in types):
            accepted = ", ".join(f'"{kind}"' for kind in _LETTERS.values()) + " for every layer"
            raise read.refuse("does not say what the layers are", key, accepted)
        types = [_TYPES[x] for x in types]
    if len(types) > MAX_LAYERS:
        raise read.refuse(f"has {len(types)} layers", key, f"at most {MAX_LAYERS}")
    if read.config.get("num_hidden_layers") not in (None, len(types)):
        raise read.refuse(f"{key} names {len(types)}", "num_hidden_layers", f"{len(types)}, or null")
    return types


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("mamba_hidden_act", "silu", "swish")
    read.must_be("attention_bias", False)  # transformers' projections of attention have none
    read.must_be("tie_word_embeddings", False)  # transformers does not tie them
    read.must_be("residual_in_fp32", False)
    read.must_be("sliding_window", None)
    read.must_be("num_nextn_predict_layers", 0)
    head_dim, eps = read.integer("head_dim", 128), read.positive("layer_norm_epsilon", 1e-5)
    read.must_be("attention_head_dim", head_dim, None)
    for key in ("rms_norm_eps", "norm_eps"):  # beside it in released files
        read.must_be(key, eps, None)
    types = _types(read)
    return decoder(
        ConfigReader({"intermediate_size": 21504, **read.config, "num_hidden_layers": len(types)}, read.where,
                     read.prefix),
        "nemotron_h", name, _DEFAULTS, norm_eps=eps, activation=read_activation(read, "mlp_hidden_act", "relu2"),
        mlp_bias=read.flag("mlp_bias"), layer_kinds=tuple(_KINDS[kind] for kind in types),
        delta=_state_space(read, eps) if LINEAR in types else None, moe=_experts(read) if _EXPERTS in types else None,
    )  # fmt: skip


def _experts(read: ConfigReader) -> MoE:
    """There is one MLP that all tokens share, whatever ``n_shared_experts``, as in transformers."""
    if read.value("mlp_hidden_act", "relu2") != "relu2":
        raise read.refuse("not known of experts without gates", "mlp_hidden_act", "relu2")
    if read.value("moe_latent_size", None) is not None:
        raise read.refuse("experts behind projections to fewer features are not supported", "moe_latent_size", "null")
    read.must_be("num_local_experts", read.config.get("n_routed_experts"))  # the same by another name
    defaults = ConfigReader({"n_routed_experts": 8, "num_experts_per_tok": 2, **read.config}, read.where, read.prefix)
    return read_moe(
        defaults, "n_routed_experts", ffn_hidden_size=read.integer("moe_intermediate_size", 7688),
        shared_ffn=read.integer("moe_shared_expert_intermediate_size", 7688), score="sigmoid", score_bias=True,
        normalize=read.flag("norm_topk_prob", True), scale=read.positive("routed_scaling_factor", 1.0),
        groups=read.integer("n_group", 1), top_groups=read.integer("topk_group", 1), group_size=2,
    )  # fmt: skip


def _state_space(read: ConfigReader, eps: float) -> StateSpace:
    """transformers keeps to ``time_step_min`` as the least step size, and to no most one, whatever
    ``time_step_limit``."""
    sizes: dict[str, Any] = {field: read.integer(key, absent) for key, (field, absent) in _SIZES.items()}
    groups_serve_heads(read, "n_groups", sizes["key_heads"], sizes["value_heads"])
    return StateSpace(
        **sizes, norm_eps=eps, conv_bias=read.flag("use_conv_bias", True), proj_bias=read.flag("use_bias"),
        step_limits=(read.positive("time_step_min", 0.001), None),
    )  # fmt: skip


def _write(spec: ModelSpec) -> dict[str, Any]:
    config, delta = decoder_config(spec), spec.delta
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    name_of = {kind.shape(spec.head_dim): name for name, kind in _KINDS.items()}
    types = [name_of[kind.shape(spec.head_dim)] for kind in spec.layers]
    letter = {kind: letter for letter, kind in _LETTERS.items()}
    config |= {
        "head_dim": spec.head_dim, "layers_block_type": types, "mlp_bias": spec.mlp_bias,
        "hybrid_override_pattern": "".join(letter[kind] for kind in types), "mlp_hidden_act": activation_name(spec),
    }  # fmt: skip
    if (moe := spec.moe) is not None:
        config |= {
            "n_routed_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "n_shared_experts": 1,
            "moe_intermediate_size": moe.ffn_hidden_size, "moe_shared_expert_intermediate_size": moe.shared_ffn,
            "norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.scale, "n_group": moe.groups,
            "topk_group": moe.top_groups,
        }  # fmt: skip
    if not isinstance(delta, StateSpace):
        return config
    return config | {key: getattr(delta, field) for key, (field, _) in _SIZES.items()} | {
        "use_conv_bias": delta.conv_bias, "use_bias": delta.proj_bias, "time_step_min": delta.step_limits[0],
    }  # fmt: skip


_COLUMNS = ("up", "down")
FAMILY = Family(
    "nemotron_h", "NemotronHForCausalLM", read=_read, write=_write,
    examples="Nemotron-H 8B, 47B, 56B, Nemotron Nano 9B and 12B v2, Nemotron 3 Nano", dense_form=True,
    # What is of positions, first values, kernels or a most step size, transformers does not use here.
    keys=frozenset(_SIZES) | frozenset(ROPE_KEYS) | words(
        "architectures auto_map hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        " intermediate_size vocab_size max_position_embeddings initializer_range tie_word_embeddings attention_dropout"
        " attention_bias attention_head_dim layer_norm_epsilon rms_norm_eps norm_eps layers_block_type layer_types"
        " hybrid_override_pattern mlp_hidden_act mlp_bias mamba_hidden_act mamba_proj_bias use_bias use_conv_bias"
        " residual_in_fp32 sliding_window hidden_dropout num_logits_to_keep rescale_prenorm_residual chunk_size expand"
        " use_mamba_kernels mamba_ssm_cache_dtype time_step_min time_step_max time_step_floor time_step_limit"
        " time_step_rank num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern"
        " n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size"
        " moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob"
        " output_router_logits num_local_experts"
    ),
    names=NameTable(
        layer="backbone.layers.{}",
        modules={
            "input_layernorm": "norm",
            **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
            **{f"mlp.{name}_proj": f"mixer.{name}_proj" for name in _COLUMNS},
            **{f"mlp.experts.{{}}.{name}_proj": f"mixer.experts.{{}}.{name}_proj" for name in _COLUMNS},
            **{f"mlp.shared_expert.{name}_proj": f"mixer.shared_experts.{name}_proj" for name in _COLUMNS},
            **{f"mlp.{name}": f"mixer.{name}" for name in ("gate", "gate.e_score_correction_bias")},
            **{f"linear_attn.{name}": f"mixer.{name}" for name in ("A_log", "dt_bias", "D", "norm")},
            "linear_attn.o_proj": "mixer.out_proj",
        },
        fused=fused_in("mixer"),
        filters=frozenset({"mixer.conv1d"}), otherwise={"backbone.": "model."},
        loaded={"backbone.": "model."}, experts_in="mixer", unadapted=frozenset({"mixer.out_proj"}),
        outside={
            "model.embed_tokens.weight": "backbone.embeddings.weight", "model.norm.weight": "backbone.norm_f.weight",
        },
    ),
)  # fmt: skip
