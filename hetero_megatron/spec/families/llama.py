"""Llama; and Llama but for an activation, a bias or the order of rotary pairs: Arcee, Seed-OSS, Helium, ERNIE 4.5."""

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

_LLAMA = Defaults(positions=2048, head_dim_nullable=True)
_ARCEE = Defaults(positions=4096, eps=1e-5, head_dim_nullable=True)
_SEED_OSS = Defaults(positions=524288, kv_heads=8, head_dim=128)
_HELIUM = Defaults(positions=4096, kv_heads=20, kv_nullable=False, head_dim=128, eps=1e-8, theta=1e5)
_ERNIE = Defaults(positions=131072, kv_heads=2, head_dim=128, eps=1e-5, tied=True, theta=5e5)
_KEYS = DECODER_KEYS | words("hidden_act attention_bias mlp_bias")


def _read_llama(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    head_sizes(read, _LLAMA, divides=True)
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
        read, "llama", name, _LLAMA, qkv_bias=bias, out_bias=bias, mlp_bias=read.flag("mlp_bias")
    )


def _write_llama(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {"attention_bias": spec.qkv_bias and spec.out_bias, "mlp_bias": spec.mlp_bias}


def _read_arcee(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "relu2")
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if hidden % heads:
        raise read.refuse(f"does not divide hidden_size {hidden}", "num_attention_heads", f"a divisor of {hidden}")
    bias = read.flag("attention_bias")
    return decoder(
        read, "arcee", name, _ARCEE, activation="squared_relu", qkv_bias=bias, out_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
    )  # fmt: skip


def _write_arcee(spec: ModelSpec) -> dict[str, Any]:
    bias = spec.qkv_bias and spec.out_bias
    return silu_config(spec) | {"hidden_act": "relu2", "attention_bias": bias, "mlp_bias": spec.mlp_bias}


def _read_seed_oss(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    return decoder(
        read, "seed_oss", name, _SEED_OSS, qkv_bias=read.flag("attention_bias", True),
        out_bias=read.flag("attention_out_bias"), mlp_bias=read.flag("mlp_bias"),
    )  # fmt: skip


def _write_seed_oss(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {
        "attention_bias": spec.qkv_bias, "attention_out_bias": spec.out_bias, "mlp_bias": spec.mlp_bias,
        "residual_dropout": 0.0,
    }  # fmt: skip


def _read_helium(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    heads, _, head_dim = head_sizes(read, _HELIUM)
    if heads * head_dim != read.integer("hidden_size"):  # of its output projection
        raise read.refuse("transformers wants hidden_size / num_attention_heads", "head_dim", "that quotient")
    return decoder(
        read, "helium", name, _HELIUM, interleaved=True, qkv_bias=read.flag("attention_bias"),
        mlp_bias=read.flag("mlp_bias"),
    )  # fmt: skip


def _write_helium(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def _read_ernie(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    bias = read.value("use_bias", False)
    if not isinstance(bias, bool):
        raise read.refuse("must be true or false", "use_bias", "true or false")
    return decoder(
        read, "ernie4_5", name, _ERNIE, interleaved=True, qkv_bias=bias, out_bias=bias, mlp_bias=bias
    )


def _write_ernie(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {"use_bias": spec.qkv_bias and spec.out_bias and spec.mlp_bias}


LLAMA = Family(
    "llama", "LlamaForCausalLM", read=_read_llama, write=_write_llama, null_dropout=True,
    examples="Llama 1 to 3.3, and what copies it",
    keys=DECODER_KEYS | words(
        "hidden_act attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types"
    ),
)  # fmt: skip
ARCEE = Family("arcee", "ArceeForCausalLM", _KEYS, _read_arcee, _write_arcee, examples="AFM-4.5B")
SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM", _KEYS | words("attention_out_bias residual_dropout"), _read_seed_oss,
    _write_seed_oss, examples="Seed-OSS-36B", absent_dropout=0.1,
)  # fmt: skip
HELIUM = Family("helium", "HeliumForCausalLM", _KEYS, _read_helium, _write_helium, examples="Helium-1 2B")
ERNIE = Family(
    "ernie4_5", "Ernie4_5ForCausalLM", DECODER_KEYS | words("hidden_act use_bias"), _read_ernie, _write_ernie,
    examples="ERNIE 4.5 0.3B",
)  # fmt: skip
