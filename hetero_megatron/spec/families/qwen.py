"""Qwen2, Qwen2.5 and Qwen3, with windows in all layers, in some, or in none."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    SLIDING,
    Defaults,
    Family,
    decoder,
    layer_type_config,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_QWEN2 = Defaults(positions=32768, kv_heads=32)
_QWEN3 = Defaults(positions=32768, kv_heads=32, head_dim=128)
_KEYS = DECODER_KEYS | words(
    "hidden_act attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types"
)


def qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """The window of every layer."""
    window, layers = None, num_layers(read)
    uses_window = read.flag("use_sliding_window")
    if read.value("sliding_window", 0) is not None:
        size = read.integer("sliding_window", 4096, least=1 if uses_window else 0)
        window = size if uses_window else None
    first = layers if window is None else read.integer("max_window_layers", 28, least=0)
    default = ([FULL] * first + [SLIDING] * layers)[:layers]
    return tuple(window if kind == SLIDING else None for kind in layer_types(read, default, window))


def _fixed(read: ConfigReader) -> None:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("mlp_bias", False, None)


def _read_qwen2(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.flag("attention_bias")  # transformers reads it not: queries, keys and values have biases
    return decoder(read, "qwen2", name, _QWEN2, windows=qwen_windows(read), qkv_bias=True)


def _read_qwen3(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    bias = read.flag("attention_bias")
    return decoder(
        read, "qwen3", name, _QWEN3, windows=qwen_windows(read), qkv_bias=bias, out_bias=bias, qk_norm="head"
    )


def window_config(spec: ModelSpec) -> dict[str, Any]:
    """The keys that :func:`qwen_windows` reads."""
    if spec.windows == (None,):
        return {}
    return {"use_sliding_window": True, "max_window_layers": 0} | layer_type_config(spec)


def _write_qwen2(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | window_config(spec)


def _write_qwen3(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | window_config(spec) | {"attention_bias": spec.qkv_bias and spec.out_bias}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _KEYS, _read_qwen2, _write_qwen2, examples="Qwen2, Qwen2.5")
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _KEYS, _read_qwen3, _write_qwen3, examples="Qwen3 0.6B to 32B")
