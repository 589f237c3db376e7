"""Granite 3 (dense): Llama with factors of embedding, scores, residual sums and logits."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import DECODER_KEYS, Defaults, Family, decoder, head_sizes, silu_config
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_DEFAULTS = Defaults(positions=2048)


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    bias, scale = read.flag("attention_bias"), read.positive("attention_multiplier", 1.0)
    return decoder(
        read, "granite", name, _DEFAULTS, qkv_bias=bias, out_bias=bias, mlp_bias=read.flag("mlp_bias"),
        embed_scale=read.positive("embedding_multiplier", 1.0),
        residual_scale=read.positive("residual_multiplier", 1.0),
        logit_scale=1 / read.positive("logits_scaling", 1.0),
        attn_scale=None if scale == head_sizes(read, _DEFAULTS)[2] ** -0.5 else scale,
    )  # fmt: skip


def _write(spec: ModelSpec) -> dict[str, Any]:
    return silu_config(spec) | {
        "attention_bias": spec.qkv_bias and spec.out_bias, "mlp_bias": spec.mlp_bias,
        "embedding_multiplier": spec.embed_scale, "residual_multiplier": spec.residual_scale,
        "logits_scaling": 1 / spec.logit_scale,
        "attention_multiplier": spec.head_dim**-0.5 if spec.attn_scale is None else spec.attn_scale,
    }  # fmt: skip


FAMILY = Family(
    "granite", "GraniteForCausalLM", read=_read, write=_write, examples="Granite 3.0 to 3.3 dense, 4.0 micro base",
    keys=DECODER_KEYS | words(
        "hidden_act attention_bias mlp_bias embedding_multiplier logits_scaling residual_multiplier"
        " attention_multiplier"
    ),
)  # fmt: skip
