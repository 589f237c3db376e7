"""Llama 4's language model: experts in every or every other layer beside dense ones, attention in chunks where there
are rotary positions, and no positions in every fourth layer."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    CHUNKED,
    DECODER_KEYS,
    FULL,
    Defaults,
    Family,
    Wrapper,
    decoder,
    head_sizes,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.families.mixtral import read_moe, with_experts
from hetero_megatron.spec.families.smollm3 import layers_with_rope
from hetero_megatron.spec.hf_names import FusedExperts, NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.rope import Rope

_DEFAULTS = Defaults(positions=131072, kv_heads=8, kv_nullable=False, head_dim=128, eps=1e-5, theta=500000.0)
_CHUNK, _LENGTH = 8192, 8192


def _kinds(read: ConfigReader, rope: Rope, grows: bool) -> tuple[LayerKind, ...]:
    """Of every layer's attention; queries grow in layers without positions, and in those only."""
    turns = layers_with_rope(read, empty_is_default=True)
    chunk = None if read.value("attention_chunk_size", _CHUNK) is None else read.integer("attention_chunk_size", _CHUNK)
    default = [CHUNKED if has_rope else FULL for has_rope in turns]
    types = layer_types(read, default, chunk, CHUNKED)
    return tuple(
        LayerKind(
            chunk=chunk if kind == CHUNKED else None, rope=rope if roped else None, query_growth=not (grows and roped)
        )
        for kind, roped in zip(types, turns, strict=True)
    )


def _sparse_layers(read: ConfigReader) -> list[str]:
    layers, step = num_layers(read), read.integer("interleave_moe_layer_step", 1)
    sparse = read.value("moe_layers", list(range(step - 1, layers, step)), nullable=True)
    if not isinstance(sparse, list) or any(type(i) is not int or not 0 <= i < layers for i in sparse):
        raise read.refuse("must be a list of layers", "moe_layers", f"numbers from 0 to {layers - 1}, or null")
    return ["moe" if i in sparse else "dense" for i in range(layers)]


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("router_jitter_noise", 0)
    grows = read.flag("attn_temperature_tuning", True)
    growth, length = read.positive("attn_scale", 0.1), read.integer("floor_scale", _LENGTH)
    head_dim, positions = head_sizes(read, _DEFAULTS)[2], read.integer("max_position_embeddings", _DEFAULTS.positions)
    rope, notices = read_rope(read, head_dim, positions, _DEFAULTS.theta, interleaved=True)
    bias = read.flag("attention_bias")
    spec = decoder(
        read, "llama4_text", name, _DEFAULTS, qkv_bias=bias, out_bias=bias, notices=notices,
        ffn_hidden_size=read.integer("intermediate_size_mlp", 16384), layer_kinds=_kinds(read, rope, grows),
        qk_norm="l2" if read.flag("use_qk_norm", True) else None,
        **({"query_growth": growth, "query_growth_length": length, "query_growth_offset": 1} if grows else {}),
    )  # fmt: skip
    columns = read.integer("intermediate_size")
    moe = read_moe(
        read, "num_local_experts", ffn_hidden_size=columns, shared_ffn=columns, score="sigmoid", weigh_inputs=True
    )
    return with_experts(spec, moe, _sparse_layers(read))


def _write(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    config = {"rope_theta": _DEFAULTS.theta} | silu_config(spec) | {
        "intermediate_size": moe.ffn_hidden_size, "intermediate_size_mlp": spec.ffn_hidden_size,
        "num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        "moe_layers": [i for i, kind in enumerate(spec.layers) if kind.mlp == "moe"],
        "no_rope_layers": [int(kind.rope is not None) for kind in spec.layers],
        "layer_types": [FULL if kind.chunk is None else CHUNKED for kind in spec.layers],
        "attention_chunk_size": next((kind.chunk for kind in spec.layer_kinds if kind.chunk is not None), _CHUNK),
        "use_qk_norm": spec.qk_norm == "l2", "attention_bias": spec.qkv_bias and spec.out_bias,
        "attn_temperature_tuning": spec.query_growth > 0,
    }  # fmt: skip
    if spec.query_growth:
        config |= {"attn_scale": spec.query_growth, "floor_scale": spec.query_growth_length}
    return config


FAMILY = Family(
    "llama4_text", "Llama4ForCausalLM", read=_read, write=_write,
    examples="the language model of Llama 4 Scout and Maverick",
    keys=DECODER_KEYS | words(
        "hidden_act attention_bias intermediate_size_mlp num_experts_per_tok num_local_experts moe_layers"
        " interleave_moe_layer_step use_qk_norm output_router_logits router_aux_loss_coef router_jitter_noise"
        " no_rope_layers no_rope_layer_interval attention_chunk_size layer_types attn_temperature_tuning floor_scale"
        " attn_scale"
    ),
    names=NameTable(
        modules={
            "mlp.gate": "feed_forward.router", "mlp.experts": "feed_forward.experts",
            **{f"mlp.{one}": f"feed_forward.{one}" for one in ("gate_proj", "up_proj", "down_proj")},
            **{
                f"mlp.shared_expert.{one}": f"feed_forward.shared_expert.{one}"
                for one in ("gate_proj", "up_proj", "down_proj")
            },
        },
        experts=FusedExperts(),
    ),
    inside=Wrapper(
        "llama4", "Llama4ForConditionalGeneration", "language_model.", ("vision_model.", "multi_modal_projector."),
        words(
            "vision_config boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id image_token_id"
        ),
    ),
)  # fmt: skip
