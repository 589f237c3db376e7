"""The model families that are supported: one table each, in a file of its own or with its close relatives."""

from __future__ import annotations

from hetero_megatron.spec.families import (
    deepseek,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral,
    moe,
    olmo,
    phi3,
    qwen,
    smollm3,
)
from hetero_megatron.spec.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY, mistral.MISTRAL, mistral.MINISTRAL, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA2, gemma.GEMMA3,
        phi3.FAMILY, olmo.OLMO2, olmo.OLMO3, smollm3.FAMILY, glm.GLM, glm.GLM4, granite.FAMILY, gpt2.FAMILY,
        moe.MIXTRAL, moe.QWEN2_MOE, moe.QWEN3_MOE, moe.OLMOE, gpt_oss.FAMILY, deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V3,
    )  # fmt: skip
}

__all__ = ["FAMILIES", "Family"]
