"""OLMo 2 and 3: norms after attention and MLP, queries and keys normalised over the whole projection; OLMo 3 has
windows in three of four layers."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
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
    silu_config,
)
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import ropes_by_kind, write_ropes_by_kind
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_DEFAULTS = Defaults(positions=2048, eps=1e-5)
_THETA = {FULL: 5e5, SLIDING: 5e5}
_KEYS = DECODER_KEYS | words("hidden_act attention_bias")


def _common(read: ConfigReader) -> dict[str, Any]:
    read.must_be("hidden_act", "silu", "swish")
    bias = read.flag("attention_bias")
    return {"norm_placement": "post", "qk_norm": "projection", "qkv_bias": bias, "out_bias": bias}


def _read_olmo2(read: ConfigReader, name: str) -> ModelSpec:
    return decoder(read, "olmo2", name, _DEFAULTS, **_common(read))


def _write_olmo2(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {"attention_bias": spec.qkv_bias and spec.out_bias}


def _read_olmo3(read: ConfigReader, name: str) -> ModelSpec:
    window, layers = read.integer("sliding_window", 4096), num_layers(read)
    kinds = layer_types(read, [SLIDING if (i + 1) % 4 else FULL for i in range(layers)], window)
    head_dim, positions = head_sizes(read, _DEFAULTS)[2], read.integer("max_position_embeddings", 2048)
    theta = {FULL: read.positive("rope_theta", 5e5), SLIDING: 5e5}  # the key outside counts for full attention only
    ropes = ropes_by_kind(read, head_dim, positions, theta)
    return decoder(
        read, "olmo3", name, _DEFAULTS, **_common(read),
        layer_kinds=tuple(LayerKind(window if kind == SLIDING else None, ropes[kind]) for kind in kinds),
    )  # fmt: skip


def _write_olmo3(spec: ModelSpec) -> dict[str, Any]:
    config = decoder_config(spec) | layer_type_config(spec, unused=4096) | write_ropes_by_kind(spec, _THETA)
    return config | {
        "head_dim": spec.head_dim, "hidden_act": "silu", "attention_bias": spec.qkv_bias and spec.out_bias,
    }  # fmt: skip


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _KEYS, _read_olmo2, _write_olmo2, examples="OLMo 2 1B to 32B")
OLMO3 = Family(
    "olmo3", "Olmo3ForCausalLM", _KEYS | words("sliding_window layer_types"), _read_olmo3, _write_olmo3,
    examples="OLMo 3 7B, 32B",
)  # fmt: skip
