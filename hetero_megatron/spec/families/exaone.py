"""EXAONE 4: norms after attention and MLP, and beside layers with windows no rotary positions in those without."""

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
    layer_type_config,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.rope import Rope

_DEFAULTS = Defaults(positions=2048, kv_heads=32, kv_nullable=False, eps=1e-5)


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    layers = num_layers(read)
    window = None if read.value("sliding_window", 4096) is None else read.integer("sliding_window", 4096)
    if window is None and read.value("layer_types", None) is None:
        raise read.refuse("transformers needs layer_types beside it", "sliding_window", "layer_types, or a window")
    pattern = read.integer("sliding_window_pattern", 4) if window is not None else 1
    kinds = layer_types(read, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)], window)
    head_dim, positions = head_sizes(read, _DEFAULTS)[2], read.integer("max_position_embeddings", 2048)
    rope, notices = read_rope(read, head_dim, positions)
    return decoder(
        read, "exaone4", name, _DEFAULTS, norm_placement="post", qk_norm="head", notices=notices,
        layer_kinds=tuple(
            LayerKind(window if kind == SLIDING else None, rope if kind == SLIDING or window is None else None)
            for kind in kinds
        ),
    )  # fmt: skip


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {"rope_theta": Rope().theta} | silu_config(spec) | layer_type_config(
        spec, unused=None if spec.ropes else 4096
    )  # fmt: skip


FAMILY = Family(
    "exaone4", "Exaone4ForCausalLM", read=_read, write=_write, examples="EXAONE 4.0 1.2B, 32B",
    keys=DECODER_KEYS | words("hidden_act sliding_window sliding_window_pattern layer_types"),
)  # fmt: skip
