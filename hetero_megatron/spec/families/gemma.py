"""Gemma, Gemma 2, and Gemma 3's text models: weights 1 + w, scaled embedding; from 2 on norms before and after, and
alternating windows."""

from __future__ import annotations

import math
from typing import Any

from hetero_megatron.spec.families.family import (
    ACTIVATIONS,
    DECODER_KEYS,
    FULL,
    SLIDING,
    Defaults,
    Family,
    decoder,
    decoder_config,
    head_sizes,
    layer_type_config,
    layer_types,
    num_layers,
)
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope, ropes_by_kind, write_rope, write_ropes_by_kind
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_GEMMA = Defaults(positions=8192, kv_heads=16, kv_nullable=False, head_dim=256, tied=True)
_GEMMA2 = Defaults(positions=8192, kv_heads=4, kv_nullable=False, head_dim=256, tied=True)
_GEMMA3 = Defaults(positions=131072, kv_heads=4, kv_nullable=False, head_dim=256, tied=True)
_THETA = {FULL: 1e6, SLIDING: 1e4}
_GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
_NAMES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
_KEYS = DECODER_KEYS | words(
    "hidden_activation hidden_act query_pre_attn_scalar sliding_window layer_types attention_bias"
    " final_logit_softcapping attn_logit_softcapping use_bidirectional_attention"
)


def _read_gemma(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("use_bidirectional_attention", False, None)
    act_name = read.value("hidden_act", "gelu_pytorch_tanh")
    act_name = "gelu_pytorch_tanh" if act_name == "gelu" else act_name  # of old files, which mean the approximation
    activation = _GATES.get(ACTIVATIONS.get(act_name, act_name)) if isinstance(act_name, str) else None
    if activation is None:
        raise read.refuse("this activation is not supported", "hidden_act", "gelu_pytorch_tanh, gelu, silu")
    read.must_be("hidden_activation", act_name, "gelu", None)  # not read by transformers
    bias = read.flag("attention_bias")
    return decoder(
        read, "gemma", name, _GEMMA, norm_offset=1.0, activation=activation, qkv_bias=bias, out_bias=bias,
        embed_scale=math.sqrt(read.integer("hidden_size")),
    )  # fmt: skip


def _write_gemma(spec: ModelSpec) -> dict[str, Any]:
    return decoder_config(spec) | write_rope(spec) | {
        "head_dim": spec.head_dim, "hidden_act": _NAMES.get(spec.activation, spec.activation),
        "attention_bias": spec.qkv_bias and spec.out_bias,
    }  # fmt: skip


def _common(read: ConfigReader, defaults: Defaults) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 say alike."""
    read.must_be("use_bidirectional_attention", False, None)
    act_name = read.value("hidden_activation", "gelu_pytorch_tanh")
    activation = _GATES.get(ACTIVATIONS.get(act_name, act_name)) if isinstance(act_name, str) else None
    if activation is None:
        raise read.refuse("this activation is not supported", "hidden_activation", "gelu_pytorch_tanh, gelu, silu")
    read.must_be("hidden_act", act_name)  # not read by transformers
    head_dim = head_sizes(read, defaults, divides=True)[2]
    scalar = read.integer("query_pre_attn_scalar", 256)
    bias = read.flag("attention_bias")
    return {
        "norm_placement": "pre_post", "norm_offset": 1.0, "activation": activation, "qkv_bias": bias,
        "out_bias": bias, "embed_scale": math.sqrt(read.integer("hidden_size")),
        "attn_scale": None if scalar == head_dim else scalar**-0.5,
    }  # fmt: skip


def _write(spec: ModelSpec) -> dict[str, Any]:
    scalar = spec.head_dim if spec.attn_scale is None else round(spec.attn_scale**-2)
    return decoder_config(spec) | layer_type_config(spec, unused=4096) | {
        "head_dim": spec.head_dim, "hidden_activation": _NAMES.get(spec.activation, spec.activation),
        "query_pre_attn_scalar": scalar, "attention_bias": spec.qkv_bias and spec.out_bias,
        "final_logit_softcapping": spec.logit_softcap,
    }  # fmt: skip


def _read_gemma2(read: ConfigReader, name: str) -> ModelSpec:
    window = read.integer("sliding_window", 4096)
    kinds = layer_types(read, [FULL if i % 2 else SLIDING for i in range(num_layers(read))], window)
    head_dim, positions = head_sizes(read, _GEMMA2)[2], read.integer("max_position_embeddings", _GEMMA2.positions)
    rope, _ = read_rope(read, head_dim, positions)
    return decoder(
        read, "gemma2", name, _GEMMA2, **_common(read, _GEMMA2),
        layer_kinds=tuple(LayerKind(window if kind == SLIDING else None, rope) for kind in kinds),
        attn_softcap=read.optional("attn_logit_softcapping", 50.0),
        logit_softcap=read.optional("final_logit_softcapping", 30.0),
    )  # fmt: skip


def _write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    return _write(spec) | write_rope(spec) | {"attn_logit_softcapping": spec.attn_softcap}


def _read_gemma3(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("attn_logit_softcapping", None)  # transformers has the key and does not use it
    if read.value("layer_types", None) is None:  # beside which transformers does not read it
        read.must_be("_sliding_window_pattern", 6, None)
    window, layers = read.integer("sliding_window", 4096), num_layers(read)
    pattern = read.integer("sliding_window_pattern", 6)
    kinds = layer_types(read, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)], window)
    head_dim, positions = head_sizes(read, _GEMMA3)[2], read.integer("max_position_embeddings", _GEMMA3.positions)
    theta = {FULL: read.positive("rope_theta", _THETA[FULL]), SLIDING: read.positive("rope_local_base_freq", 1e4)}
    ropes = ropes_by_kind(read, head_dim, positions, theta)
    return decoder(
        read, "gemma3_text", name, _GEMMA3, **_common(read, _GEMMA3), qk_norm="head",
        layer_kinds=tuple(LayerKind(window if kind == SLIDING else None, ropes[kind]) for kind in kinds),
        logit_softcap=read.optional("final_logit_softcapping"),
    )  # fmt: skip


def _write_gemma3(spec: ModelSpec) -> dict[str, Any]:
    return _write(spec) | write_ropes_by_kind(spec, _THETA)


GEMMA = Family(
    "gemma", "GemmaForCausalLM", read=_read_gemma, write=_write_gemma, examples="Gemma 2B, 7B, CodeGemma",
    keys=DECODER_KEYS | words("hidden_act hidden_activation attention_bias use_bidirectional_attention"),
)  # fmt: skip
GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", _KEYS, _read_gemma2, _write_gemma2, examples="Gemma 2 2B, 9B, 27B",
    null_dropout=True,
)  # fmt: skip
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", read=_read_gemma3, write=_write_gemma3,
    examples="Gemma 3 270M, 1B; the text model of larger ones",
    keys=_KEYS | words("rope_local_base_freq sliding_window_pattern _sliding_window_pattern"), null_dropout=True,
)  # fmt: skip
