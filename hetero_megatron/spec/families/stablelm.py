"""StableLM: LayerNorm beside SwiGLU, partial rotary embeddings; attention and MLP in turn, or on one input."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    Defaults,
    Family,
    decoder,
    layer_norm_config,
    refuse_other_head_dim,
    some_features_turn,
)
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_DEFAULTS = Defaults(positions=4096, kv_heads=32, kv_nullable=False, partial_rotary=0.25)


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    refuse_other_head_dim(read)
    spec = decoder(
        read, "stablelm", name, _DEFAULTS, norm="layer", norm_eps=read.positive("layer_norm_eps", 1e-5),
        qk_norm="each_head" if read.flag("qk_layernorm") else None,
        parallel_block="one_norm" if read.flag("use_parallel_residual") else None, qkv_bias=read.flag("use_qkv_bias"),
    )  # fmt: skip
    return some_features_turn(read, spec)


def _write(spec: ModelSpec) -> dict[str, Any]:
    config = {"partial_rotary_factor": 1.0} | layer_norm_config(spec, "layer_norm_eps")  # absent means a quarter
    return config | {
        "hidden_act": "silu", "use_qkv_bias": spec.qkv_bias, "use_parallel_residual": spec.parallel_block is not None,
        "qk_layernorm": spec.qk_norm is not None, "hidden_dropout": 0.0,
    }  # fmt: skip


FAMILY = Family(
    "stablelm", "StableLmForCausalLM", read=_read, write=_write, examples="StableLM 3B 4E1T, StableLM 2 1.6B and 12B",
    keys=DECODER_KEYS | words(
        "hidden_act layer_norm_eps use_qkv_bias qk_layernorm use_parallel_residual hidden_dropout"
    ),
    names=NameTable(
        modules={f"self_attn.{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"},
        heads_apart=frozenset({"self_attn.q_norm", "self_attn.k_norm"}),
    ),
)  # fmt: skip
