"""ModelSpec -> Hugging Face ``config.json``: anew, or the source's with what changed changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.families.deepseek import PREDICTION_KEYS
from hetero_megatron.spec.hf_config import from_hf_config, language_config
from hetero_megatron.spec.hf_reader import HARMLESS
from hetero_megatron.spec.hf_rope import ROPE_KEYS
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.quantised import KEY, method_of

# Field of ModelSpec -> the keys of any family that say it; they are written anew, together, where the field changed.
_KEYS_OF: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "layer_types", "max_window_layers"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_hidden_size", "ff_factor"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query", "new_decoder_architecture"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layer_norm_eps"),
    "parallel_block": (
        "use_parallel_residual", "parallel_attn", "new_decoder_architecture", "num_ln_in_parallel_attn",
    ),
    "swiglu_alpha": ("swiglu_alpha",),
    "swiglu_limit": ("swiglu_limit",),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "qkv_bias": ("attention_bias", "use_bias", "use_qkv_bias", "bias"),
    "out_bias": ("attention_bias", "attention_out_bias", "use_bias", "bias"),
    "mlp_bias": ("mlp_bias", "use_bias", "bias"),
    "tied": ("tie_word_embeddings",),
    "mtp_layers": PREDICTION_KEYS,
    "layer_kinds": (
        *ROPE_KEYS, "rope_local_base_freq", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
        "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval",
        "attention_chunk_size", "moe_layers", "interleave_moe_layer_step",
        "rotary_dim", "rotary_pct", "rotary_emb_base", "layer_switch",
    ),
    "embed_scale": ("embedding_multiplier", "hidden_size"),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_scale": ("attention_multiplier", "query_pre_attn_scalar"),
    "query_growth": (*ROPE_KEYS, "attn_temperature_tuning", "attn_scale"),
    "query_growth_length": (*ROPE_KEYS, "floor_scale"),
    "qk_norm": ("use_qk_norm", "qk_layernorm"),
    "attn_softcap": ("attn_logit_softcapping",),
    "logit_softcap": ("final_logit_softcapping",),
    "init_std": ("initializer_range",),
}


def export_config(spec: ModelSpec, source: Mapping[str, Any] | None, dtype: str | None = None) -> dict[str, Any]:
    """The ``config.json`` to write for ``spec``: that of ``source`` where it says the same, else what says it.

    Args:
        source: the config.json that the weights, or the model, came with; None: there was none.
        dtype: of the files, e.g. ``bfloat16``; None: as in the source.

    Raises:
        UserError: no Hugging Face family has this combination of features.
    """
    spec = exported_model(spec)
    config = _changed(spec, language_config(source)) if source is not None else to_hf_config(spec)
    if method_of(config) is not None:
        del config[KEY]  # the files hold what was dequantised
    class_names = [FAMILIES[config["model_type"]].causal_lm]
    if class_names[0].lower() not in [name.lower() for name in config.get("architectures") or ()]:
        config["architectures"] = class_names
    if dtype is not None:
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = dtype
    return config


def predicts(spec: ModelSpec) -> bool:
    """Whether configurations of the family say how many layers predict further tokens, so that files may have them."""
    return PREDICTION_KEYS[1] in FAMILIES[spec.hf_model_type].keys


def exported_model(spec: ModelSpec) -> ModelSpec:
    """What an export is of: without layers that predict further tokens where the family has none."""
    return spec if not spec.mtp_layers or predicts(spec) else replace(spec, mtp_layers=0)


def _with_all(config: Mapping[str, Any], name: str, where: str = "config.json") -> ModelSpec:
    """What ``config`` says, with its layers that predict further tokens."""
    spec = from_hf_config(config, where=where, name=name)
    return replace(spec, mtp_layers=spec.mtp_said) if spec.mtp_said else spec


def _changed(spec: ModelSpec, source: Mapping[str, Any]) -> dict[str, Any]:
    """The source's config with the keys of those fields that differ in ``spec`` written anew."""
    config = dict(source)
    with suppress(UserError):  # a source that this version does not read, or a family that cannot say it
        for _ in range(2):  # a key may stand for another that is absent: twice is enough
            source_spec = _with_all(config, spec.name)
            wanted_spec = replace(spec, hf_model_type=source_spec.hf_model_type)
            changed = [
                f.name for f in fields(ModelSpec) if getattr(source_spec, f.name) != getattr(wanted_spec, f.name)
            ]
            new_config = to_hf_config(wanted_spec)
            for key in {key for name in changed for key in _KEYS_OF.get(name, ())}:
                config.pop(key, None)
                if key in new_config:
                    config[key] = new_config[key]
        if _with_all(config, spec.name) == wanted_spec:
            return config
    harmless = {k: v for k, v in source.items() if k in HARMLESS and k not in ("model_type", "torch_dtype", "dtype")}
    return harmless | to_hf_config(spec)


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` that transformers needs for this model.

    Raises:
        UserError: no Hugging Face family has this combination of features.
    """
    family = FAMILIES.get(spec.hf_model_type)
    assert family is not None, spec.hf_model_type
    if family.mixture and spec.moe is None and not family.dense_form:
        raise UserError(
            f"every Hugging Face {spec.hf_model_type} model is a mixture of experts; it cannot be exported",
            field="moe", value=None, accepted="a model with experts",
        )  # fmt: skip
    config = {"model_type": family.model_type, "architectures": [family.causal_lm]} | family.write(spec)
    spec_back = _with_all(config, spec.name, "the exported configuration")
    for f in fields(ModelSpec):
        want, value_back = getattr(spec, f.name), getattr(spec_back, f.name)
        if f.compare and want != value_back:
            raise UserError(
                f"no Hugging Face {spec.hf_model_type} model has this; it cannot be exported",
                field=f.name, value=want, accepted=repr(value_back),
            )  # fmt: skip
    return config
