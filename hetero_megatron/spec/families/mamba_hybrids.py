"""Hybrids of Mamba-2 and attention, with an MLP in every layer: Granite 4 and Bamba."""

from __future__ import annotations

import math
from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    LINEAR,
    Defaults,
    Family,
    decoder,
    decoder_config,
    head_sizes,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.families.mixtral import read_moe, with_experts
from hetero_megatron.spec.hf_names import FusedExperts, NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.state_space import StateSpace

_GRANITE = Defaults(positions=2048)
_BAMBA = Defaults(positions=262144, kv_heads=8, partial_rotary=0.5, eps=1e-5)
_SIZES = {  # key of config.json -> field of StateSpace, and what an absent one means
    "mamba_n_heads": ("value_heads", 128), "mamba_n_groups": ("key_heads", 1), "mamba_d_state": ("key_dim", 256),
    "mamba_d_conv": ("kernel", 4),
}  # fmt: skip
_KINDS = {FULL: FULL, LINEAR: LINEAR, "attention": FULL, "mamba": LINEAR}  # the last two are older names
# mamba_chunk_size changes no number.
_KEYS = DECODER_KEYS | frozenset(_SIZES) | words(
    "hidden_act attention_bias mamba_d_head mamba_expand mamba_conv_bias mamba_proj_bias mamba_chunk_size"
    " time_step_limit"
)  # fmt: skip
_MODULES = {
    f"linear_attn.{name}": f"mamba.{name.replace('o_proj', 'out_proj')}"
    for name in ("A_log", "dt_bias", "D", "norm", "o_proj")
}


def fused_in(module: str) -> dict[str, tuple[str, ...]]:
    """What a file's module of Mamba-2 keeps of several projections, and convolutions, in one tensor."""
    return {
        f"{module}.in_proj": tuple(f"linear_attn.{letter}_proj" for letter in "zvkqa"),
        f"{module}.conv1d": tuple(f"linear_attn.{letter}_conv" for letter in "vkq"),
    }


_FUSED = fused_in("mamba")
_FILTERS = frozenset({"mamba.conv1d"})


def groups_serve_heads(read: ConfigReader, key: str, groups: int, heads: int) -> None:
    """Refuse ``key`` where groups have unlike numbers of heads."""
    if heads % groups:
        raise read.refuse(f"its groups cannot serve {heads} heads evenly", key, f"a divisor of {heads}")


def _state_space(read: ConfigReader, eps: float) -> StateSpace:
    """What the layers of Mamba-2 are."""
    sizes: dict[str, Any] = {field: read.integer(key, absent) for key, (field, absent) in _SIZES.items()}
    heads, groups = sizes["value_heads"], sizes["key_heads"]
    width = read.integer("mamba_expand", 2) * read.integer("hidden_size")
    if width % heads:
        raise read.refuse(f"does not divide the {width} features of mamba_expand", "mamba_n_heads", "a divisor of them")
    groups_serve_heads(read, "mamba_n_groups", groups, heads)
    if read.value("mamba_d_head", "auto") != "auto" and read.integer("mamba_d_head") * heads != width:
        accepted = f'{width // heads}, or "auto"'
        raise read.refuse(f"{heads} heads have {width} features by mamba_expand", "mamba_d_head", accepted)
    return StateSpace(
        **sizes, value_dim=width // heads, norm_eps=eps, conv_bias=read.flag("mamba_conv_bias", True),
        proj_bias=read.flag("mamba_proj_bias"), step_limits=_limits(read),
    )  # fmt: skip


def _limits(read: ConfigReader) -> tuple[float, float | None]:
    """Of step sizes; None: no most, for which transformers writes infinity as ``{"__float__": "Infinity"}``."""
    limits = read.value("time_step_limit", [0.0, math.inf])
    if isinstance(limits, list | tuple) and len(limits) == 2:
        low, high = (math.inf if x == {"__float__": "Infinity"} else x for x in limits)
        if all(isinstance(x, int | float) and not isinstance(x, bool) for x in (low, high)) and 0 <= low <= high:
            return float(low), None if high == math.inf else float(high)
    raise read.refuse("not a least and a most step size", "time_step_limit", "two numbers, 0 or more, ascending")


