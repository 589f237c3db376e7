"""Kimi Linear: Kimi Delta Attention in most layers, multi-head latent attention without positions in the others, and
the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.spec.families.deepseek import PREDICTION_KEYS
from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    LINEAR,
    Defaults,
    Family,
    decoder,
    decoder_config,
    layer_types,
    num_layers,
)
from hetero_megatron.spec.families.mixtral import read_moe, with_experts
from hetero_megatron.spec.gated_delta import GatedDelta
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.mla import MLA
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_DEFAULTS = Defaults(positions=1048576, eps=1e-5)
_ALIASES = {  # as transformers calls it -> as files do
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_SIZES = {  # of linear attention -> (the same in ``linear_attn_config``, which counts before it; what absent means)
    "linear_head_dim": ("head_dim", 128), "linear_num_heads": ("num_heads", 32),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}  # fmt: skip
_LISTS = ("full_attn_layers", "kda_layers")  # numbers of layers from 1
_MLP_KINDS = {"dense": "dense", "sparse": "moe"}


def _by_one_name(read: ConfigReader) -> ConfigReader:
    """With each key under the name that transformers gives it."""
    config = dict(read.config)
    for name, stored in _ALIASES.items():
        if stored in config:
            if name in config and config[name] != config[stored]:
                accepted = f"{config[name]}, or no {name}"
                raise read.refuse(f"{name} is another, and both are one setting", stored, accepted)
            config[name] = config.pop(stored)
    return ConfigReader(config, read.where, read.prefix)


def _of_linear(read: ConfigReader) -> ConfigReader:
    """``linear_attn_config``."""
    key = "linear_attn_config"
    inner = read.value(key, {})
    keys = {*_LISTS, *(name for name, _ in _SIZES.values())}
    if not isinstance(inner, Mapping) or inner.keys() - keys:
        raise read.refuse("is not what linear attention has", key, f"an object with {', '.join(sorted(keys))}")
    return ConfigReader(inner, read.where, f"{key}.")


def _mixers(read: ConfigReader, inner: ConfigReader) -> tuple[str, ...]:
    layers = num_layers(read)
    if read.config.get("layer_types") is not None or not set(_LISTS) <= inner.config.keys():
        default = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
        return layer_types(read, default, 1, LINEAR)
    full, linear = (inner.config[key] for key in _LISTS)
    listed = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if any(type(i) is not int for i in listed) or sorted(listed) != list(range(1, layers + 1)):
        raise inner.refuse(
            f"with {_LISTS[1]} does not name each layer once", _LISTS[0], f"lists of the numbers 1 to {layers}"
        )
    return tuple(FULL if i + 1 in full else LINEAR for i in range(layers))


def _mlps(read: ConfigReader) -> list[str]:
    layers, first = num_layers(read), read.integer("first_k_dense_replace", 1, least=0)
    kinds = read.value("mlp_layer_types", ["dense" if i < first else "sparse" for i in range(layers)], nullable=True)
    named = isinstance(kinds, list) and len(kinds) == layers
    if not named or any(not isinstance(kind, str) or kind not in _MLP_KINDS for kind in kinds):
        raise read.refuse(f"does not name the MLP of {layers} layers", "mlp_layer_types", "dense or sparse for each")
    return [_MLP_KINDS[kind] for kind in kinds]


def _fixed(read: ConfigReader) -> None:
    """What released files say, and transformers does not read, is so."""
    fixed: tuple[tuple[Any, ...], ...] = (
        ("hidden_act", "silu", "swish"), ("tie_word_embeddings", False), ("rope_scaling", None),
        ("rope_parameters", None), ("mla_use_nope", True),
        ("moe_layer_freq", 1), ("moe_router_activation_func", "sigmoid"), ("use_grouped_topk", True),
        ("topk_method", "noaux_tc"), ("partial_rotary_factor", 1, None), *((key, 0, None) for key in PREDICTION_KEYS),
    )  # fmt: skip
    for key, *accepted in fixed:
        read.must_be(key, *accepted)


def _latent(read: ConfigReader) -> MLA:
    heads = read.integer("num_attention_heads")
    default = heads if "num_key_value_heads" in read.config else 32
    if read.integer("num_key_value_heads", default, nullable=True) != heads:
        raise read.refuse("latent attention has keys of every head", "num_key_value_heads", str(heads))
    mla = MLA(
        kv_rank=read.integer("kv_lora_rank", 512), nope_dim=read.integer("qk_nope_head_dim", 128),
        rope_dim=read.integer("qk_rope_head_dim", 64), v_dim=read.integer("v_head_dim", 128),
        q_rank=None if read.value("q_lora_rank", None) is None else read.integer("q_lora_rank"),
        bias=read.flag("attention_bias"),
    )  # fmt: skip
    read.must_be("qk_head_dim", mla.qk_dim)
    return mla


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read = _by_one_name(read)
    _fixed(read)
    inner, mla = _of_linear(read), _latent(read)
    head_dim, heads, kernel = (
        inner.integer(key) if key in inner.config else read.integer(outer, absent)
        for outer, (key, absent) in _SIZES.items()
    )
    eps = read.positive("rms_norm_eps", _DEFAULTS.eps)
    kinds = [
        LayerKind(rope=None, mixer="attention" if kind == FULL else "gated_delta") for kind in _mixers(read, inner)
    ]
    sizes = {"head_dim": mla.rope_dim, "num_key_value_heads": read.integer("num_attention_heads")}
    spec = decoder(
        ConfigReader({**read.config, **sizes}, read.where, read.prefix), "kimi_linear", name, _DEFAULTS, mla=mla,
        head_dim=mla.head_dim, out_bias=mla.bias, layer_kinds=tuple(kinds),
        delta=GatedDelta(heads, heads, head_dim, head_dim, kernel, eps, by_feature=True),
    )  # fmt: skip
    counts = {"num_local_experts": 256, "num_experts_per_tok": 8, **read.config}
    columns = read.integer("moe_intermediate_size", 1024)
    moe = read_moe(
        ConfigReader(counts, read.where, read.prefix), "num_local_experts", ffn_hidden_size=columns,
        shared_ffn=columns * read.integer("n_shared_experts", 1), score="sigmoid", score_bias=True,
        normalize=read.flag("norm_topk_prob", True), scale=read.positive("routed_scaling_factor", 2.446),
        groups=read.integer("n_group", 1), top_groups=read.integer("topk_group", 1), group_size=2,
    )  # fmt: skip
    return with_experts(spec, moe, _mlps(read))


def _write(spec: ModelSpec) -> dict[str, Any]:
    mla, delta, moe = spec.mla, spec.delta, spec.moe
    assert mla is not None and delta is not None and moe is not None
    config = decoder_config(spec) | {
        "hidden_act": "silu", "attention_bias": mla.bias and spec.out_bias, "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank, "qk_nope_head_dim": mla.nope_dim, "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim, "linear_head_dim": delta.key_dim, "linear_num_heads": delta.key_heads,
        "linear_conv_kernel_dim": delta.kernel, "num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size, "n_shared_experts": moe.shared_ffn // moe.ffn_hidden_size,
        "n_group": moe.groups, "topk_group": moe.top_groups, "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale, "layer_types": [LINEAR if kind.linear else FULL for kind in spec.layers],
        "mlp_layer_types": ["sparse" if kind.mlp == "moe" else "dense" for kind in spec.layers],
    }  # fmt: skip
    return {_ALIASES.get(key, key): value for key, value in config.items()}


_MOE = "block_sparse_moe"
_COLUMNS = ("gate_proj", "up_proj", "down_proj")
FAMILY = Family(
    "kimi_linear", "KimiLinearForCausalLM", read=_read, write=_write, examples="Kimi-Linear-48B-A3B",
    keys=DECODER_KEYS | {*_ALIASES, *_ALIASES.values(), *_SIZES, *PREDICTION_KEYS} | words(
        "hidden_act attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim"
        " linear_attn_config layer_types mlp_layer_types first_k_dense_replace moe_intermediate_size"
        " routed_scaling_factor topk_group output_router_logits router_aux_loss_coef auto_map mla_use_nope"
        " moe_layer_freq moe_router_activation_func use_grouped_topk topk_method"
    ),
    names=NameTable(
        modules={
            **{f"linear_attn.{name}": f"self_attn.{name}" for name in (
                *(f"{letter}_proj" for letter in "qkvbo"), *(f"{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")),
                "A_log", "dt_bias",
            )},
            **{f"linear_attn.{letter}_conv": f"self_attn.{letter}_conv1d" for letter in "qkv"},
            "linear_attn.norm": "self_attn.o_norm",
            **{f"mlp.{name}": f"{_MOE}.{name}" for name in ("gate", "gate.e_score_correction_bias")},
            **{f"mlp.shared_expert.{name}": f"{_MOE}.shared_experts.{name}" for name in _COLUMNS},
            **{
                f"mlp.experts.{{}}.{name}": f"{_MOE}.experts.{{}}.{other}"
                for name, other in zip(_COLUMNS, ("w1", "w3", "w2"), strict=True)
            },
        },
        filters=frozenset(f"self_attn.{letter}_conv1d" for letter in "qkv"), within={"self_attn.A_log": (2, 1)},
        otherwise={".mlp.": f".{_MOE}."},  # of dense layers, as transformers writes them
        loaded={f"self_attn.f_{letter}_": f"self_attn.forget_gate.f_{letter}_" for letter in "ab"},
    ),
)  # fmt: skip
