"""Mixtures of experts with the attention of Llama and Qwen: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE.

Their auxiliary loss is a setting of the training run (docs/moe.md), so ``router_aux_loss_coef`` is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    Defaults,
    Family,
    decoder,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.moe import MoE

_MIXTRAL = Defaults(positions=131072, kv_heads=8, kv_nullable=False, head_dim_nullable=True, eps=1e-5, theta=1e6)
_QWEN2 = Defaults(positions=32768, kv_heads=16, kv_nullable=False)
_QWEN3 = Defaults(positions=32768, kv_heads=4, kv_nullable=False)
_OLMOE = Defaults(positions=4096, eps=1e-5)
_KEYS = DECODER_KEYS | words("hidden_act router_aux_loss_coef output_router_logits num_experts_per_tok")
_QWEN_KEYS = _KEYS | words(
    "num_experts moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers use_sliding_window"
    " sliding_window max_window_layers"
)


_UNREAD = (
    "router_aux_loss_coef is not read: --moe-router-load-balancing-type and --moe-aux-loss-coeff balance experts"
)


def with_experts(spec: ModelSpec, moe: MoE, kinds: Sequence[str]) -> ModelSpec:
    """``spec`` with a mixture of experts in the layers whose kind is ``moe``; ``kinds``: one per layer."""
    layers = tuple(replace(spec.layer(i), mlp=kind) for i, kind in enumerate(kinds))
    return replace(spec, layer_kinds=layers, moe=moe, notices=(*spec.notices, _UNREAD))


GROUP_KEYS = {"groups": "n_group", "top_groups": "topk_group"}  # what configurations call these fields


def read_moe(read: ConfigReader, experts: str, **changes: Any) -> MoE:
    """``experts``: the key that says how many there are."""
    count, top_k = read.integer(experts), read.integer("num_experts_per_tok")
    if top_k > count:
        raise read.refuse(f"there are {count} experts", "num_experts_per_tok", f"1 to {count}")
    try:
        return MoE(num_experts=count, top_k=top_k, **changes)
    except UserError as error:
        if error.field == "group_size":
            size = changes["group_size"]
            accepted = f"a divisor of {count}, up to {count // size}"
            raise read.refuse(f"a group of {count} experts would have fewer than {size}", "n_group", accepted) from None
        if error.field not in GROUP_KEYS:
            raise
        raise read.refuse(error.problem, GROUP_KEYS[error.field], error.accepted) from None


def _fixed(read: ConfigReader) -> None:
    read.must_be("hidden_act", "silu", "swish")


def _read_mixtral(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.must_be("router_jitter_noise", 0)
    read.must_be("num_experts", read.config.get("num_local_experts"))  # the same by another name
    window = None if read.value("sliding_window", None) is None else read.integer("sliding_window")
    spec = decoder(read, "mixtral", name, _MIXTRAL, windows=(window,))
    moe = read_moe(read, "num_local_experts", ffn_hidden_size=spec.ffn_hidden_size, normalize=True)
    return with_experts(spec, moe, ["moe"] * spec.num_layers)


def _write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return silu_config(spec) | {
        "sliding_window": spec.windows[0], "num_local_experts": spec.moe.num_experts,
        "num_experts_per_tok": spec.moe.top_k, "intermediate_size": spec.moe.ffn_hidden_size,
    }  # fmt: skip


def sparse_layers(read: ConfigReader) -> list[str]:
    """Kinds of the layers' MLPs: every ``decoder_sparse_step``-th, but none of ``mlp_only_layers``."""
    step, layers = read.integer("decoder_sparse_step", 1), num_layers(read)
    dense = read.value("mlp_only_layers", [], nullable=True)
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise read.refuse("must be a list of layers", "mlp_only_layers", "numbers of layers, or null")
    return ["dense" if i in dense or (i + 1) % step else "moe" for i in range(layers)]


def _unused_window(read: ConfigReader) -> None:
    """transformers asks for a whole number also where no layer has a window."""
    if read.value("sliding_window", None) is not None:
        read.integer("sliding_window", least=0)


