"""Mistral and Ministral: Llama with a sliding window, in all layers or (Ministral) in some."""

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
from hetero_megatron.spec.hf_keys import words
from hetero_megatron.spec.hf_reader import ConfigReader
from hetero_megatron.spec.model_spec import ModelSpec

_MISTRAL = Defaults(positions=131072, kv_heads=8, kv_nullable=False, head_dim_nullable=True)
_MINISTRAL = Defaults(positions=131072, kv_heads=8, kv_nullable=False)
_KEYS = DECODER_KEYS | words(
    "hidden_act attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types"
)


def _fixed(read: ConfigReader) -> None:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("attention_bias", False, None)
    read.must_be("mlp_bias", False, None)


def _window(read: ConfigReader) -> int | None:
    return None if read.value("sliding_window", 0) is None else read.integer("sliding_window", 4096)


def _read_mistral(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    window = _window(read)
    read.must_be("use_sliding_window", window is not None, None)
    kind = FULL if window is None else SLIDING
    if read.value("layer_types", None) not in (None, [kind] * num_layers(read)):
        raise read.refuse("is not read by transformers for this family", "layer_types", f"{kind} in every layer")
    return decoder(read, "mistral", name, _MISTRAL, windows=(window,))


def _write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {"sliding_window": spec.windows[0]}


def _read_ministral(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.integer("head_dim")  # without it transformers has none
    window = read.integer("sliding_window", 4096)  # transformers asks for one, even where no layer uses it
    kinds = layer_types(read, [SLIDING] * num_layers(read), window)
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return decoder(read, "ministral", name, _MINISTRAL, windows=windows)


def _write_ministral(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | layer_type_config(spec, unused=4096)


MISTRAL = Family(
    "mistral", "MistralForCausalLM", _KEYS, _read_mistral, _write_mistral, examples="Mistral 7B v0.1, v0.3"
)
MINISTRAL = Family(
    "ministral", "MinistralForCausalLM", _KEYS, _read_ministral, _write_ministral, examples="Ministral 8B"
)