def _layers(read: ConfigReader, kinds: list[str], rope: Any) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(rope=rope) if kind == FULL else LayerKind(rope=None, mixer="mamba2") for kind in kinds)


def _state_space_config(spec: ModelSpec) -> dict[str, Any]:
    delta = spec.delta
    if not isinstance(delta, StateSpace):  # no layer has one
        return {"mamba_n_heads": 1, "mamba_n_groups": 1, "mamba_expand": 1, "mamba_d_head": spec.hidden_size}
    low, high = delta.step_limits
    limit: Any = {"__float__": "Infinity"} if high is None else high
    return {
        **{key: getattr(delta, field) for key, (field, _) in _SIZES.items()}, "mamba_d_head": delta.value_dim,
        "mamba_expand": delta.value_width // spec.hidden_size, "mamba_conv_bias": delta.conv_bias,
        "mamba_proj_bias": delta.proj_bias, "time_step_limit": [low, limit],
    }  # fmt: skip


def _common_config(spec: ModelSpec) -> dict[str, Any]:
    # Without rotary embeddings there are no keys of them.
    config = silu_config(spec) if spec.ropes else decoder_config(spec) | {"head_dim": spec.head_dim}
    return config | _state_space_config(spec)


def _types(read: ConfigReader) -> list[str]:
    """Kinds of Granite 4's layers; all of Mamba-2 where nothing is said."""
    key, layers = "layer_types" if "layer_types" in read.config else "layers_block_type", num_layers(read)
    if "layers_block_type" in read.config and key == "layer_types":
        read.must_be("layers_block_type", read.config["layer_types"], None)
    types = read.value(key, [LINEAR] * layers, nullable=True)
    valid = isinstance(types, list) and all(isinstance(kind, str) and kind in _KINDS for kind in types)
    if not valid or len(types) != layers:
        accepted = " or ".join(f'"{kind}"' for kind in _KINDS) + " for every layer, or null"
        raise read.refuse(f"does not name the mixer of {layers} layers", key, accepted)
    return [_KINDS[kind] for kind in types]