def _read_qwen2(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.must_be("use_sliding_window", False)
    _unused_window(read)
    layer_types(read, [FULL] * num_layers(read), None)
    spec = decoder(read, "qwen2_moe", name, _QWEN2, qkv_bias=read.flag("qkv_bias", True))
    moe = read_moe(
        read, "num_experts", ffn_hidden_size=read.integer("moe_intermediate_size", 1408),
        normalize=read.flag("norm_topk_prob"), shared_ffn=read.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )  # fmt: skip
    return with_experts(spec, moe, sparse_layers(read))


def _read_qwen3(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    bias, window = read.flag("attention_bias"), None
    _unused_window(read)
    if read.flag("use_sliding_window") and read.value("sliding_window", 4096) is not None:
        window = read.integer("sliding_window", 4096)
    spec = decoder(
        read, "qwen3_moe", name, _QWEN3, windows=(window,), qkv_bias=bias, out_bias=bias, qk_norm="head"
    )
    experts = "num_local_experts" if "num_local_experts" in read.config else "num_experts"  # by its new or old name
    read.must_be("num_experts", read.config.get(experts))
    moe = read_moe(
        read, experts, ffn_hidden_size=read.integer("moe_intermediate_size", 768),
        normalize=read.flag("norm_topk_prob"),
    )  # fmt: skip
    return with_experts(spec, moe, sparse_layers(read))


def _qwen_config(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    dense = [i for i, kind in enumerate(spec.layers) if kind.mlp == "dense"]
    config = silu_config(spec) | {
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.normalize,
        "moe_intermediate_size": moe.ffn_hidden_size, "decoder_sparse_step": 1, "mlp_only_layers": dense,
    }  # fmt: skip
    if spec.windows != (None,):
        config |= {"use_sliding_window": True, "sliding_window": spec.windows[0]}
    return config


def _write_qwen2(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return _qwen_config(spec) | {
        "qkv_bias": spec.qkv_bias, "shared_expert_intermediate_size": spec.moe.shared_ffn,
    }  # fmt: skip


def _write_qwen3(spec: ModelSpec) -> dict[str, Any]:
    return _qwen_config(spec) | {"attention_bias": spec.qkv_bias and spec.out_bias}


def _read_olmoe(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.must_be("clip_qkv", None)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if read.value("head_dim", hidden // heads) != hidden // heads:  # its norms are hidden_size wide
        raise read.refuse(f"is not hidden_size {hidden} / {heads} heads", "head_dim", str(hidden // heads))
    bias = read.flag("attention_bias")
    spec = decoder(read, "olmoe", name, _OLMOE, qkv_bias=bias, out_bias=bias, qk_norm="projection")
    moe = read_moe(
        read, "num_experts", ffn_hidden_size=spec.ffn_hidden_size, normalize=read.flag("norm_topk_prob")
    )
    return with_experts(spec, moe, ["moe"] * spec.num_layers)


def _write_olmoe(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return silu_config(spec) | {
        "num_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k,
        "norm_topk_prob": spec.moe.normalize, "attention_bias": spec.qkv_bias and spec.out_bias,
        "intermediate_size": spec.moe.ffn_hidden_size,
    }  # fmt: skip


MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", _KEYS | words("num_local_experts num_experts sliding_window router_jitter_noise"),
    _read_mixtral, _write_mixtral, examples="Mixtral 8x7B and 8x22B",
    names=NameTable(modules={
        "mlp.gate": "block_sparse_moe.gate", "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
    }),
)  # fmt: skip
QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", _QWEN_KEYS | words("qkv_bias shared_expert_intermediate_size layer_types"),
    _read_qwen2, _write_qwen2, examples="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
)  # fmt: skip
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_KEYS | words("attention_bias num_local_experts"), _read_qwen3,
    _write_qwen3, examples="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
)  # fmt: skip
OLMOE = Family(
    "olmoe", "OlmoeForCausalLM", _KEYS | words("num_experts norm_topk_prob attention_bias clip_qkv"), _read_olmoe,
    _write_olmoe, examples="OLMoE-1B-7B",
)  # fmt: skip
