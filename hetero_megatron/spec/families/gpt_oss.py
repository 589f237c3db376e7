"""gpt-oss: attention sinks, alternating windows, YaRN, and biased experts with a clamped SwiGLU."""

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
from hetero_megatron.spec.families.mixtral import read_moe, with_experts
from hetero_megatron.spec.hf_names import FusedExperts, NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_DEFAULTS = Defaults(positions=131072, kv_heads=8, kv_nullable=False, head_dim=64, eps=1e-5, theta=150000.0)
_YARN = {  # of a configuration without rope_parameters
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("num_experts", read.config.get("num_local_experts"))  # the same by another name
    read.must_be("experts_per_token", read.config.get("num_experts_per_tok"))  # not read by transformers
    if read.config.get("rope_parameters") is None:
        read = ConfigReader({**read.config, "rope_parameters": _YARN}, read.where, read.prefix)
    window = read.integer("sliding_window", 128)
    kinds = layer_types(read, [FULL if i % 2 else SLIDING for i in range(num_layers(read))], window)
    head_dim, positions = head_sizes(read, _DEFAULTS)[2], read.integer("max_position_embeddings", _DEFAULTS.positions)
    rope, notices = read_rope(read, head_dim, positions, _DEFAULTS.theta)
    bias = read.flag("attention_bias", True)
    spec = decoder(
        read, "gpt_oss", name, _DEFAULTS, qkv_bias=bias, out_bias=bias, sinks=True, activation="clamped_swiglu",
        layer_kinds=tuple(LayerKind(window if kind == SLIDING else None, rope) for kind in kinds), notices=notices,
        swiglu_alpha=read.positive("swiglu_alpha", 1.702), swiglu_limit=read.positive("swiglu_limit", 7.0),
    )  # fmt: skip
    moe = read_moe(
        read, "num_local_experts", ffn_hidden_size=spec.ffn_hidden_size, score="topk_softmax", router_bias=True,
        bias=True,
    )  # fmt: skip
    return with_experts(spec, moe, ["moe"] * spec.num_layers)


def _write(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    config = silu_config(spec) | layer_type_config(spec, unused=128) | {
        "num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k,
        "intermediate_size": spec.moe.ffn_hidden_size, "attention_bias": spec.qkv_bias and spec.out_bias,
        "swiglu_alpha": spec.swiglu_alpha, "swiglu_limit": spec.swiglu_limit,
    }  # fmt: skip
    if "rope_scaling" not in config:  # absent means stretched
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config


FAMILY = Family(
    "gpt_oss", "GptOssForCausalLM", read=_read, write=_write, examples="gpt-oss-20b and 120b, also in MXFP4",
    keys=DECODER_KEYS | words(
        "hidden_act router_aux_loss_coef output_router_logits num_experts_per_tok num_local_experts num_experts"
        " experts_per_token sliding_window layer_types attention_bias swiglu_alpha swiglu_limit"
        " initial_context_length"
    ),
    names=NameTable(modules={"mlp.gate": "mlp.router"}, experts=FusedExperts(interleaved=True)),
)  # fmt: skip
