"""Hugging Face ``config.json`` <-> ModelSpec. What changes numbers and is unsupported is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.model_spec import ModelSpec, RopeScaling

Config = Mapping[str, Any]

# What transformers assumes where a config.json lacks a key; None: as many KV heads as heads, hidden / heads.
_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": None, "head_dim": None, "positions": 2048},
    "mistral": {"kv_heads": 8, "head_dim": None, "positions": 131072},
    "qwen2": {"kv_heads": 32, "head_dim": None, "positions": 32768},
    "qwen3": {"kv_heads": 32, "head_dim": 128, "positions": 32768},
}
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "squared_relu",
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_ROPE_KEYS = {
    "default": ("rope_theta", "rope_type", "type", "partial_rotary_factor"),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def from_hf_config(config: Config, where: str = "config.json", name: str | None = None) -> ModelSpec:
    """Read a Llama, Mistral, Qwen2/2.5, Qwen3 or GPT-2 configuration.

    GPT-2's default dropout of 0.1 counts as 0 and is mentioned in ``spec.notices``.

    Raises:
        UserError: an unknown family, a missing key, or a setting that changes numbers and is not supported.
    """
    family = config.get("model_type")
    read = _Reader(config, where)
    read.must_be("quantization_config", None)
    if isinstance(family, str) and family in _LLAMA_LIKE:
        return _llama_like(read, family, name or family)
    if family == "gpt2":
        return _gpt2(read, name or "gpt2")
    raise UserError(
        "this model family is not supported", field="model_type", value=family,
        accepted=", ".join((*_LLAMA_LIKE, "gpt2")), where=where,
    )  # fmt: skip


class _Reader:
    """Typed access that names key, value and file in every refusal. ``null`` counts as absent."""

    def __init__(self, config: Config, where: str, prefix: str = "") -> None:
        self.config, self.where, self.prefix = config, where, prefix

    def refuse(self, problem: str, key: str, accepted: str) -> UserError:
        value = self.config.get(key)
        return UserError(problem, field=self.prefix + key, value=value, accepted=accepted, where=self.where)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse("must be a positive integer", key, "1 or more")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refuse("must be a positive number", key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse("must be true or false", key, "true or false")
        return default if value is None else value

    def must_be(self, key: str, *accepted: Any) -> None:
        """Refuse any value of ``key`` but these (or absence)."""
        if key in self.config and self.config[key] not in accepted:
            words = " or ".join("null" if a is None else str(a).lower() for a in accepted)
            raise self.refuse("this setting changes the model and is not supported", key, words)


def _llama_like(read: _Reader, family: str, name: str) -> ModelSpec:
    defaults = _LLAMA_LIKE[family]
    read.must_be("hidden_act", "silu", "swish", None)
    read.must_be("attention_dropout", 0, None)
    read.must_be("partial_rotary_factor", 1, None)
    if family == "mistral":
        read.must_be("attention_bias", False, None)
    if family != "llama":
        read.must_be("mlp_bias", False, None)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = (
        heads
        if _is_null(read, "num_key_value_heads")
        else read.integer("num_key_value_heads", defaults["kv_heads"] or heads)
    )
    if heads % kv_heads:
        raise read.refuse(
            f"{heads} query heads cannot share them evenly", "num_key_value_heads", f"a divisor of {heads}"
        )
    head_dim = defaults["head_dim"]
    if head_dim is None and read.config.get("head_dim") is None and hidden % heads:
        raise read.refuse(
            f"does not divide hidden_size {hidden}",
            "num_attention_heads",
            f"a divisor of {hidden}, or a head_dim",
        )
    bias = read.flag("attention_bias")
    theta, scaling = _rope(read)
    return ModelSpec(
        name=name,
        naming="llama",
        num_layers=read.integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=read.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=read.integer("head_dim", head_dim or hidden // heads),
        vocab_size=read.integer("vocab_size"),
        max_position_embeddings=read.integer("max_position_embeddings", defaults["positions"]),
        norm_eps=read.positive("rms_norm_eps", 1e-6),
        qkv_bias=True if family == "qwen2" else bias,
        out_bias=False if family == "qwen2" else bias,
        mlp_bias=read.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        tied=read.flag("tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_window(read, family),
        init_std=read.positive("initializer_range", 0.02),
        hf_model_type=family,
    )


def _is_null(read: _Reader, key: str) -> bool:
    return key in read.config and read.config[key] is None


def _window(read: _Reader, family: str) -> int | None:
    if family == "llama" or _is_null(read, "sliding_window"):
        return None
    if family == "mistral":
        return read.integer("sliding_window", 4096)
    if not read.flag("use_sliding_window"):
        return None
    layers = read.integer("num_hidden_layers")
    first = read.config.get("max_window_layers", 28)
    kinds = read.config.get("layer_types")
    if kinds is None and isinstance(first, int):
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if isinstance(kinds, list) and kinds == ["full_attention"] * layers:
        return None
    if isinstance(kinds, list) and kinds == ["sliding_attention"] * layers:
        return read.integer("sliding_window", 4096)
    raise read.refuse(
        "layers with and without a sliding window cannot be mixed", "use_sliding_window",
        "false, or a window in all layers (max_window_layers 0)",
    )  # fmt: skip


def _rope(read: _Reader) -> tuple[float, RopeScaling | None]:
    """transformers < 5 writes rope_theta and rope_scaling, >= 5 one dictionary rope_parameters."""
    key = "rope_parameters" if read.config.get("rope_parameters") else "rope_scaling"
    rope = read.config.get(key) or {}
    if not isinstance(rope, dict):
        raise read.refuse("must be an object", key, 'null, or an object such as {"rope_type": "linear", "factor": 2}')
    inner = _Reader(rope, read.where, f"{key}.")
    theta = inner.positive("rope_theta", read.positive("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise inner.refuse(
            "this way of stretching rotary frequencies is not supported",
            "rope_type" if "rope_type" in rope else "type", "default, linear or llama3",
        )  # fmt: skip
    inner.must_be("partial_rotary_factor", 1, None)
    known = {*_ROPE_KEYS["default"], *_ROPE_KEYS[kind]}
    for unknown in sorted(rope.keys() - known):
        if rope[unknown] is not None and kind != "default":
            raise inner.refuse(f"unknown with rope_type {kind}", unknown, ", ".join(sorted(known)))
        if isinstance(rope[unknown], dict):
            raise inner.refuse(
                "rotary parameters per kind of layer are not supported",
                unknown,
                "one rope_type for all layers",
            )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", inner.positive("factor"))
    original = inner.integer("original_max_position_embeddings", read.integer("max_position_embeddings"))
    factor, low, high = (inner.positive(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    return theta, RopeScaling("llama3", factor, low, high, original)


def _gpt2(read: _Reader, name: str) -> ModelSpec:
    read.must_be("scale_attn_weights", True)
    read.must_be("scale_attn_by_inverse_layer_idx", False)
    read.must_be("reorder_and_upcast_attn", False)
    read.must_be("add_cross_attention", False)
    for key in _DROPOUTS:
        read.must_be(key, 0, 0.1, None)
    dropped = [key for key in _DROPOUTS if read.config.get(key, 0.1)]
    activation = read.config.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise read.refuse("this activation is not supported", "activation_function", ", ".join(_ACTIVATIONS))
    hidden, heads = read.integer("n_embd"), read.integer("n_head")
    if hidden % heads:
        raise read.refuse(f"does not divide n_embd {hidden}", "n_head", f"a divisor of {hidden}")
    return ModelSpec(
        name=name,
        naming="gpt2",
        num_layers=read.integer("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=read.integer("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=read.integer("vocab_size"),
        max_position_embeddings=read.integer("n_positions", 1024),
        norm="layer",
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=read.flag("tie_word_embeddings", True),
        position="learned",
        init_std=read.positive("initializer_range", 0.02),
        hf_model_type="gpt2",
        notices=(f"{read.where}: trained without dropout ({', '.join(dropped)} = 0.1 ignored)",) if dropped else (),
    )


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
        "architectures": ["GPT2LMHeadModel"],
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
        **dict.fromkeys(_DROPOUTS, 0.0),
    }


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    family = spec.hf_model_type
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
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
        config["rope_scaling"] = {"rope_type": scaling.kind} | {
            k: getattr(scaling, k) for k in _ROPE_KEYS[scaling.kind]
        }
    if family == "mistral":
        config["sliding_window"] = spec.sliding_window
    elif family != "llama" and spec.sliding_window is not None:
        config |= {"sliding_window": spec.sliding_window, "use_sliding_window": True, "max_window_layers": 0}
    return config