def _read_granite_hybrid(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("normalization_function", "rmsnorm")
    bias, scale = read.flag("attention_bias"), read.positive("attention_multiplier", 1.0)
    head_dim, positions = head_sizes(read, _GRANITE)[2], read.integer("max_position_embeddings", _GRANITE.positions)
    rope, notices = read_rope(read, head_dim, positions, _GRANITE.theta)
    if read.value("position_embedding_type", None) != "rope":
        read.must_be("position_embedding_type", "nope", None)
        rope, notices = None, ()  # type: ignore[assignment]
    kinds = _types(read)
    delta = _state_space(read, read.positive("rms_norm_eps", _GRANITE.eps)) if LINEAR in kinds else None
    shared = read.integer("shared_intermediate_size", 1024)
    sized = ConfigReader({**read.config, "intermediate_size": shared}, read.where, read.prefix)
    spec = decoder(
        sized, "granitemoehybrid", name, _GRANITE, qkv_bias=bias, out_bias=bias,
        layer_kinds=_layers(read, kinds, rope), notices=notices, delta=delta,
        embed_scale=read.positive("embedding_multiplier", 1.0),
        residual_scale=read.positive("residual_multiplier", 1.0),
        logit_scale=1 / read.positive("logits_scaling", 1.0),
        attn_scale=None if scale == head_dim**-0.5 else scale,
    )  # fmt: skip
    if not read.integer("num_local_experts", 8, least=0):
        return spec
    counted = ConfigReader({"num_local_experts": 8, "num_experts_per_tok": 2, **read.config}, read.where, read.prefix)
    moe = read_moe(
        counted, "num_local_experts", ffn_hidden_size=read.integer("intermediate_size", 11008), score="topk_softmax",
        shared_ffn=shared,
    )  # fmt: skip
    return with_experts(spec, moe, ["moe"] * spec.num_layers)


def _write_granite_hybrid(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    return _common_config(spec) | {
        "hidden_act": "silu", "num_local_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_tok": 0 if moe is None else moe.top_k,
        "intermediate_size": spec.ffn_hidden_size if moe is None else moe.ffn_hidden_size,
        "shared_intermediate_size": spec.ffn_hidden_size, "attention_bias": spec.qkv_bias and spec.out_bias,
        "position_embedding_type": "rope" if spec.ropes else None,
        "layer_types": [LINEAR if kind.linear else FULL for kind in spec.layers],
        "embedding_multiplier": spec.embed_scale, "residual_multiplier": spec.residual_scale,
        "logits_scaling": 1 / spec.logit_scale,
        "attention_multiplier": spec.head_dim**-0.5 if spec.attn_scale is None else spec.attn_scale,
    }  # fmt: skip


GRANITE_HYBRID = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", read=_read_granite_hybrid, write=_write_granite_hybrid,
    examples="Granite 4.0 micro, h-micro, h-tiny, h-small", dense_form=True,
    keys=_KEYS | words(
        "embedding_multiplier logits_scaling residual_multiplier attention_multiplier shared_intermediate_size"
        " position_embedding_type layer_types layers_block_type num_local_experts num_experts_per_tok"
        " router_aux_loss_coef output_router_logits normalization_function init_method"
    ),
    names=NameTable(
        modules=_MODULES | {
            "mlp.down_proj": "shared_mlp.output_linear", "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.experts": "block_sparse_moe",
        },
        fused=_FUSED | {"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")}, filters=_FILTERS,
        alike={f"mlp.shared_expert.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        experts=FusedExperts(transposed=False, tensors=("input_linear.weight", "output_linear.weight")),
    ),
)  # fmt: skip


def _read_bamba(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("z_loss_coefficient", 0, 0.0)
    read.must_be("partial_rotary_factor", 0.5, None)
    head_dim, positions = head_sizes(read, _BAMBA)[2], read.integer("max_position_embeddings", _BAMBA.positions)
    rope, notices = read_rope(read, head_dim, positions, _BAMBA.theta, _BAMBA.partial_rotary)
    layers, bias = num_layers(read), read.flag("attention_bias")
    with_attention = read.value("attn_layer_indices", [], nullable=True)
    if not isinstance(with_attention, list) or not all(type(i) is int and 0 <= i < layers for i in with_attention):
        raise read.refuse("not numbers of layers", "attn_layer_indices", f"a list of 0 to {layers - 1}, or null")
    kinds = [FULL if i in with_attention else LINEAR for i in range(layers)]
    for key in ("layer_types", "layers_block_type"):  # what attn_layer_indices says counts
        read.must_be(key, kinds, None)
    delta = _state_space(read, read.positive("rms_norm_eps", _BAMBA.eps)) if LINEAR in kinds else None
    return decoder(
        ConfigReader({"intermediate_size": 14336, **read.config}, read.where, read.prefix), "bamba", name, _BAMBA,
        qkv_bias=bias, out_bias=bias, mlp_bias=read.flag("mlp_bias"), layer_kinds=_layers(read, kinds, rope),
        notices=notices, delta=delta,
    )  # fmt: skip


def _write_bamba(spec: ModelSpec) -> dict[str, Any]:
    return _common_config(spec) | {
        "attention_bias": spec.qkv_bias and spec.out_bias, "mlp_bias": spec.mlp_bias, "hidden_act": "silu",
        "attn_layer_indices": [i for i, kind in enumerate(spec.layers) if not kind.linear], "z_loss_coefficient": 0.0,
    }  # fmt: skip


BAMBA = Family(
    "bamba", "BambaForCausalLM", read=_read_bamba, write=_write_bamba, examples="Bamba-9B",
    keys=_KEYS | words(
        "mlp_bias attn_layer_indices z_loss_coefficient num_logits_to_keep partial_rotary_factor layer_types"
        " layers_block_type"
    ),
    names=NameTable(
        modules=_MODULES | {
            "post_attention_layernorm": "pre_ff_layernorm",
            **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        },
        fused=_FUSED, filters=_FILTERS, outside={"model.norm.weight": "model.final_layernorm.weight"},
    ),
)  # fmt: skip
