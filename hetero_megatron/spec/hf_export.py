"""ModelSpec -> Hugging Face ``config.json``: anew, or the source's with what changed changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.hf_config import ROPE_KEYS, from_hf_config
from hetero_megatron.spec.hf_keys import DROPOUTS, HARMLESS
from hetero_megatron.spec.model_spec import ModelSpec

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
# Field of ModelSpec -> the keys of any family that say it; they are written anew, together, where the field changed.
_KEYS_OF: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "layer_types", "max_window_layers"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "activation": ("hidden_act", "activation_function"),
    "qkv_bias": ("attention_bias",),
    "out_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "tied": ("tie_word_embeddings",),
    "rope_theta": _ROPE,
    "rope_scaling": _ROPE,
    "sliding_window": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
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
    config = _changed(spec, source) if source is not None else to_hf_config(spec)
    own = _architectures(config["model_type"])
    if own[0].lower() not in [name.lower() for name in config.get("architectures") or ()]:
        config["architectures"] = own
    if dtype is not None:
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = dtype
    return config


def _architectures(family: str) -> list[str]:
    return ["GPT2LMHeadModel" if family == "gpt2" else f"{family.capitalize()}ForCausalLM"]


def _changed(spec: ModelSpec, source: Mapping[str, Any]) -> dict[str, Any]:
    """The source's config with the keys of those fields that differ in ``spec`` written anew."""
    config = dict(source)
    with suppress(UserError):  # a source that this version does not read, or a family that cannot say it
        for _ in range(2):  # a key may stand for another that is absent: twice is enough
            found = from_hf_config(config, name=spec.name)
            wanted = replace(spec, hf_model_type=found.hf_model_type)
            differ = [f.name for f in fields(ModelSpec) if getattr(found, f.name) != getattr(wanted, f.name)]
            fresh = to_hf_config(wanted)
            for key in {key for name in differ for key in _KEYS_OF.get(name, ())}:
                config.pop(key, None)
                if key in fresh:
                    config[key] = fresh[key]
        if from_hf_config(config, name=spec.name) == wanted:
            return config
    kept = {k: v for k, v in source.items() if k in HARMLESS and k not in ("model_type", "torch_dtype", "dtype")}
    return kept | to_hf_config(spec)


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` that transformers needs for this model.

    Raises:
        UserError: no Hugging Face family has this combination of features.
    """
    config = _gpt2_config(spec) if spec.naming == "gpt2" else _llama_config(spec)
    back = from_hf_config(config, where="the exported configuration", name=spec.name)
    for f in fields(ModelSpec):
        want, got = getattr(spec, f.name), getattr(back, f.name)
        if f.compare and want != got:
            raise UserError(
                f"no Hugging Face {spec.hf_model_type} model has this; it cannot be exported",
                field=f.name, value=want, accepted=repr(got),
            )  # fmt: skip
    return config


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    names = {"gelu_tanh": "gelu_new", "gelu": "gelu", "squared_relu": "relu2"}
    return {
        "model_type": "gpt2",
        "architectures": _architectures("gpt2"),
        "n_layer": spec.num_layers,
        "n_embd": spec.hidden_size,
        "n_head": spec.num_heads,
        "n_inner": spec.ffn_hidden_size,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_position_embeddings,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": names.get(spec.activation, "gelu_new"),
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        **dict.fromkeys(DROPOUTS, 0.0),
    }


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    family = spec.hf_model_type
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": _architectures(family),
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "rope_theta": spec.rope_theta,
        "initializer_range": spec.init_std,
        "attention_dropout": 0.0,
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = spec.qkv_bias and spec.out_bias
    if family == "llama":
        config["mlp_bias"] = spec.mlp_bias
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        config["rope_scaling"] = {"rope_type": scaling.kind} | {k: getattr(scaling, k) for k in ROPE_KEYS[scaling.kind]}
    if family == "mistral":
        config["sliding_window"] = spec.sliding_window
    elif family != "llama" and spec.sliding_window is not None:
        config |= {"sliding_window": spec.sliding_window, "use_sliding_window": True, "max_window_layers": 0}
    return config
