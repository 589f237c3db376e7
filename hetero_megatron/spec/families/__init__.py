"""The model families that are supported: one table each, in a file of its own or with its close relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.spec.families import (
    cohere,
    deepseek,
    exaone,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    kimi,
    layer_norm,
    llama,
    llama4,
    mamba_hybrids,
    mistral,
    mixtral,
    nemotron_h,
    olmo,
    phi3,
    qwen,
    qwen3_5,
    qwen_next,
    smollm3,
)
from hetero_megatron.spec.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.LLAMA, mistral.MISTRAL, mistral.MINISTRAL, mistral.MINISTRAL3, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA,
        gemma.GEMMA2, gemma.GEMMA3, phi3.FAMILY, olmo.OLMO2, olmo.OLMO3, smollm3.FAMILY, glm.GLM, glm.GLM4,
        granite.FAMILY, gpt2.FAMILY, mixtral.MIXTRAL, mixtral.QWEN2_MOE, mixtral.QWEN3_MOE, mixtral.OLMOE,
        qwen_next.FAMILY, qwen3_5.QWEN3_5, qwen3_5.QWEN3_5_MOE, kimi.FAMILY,
        gpt_oss.FAMILY, llama4.FAMILY, deepseek.DEEPSEEK_V2, deepseek.DEEPSEEK_V3, glm.GLM4_MOE, glm.DOTS1,
        llama.ARCEE, llama.SEED_OSS, llama.HELIUM, llama.ERNIE, exaone.FAMILY,
        layer_norm.STARCODER2, layer_norm.NEMOTRON, gpt_neox.GPT_NEOX, gpt_neox.GPTJ, gpt_neox.PHI, falcon.FAMILY,
        cohere.COHERE, cohere.COHERE2, layer_norm.STABLELM, mamba_hybrids.GRANITE_HYBRID,
        mamba_hybrids.BAMBA, nemotron_h.FAMILY,
    )  # fmt: skip
}

_WRAPPED = {family.inside.model_type: family for family in FAMILIES.values() if family.inside is not None}


def wrapped_family(config: Mapping[str, Any]) -> Family | None:
    """Of the language model in a model of more than language; None for any other configuration."""
    kind = config.get("model_type")
    return _WRAPPED.get(kind) if isinstance(kind, str) else None


__all__ = ["FAMILIES", "Family", "wrapped_family"]
