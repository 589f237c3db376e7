"""GLM-4 (``glm``) and GLM-4-0414 (``glm4``): interleaved rotary pairs over half of each head, fused gate and up."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import DECODER_KEYS, Defaults, Family, decoder, silu_config
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_DEFAULTS = Defaults(
    positions=131072, kv_heads=2, kv_nullable=False, head_dim=128, eps=1.5625e-7, partial_rotary=0.5
)
_KEYS = DECODER_KEYS | words("hidden_act attention_bias")
_FUSED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


def _read(read: ConfigReader, model_type: str, name: str, **changes: Any) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    bias = read.flag("attention_bias", True)
    return decoder(read, model_type, name, _DEFAULTS, interleaved=True, qkv_bias=bias, **changes)


def _read_glm(read: ConfigReader, name: str) -> ModelSpec:
    return _read(read, "glm", name)


def _read_glm4(read: ConfigReader, name: str) -> ModelSpec:
    return _read(read, "glm4", name, norm_placement="pre_post")


def _write(spec: ModelSpec) -> dict[str, Any]:
    config = silu_config(spec) | {"attention_bias": spec.qkv_bias}
    return {"partial_rotary_factor": 1.0} | config  # absent means one half


GLM = Family("glm", "GlmForCausalLM", _KEYS, _read_glm, _write, NameTable(fused=_FUSED), "GLM-4-9B, GLM-Edge")
GLM4 = Family(
    "glm4", "Glm4ForCausalLM", _KEYS, _read_glm4, _write, examples="GLM-4-9B-0414, GLM-4-32B-0414",
    names=NameTable(
        fused=_FUSED,
        modules={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
)  # fmt: skip
