"""Qwen3-Next: Gated DeltaNet in most layers, attention with a gate on its output in the others, experts in all."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    LINEAR,
    Defaults,
    Family,
    decoder,
    head_sizes,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.families.mixtral import read_moe, sparse_layers, with_experts
from hetero_megatron.spec.gated_delta import GatedDelta
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_DEFAULTS = Defaults(
    positions=32768, kv_heads=2, kv_nullable=False, head_dim=256, partial_rotary=0.25, eps=1e-6
)
DELTA_SIZES = {  # key of config.json -> field of GatedDelta, and what an absent one means
    "linear_num_key_heads": ("key_heads", 16), "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128), "linear_value_head_dim": ("value_dim", 128),
    "linear_conv_kernel_dim": ("kernel", 4),
}  # fmt: skip


def read_delta(read: ConfigReader, eps: float) -> GatedDelta:
    """``eps``: of the gated norm."""
    sizes: dict[str, Any] = {field: read.integer(key, absent) for key, (field, absent) in DELTA_SIZES.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        accepted = f"a multiple of linear_num_key_heads {sizes['key_heads']}"
        raise read.refuse("its key heads cannot serve them evenly", "linear_num_value_heads", accepted)
    return GatedDelta(**sizes, norm_eps=eps)


def read_mixers(read: ConfigReader) -> tuple[str, ...]:
    """FULL or LINEAR, of each layer."""
    layers = num_layers(read)
    if read.config.get("layer_types") is not None:
        return layer_types(read, [], 1, LINEAR)
    interval = read.integer("full_attention_interval", 4)
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("use_sliding_window", False, None)  # in released files; not read by transformers
    head_dim, positions = head_sizes(read, _DEFAULTS)[2], read.integer("max_position_embeddings", _DEFAULTS.positions)
    rope, notices = read_rope(read, head_dim, positions, _DEFAULTS.theta, _DEFAULTS.partial_rotary)
    kinds = [
        LayerKind(rope=rope) if kind == FULL else LayerKind(rope=None, mixer="gated_delta")
        for kind in read_mixers(read)
    ]
    bias = read.flag("attention_bias")
    sized = ConfigReader({"intermediate_size": 5632, **read.config}, read.where, read.prefix)
    spec = decoder(
        sized, "qwen3_next", name, _DEFAULTS, qkv_bias=bias, out_bias=bias, qk_norm="head", norm_offset=1.0,
        attn_gate=True, layer_kinds=tuple(kinds), notices=notices,
        delta=read_delta(read, read.positive("rms_norm_eps", _DEFAULTS.eps)),
    )  # fmt: skip
    moe = read_moe(
        read, "num_experts", ffn_hidden_size=read.integer("moe_intermediate_size", 512),
        normalize=read.flag("norm_topk_prob", True), shared_gate=True,
        shared_ffn=read.integer("shared_expert_intermediate_size", 512),
    )  # fmt: skip
    return with_experts(spec, moe, sparse_layers(read))


def _write(spec: ModelSpec) -> dict[str, Any]:
    moe, delta = spec.moe, spec.delta
    assert moe is not None and delta is not None
    config = silu_config(spec) | {
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.normalize,
        "moe_intermediate_size": moe.ffn_hidden_size, "shared_expert_intermediate_size": moe.shared_ffn,
        "decoder_sparse_step": 1, "mlp_only_layers": [i for i, kind in enumerate(spec.layers) if kind.mlp == "dense"],
        "layer_types": [LINEAR if kind.linear else FULL for kind in spec.layers],
        "attention_bias": spec.qkv_bias and spec.out_bias,
        **{key: getattr(delta, field) for key, (field, _) in DELTA_SIZES.items()},
    }  # fmt: skip
    return {"partial_rotary_factor": 1.0} | config  # absent means a quarter


FAMILY = Family(
    "qwen3_next", "Qwen3NextForCausalLM", read=_read, write=_write, examples="Qwen3-Next-80B-A3B",
    keys=DECODER_KEYS | frozenset(DELTA_SIZES) | words(
        "hidden_act attention_bias layer_types full_attention_interval num_experts num_experts_per_tok"
        " moe_intermediate_size shared_expert_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
        " router_aux_loss_coef output_router_logits use_sliding_window"
    ),
    unread=("mtp.",),
    names=NameTable(
        modules={"linear_attn.o_proj": "linear_attn.out_proj"},
        fused={
            "self_attn.q_proj": ("self_attn.q_proj", "self_attn.g_proj"),
            "linear_attn.in_proj_qkvz": tuple(f"linear_attn.{letter}_proj" for letter in "qkvz"),
            "linear_attn.in_proj_ba": ("linear_attn.b_proj", "linear_attn.a_proj"),
            "linear_attn.conv1d": tuple(f"linear_attn.{letter}_conv" for letter in "qkv"),
        },
        by_group={
            "self_attn.q_proj": "heads", "linear_attn.in_proj_qkvz": "key_heads", "linear_attn.in_proj_ba": "key_heads",
        },
        filters=frozenset({"linear_attn.conv1d"}),
    ),
)  # fmt: skip
