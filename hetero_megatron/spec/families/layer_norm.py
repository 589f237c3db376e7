"""Rotary decoders with LayerNorm: StarCoder2 and Nemotron, whose MLP has no gate, and StableLM, with SwiGLU and
attention and MLP in turn or on one input."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    Defaults,
    Family,
    decoder,
    layer_norm_config,
    read_activation,
    refuse_other_head_dim,
    silu_config,
    some_features_turn,
)
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_STARCODER2 = Defaults(positions=4096, kv_heads=2, kv_nullable=False, tied=True)
_STABLELM = Defaults(positions=4096, kv_heads=32, kv_nullable=False, partial_rotary=0.25)
_NEMOTRON = Defaults(positions=4096, kv_nullable=False, head_dim_nullable=True, partial_rotary=0.5)
_NAMES = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "squared_relu": "relu2"}


def _read_starcoder2(read: ConfigReader, name: str) -> ModelSpec:
    bias = read.flag("use_bias", True)
    window = None if read.value("sliding_window", None) is None else read.integer("sliding_window")
    return decoder(
        read, "starcoder2", name, _STARCODER2, windows=(window,), norm="layer",
        activation=read_activation(read, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=read.positive("norm_epsilon", 1e-5), qkv_bias=bias, out_bias=bias, mlp_bias=bias,
        init_std=read.positive("initializer_range", 0.018042),
    )  # fmt: skip


def _write(spec: ModelSpec, eps: str) -> dict[str, Any]:
    config = silu_config(spec) | {eps: spec.norm_eps, "hidden_act": _NAMES.get(spec.activation, spec.activation)}
    del config["rms_norm_eps"]
    return config


def _write_starcoder2(spec: ModelSpec) -> dict[str, Any]:
    return _write(spec, "norm_epsilon") | {
        "use_bias": spec.qkv_bias and spec.out_bias and spec.mlp_bias, "sliding_window": spec.windows[0],
        "residual_dropout": 0.0, "embedding_dropout": 0.0,
    }  # fmt: skip


def _read_nemotron(read: ConfigReader, name: str) -> ModelSpec:
    bias = read.flag("attention_bias")
    return decoder(
        read, "nemotron", name, _NEMOTRON, norm="layer", norm_offset=1.0, norm_eps=read.positive("norm_eps", 1e-5),
        activation=read_activation(read, "hidden_act", "relu2"), qkv_bias=bias, out_bias=bias,
        mlp_bias=read.flag("mlp_bias"), init_std=read.positive("initializer_range", 0.0134),
    )  # fmt: skip


def _write_nemotron(spec: ModelSpec) -> dict[str, Any]:
    config = {"partial_rotary_factor": 1.0} | _write(spec, "norm_eps")  # absent means one half
    return config | {"attention_bias": spec.qkv_bias and spec.out_bias, "mlp_bias": spec.mlp_bias}


def _read_stablelm(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    refuse_other_head_dim(read)
    spec = decoder(
        read, "stablelm", name, _STABLELM, norm="layer", norm_eps=read.positive("layer_norm_eps", 1e-5),
        qk_norm="each_head" if read.flag("qk_layernorm") else None,
        parallel_block="one_norm" if read.flag("use_parallel_residual") else None, qkv_bias=read.flag("use_qkv_bias"),
    )  # fmt: skip
    return some_features_turn(read, spec)


def _write_stablelm(spec: ModelSpec) -> dict[str, Any]:
    config = {"partial_rotary_factor": 1.0} | layer_norm_config(spec, "layer_norm_eps")  # absent means a quarter
    return config | {
        "hidden_act": "silu", "use_qkv_bias": spec.qkv_bias, "use_parallel_residual": spec.parallel_block is not None,
        "qk_layernorm": spec.qk_norm is not None, "hidden_dropout": 0.0,
    }  # fmt: skip


STARCODER2 = Family(
    "starcoder2", "Starcoder2ForCausalLM", read=_read_starcoder2, write=_write_starcoder2,
    examples="StarCoder2 3B, 7B, 15B",
    keys=DECODER_KEYS | words("hidden_act use_bias norm_epsilon sliding_window residual_dropout embedding_dropout"),
    names=NameTable(modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)  # fmt: skip
NEMOTRON = Family(
    "nemotron", "NemotronForCausalLM", DECODER_KEYS | words("hidden_act attention_bias mlp_bias norm_eps"),
    _read_nemotron, _write_nemotron, examples="Nemotron-4, Minitron",
)  # fmt: skip
STABLELM = Family(
    "stablelm", "StableLmForCausalLM", read=_read_stablelm, write=_write_stablelm,
    examples="StableLM 3B 4E1T, StableLM 2 1.6B and 12B",
    keys=DECODER_KEYS | words(
        "hidden_act layer_norm_eps use_qkv_bias qk_layernorm use_parallel_residual hidden_dropout"
    ),
    names=NameTable(
        modules={f"self_attn.{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"},
        heads_apart=frozenset({"self_attn.q_norm", "self_attn.k_norm"}),
    ),
)  # fmt: skip
