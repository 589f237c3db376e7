"""Mistral and Ministral: Llama with a sliding window, in all layers or (Ministral) in some; Ministral 3: with queries
that grow with their position."""

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
from hetero_megatron.spec.hf_rope import rope_object
from hetero_megatron.spec.model_spec import ModelSpec

_MISTRAL = Defaults(positions=131072, kv_heads=8, kv_nullable=False, head_dim_nullable=True)
_MINISTRAL = Defaults(positions=131072, kv_heads=8, kv_nullable=False)
_MINISTRAL3 = Defaults(positions=262144, kv_heads=8, kv_nullable=False, head_dim=128, eps=1e-5, theta=1e6)
_YARN = {  # of a Ministral 3 without rope_parameters
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
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


def _read_ministral3(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    key = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    entry = read.config.get(key)
    rope = ConfigReader(_YARN if entry is None else entry if isinstance(entry, dict) else {}, read.where, f"{key}.")
    beta, length = rope.positive("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings")
    rope.must_be("max_position_embeddings", read.value("max_position_embeddings", _MINISTRAL3.positions))
    scaling_keys = {"llama_4_scaling_beta", "max_position_embeddings"}
    if rope.value("rope_type", rope.value("type", "default")) == "default":
        scaling_keys.add("original_max_position_embeddings")
    other_keys = {k: v for k, v in read.config.items() if k not in ("rope_scaling", "rope_parameters")}
    other_keys["rope_parameters"] = {k: v for k, v in rope.config.items() if k not in scaling_keys}
    window = None if read.value("sliding_window", None) is None else read.integer("sliding_window")
    return decoder(
        ConfigReader(other_keys, read.where, read.prefix), "ministral3", name, _MINISTRAL3, windows=(window,),
        query_growth=beta, query_growth_length=length,
    )  # fmt: skip


def _write_ministral3(spec: ModelSpec) -> dict[str, Any]:
    config = silu_config(spec) | {"sliding_window": spec.windows[0]}
    for key in ("rope_theta", "rope_scaling"):
        config.pop(key, None)
    rope = {"original_max_position_embeddings": spec.query_growth_length} | rope_object(spec.ropes[0])
    return config | {"rope_parameters": rope | {"llama_4_scaling_beta": spec.query_growth}}


MISTRAL = Family(
    "mistral", "MistralForCausalLM", _KEYS, _read_mistral, _write_mistral, examples="Mistral 7B v0.1, v0.3"
)
MINISTRAL = Family(
    "ministral", "MinistralForCausalLM", _KEYS, _read_ministral, _write_ministral, examples="Ministral 8B"
)
MINISTRAL3 = Family(
    "ministral3", "Ministral3ForCausalLM", DECODER_KEYS | words("hidden_act sliding_window"), _read_ministral3,
    _write_ministral3, examples="the text model of Ministral 3 3B, 8B, 14B",
)  # fmt: skip
