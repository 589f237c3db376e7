"""SmolLM3: Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    SLIDING,
    Defaults,
    Family,
    decoder,
    head_sizes,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.families.qwen import window_config
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.rope import Rope

_DEFAULTS = Defaults(positions=32768, kv_heads=4, tied=True, theta=2e6)


def layers_with_rope(read: ConfigReader, empty_is_default: bool = False) -> list[bool]:
    """Which layers have rotary positions; ``empty_is_default``: an empty list is as none (Llama 4)."""
    layers, interval = num_layers(read), read.integer("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(layers)]
    flags = read.value("no_rope_layers", default, nullable=True)
    flags = default if flags == [] and empty_is_default else flags
    if not isinstance(flags, list) or len(flags) != layers or any(type(x) is not int or x not in (0, 1) for x in flags):
        raise read.refuse(f"does not say 0 or 1 for {layers} layers", "no_rope_layers", "1: with rope, 0: without")
    return [bool(x) for x in flags]


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    turns, uses_window = layers_with_rope(read), read.flag("use_sliding_window")
    size = None if read.value("sliding_window", None) is None else read.integer("sliding_window")
    window = size if uses_window else None
    default = [FULL if has_rope or window is None else SLIDING for has_rope in turns]
    kinds = layer_types(read, default, window)
    head_dim, positions = head_sizes(read, _DEFAULTS)[2], read.integer("max_position_embeddings", 32768)
    rope, _ = read_rope(read, head_dim, positions, _DEFAULTS.theta)
    bias = read.flag("attention_bias")
    return decoder(
        read, "smollm3", name, _DEFAULTS, qkv_bias=bias, out_bias=bias, mlp_bias=read.flag("mlp_bias"),
        layer_kinds=tuple(
            LayerKind(window if kind == SLIDING else None, rope if has_rope else None)
            for kind, has_rope in zip(kinds, turns, strict=True)
        ),
    )  # fmt: skip


def _write(spec: ModelSpec) -> dict[str, Any]:
    config = silu_config(spec) | window_config(spec) | {
        "attention_bias": spec.qkv_bias and spec.out_bias, "mlp_bias": spec.mlp_bias,
        "no_rope_layers": [int(kind.rope is not None) for kind in spec.layers],
    }  # fmt: skip
    return {"rope_theta": Rope().theta} | config


FAMILY = Family(
    "smollm3", "SmolLM3ForCausalLM", read=_read, write=_write, examples="SmolLM3 3B",
    keys=DECODER_KEYS | words(
        "hidden_act attention_bias mlp_bias use_sliding_window sliding_window layer_types no_rope_layers"
        " no_rope_layer_interval max_window_layers"
    ),
)  # fmt: skip
