"""Llama."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    Defaults,
    Family,
    decoder,
    head_sizes,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_DEFAULTS = Defaults(positions=2048, head_dim_nullable=True)


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    head_sizes(read, _DEFAULTS, divides=True)
    bias, init_std = read.flag("attention_bias"), read.positive("initializer_range", 0.02)
    if init_std > 1:
        raise read.refuse("must be at most 1 for transformers", "initializer_range", "0 to 1")
    read.must_be("sliding_window", None)
    read.must_be("use_sliding_window", False, None)
    if read.value("layer_types", None) not in (None, ["full_attention"] * num_layers(read)):
        raise read.refuse(
            "is not read by transformers for this family", "layer_types", "full_attention in every layer"
        )
    return decoder(
        read, "llama", name, _DEFAULTS, qkv_bias=bias, out_bias=bias, mlp_bias=read.flag("mlp_bias")
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {"attention_bias": spec.qkv_bias and spec.out_bias, "mlp_bias": spec.mlp_bias}


FAMILY = Family(
    "llama", "LlamaForCausalLM", read=_read, write=_write, null_dropout=True,
    examples="Llama 1 to 3.3, and what copies it",
    keys=DECODER_KEYS | words(
        "hidden_act attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types"
    ),
)  # fmt: skip
