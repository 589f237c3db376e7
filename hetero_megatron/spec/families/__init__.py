"""The model families that are supported: one table each, in a file of its own or with its close relatives."""

from __future__ import annotations

from hetero_megatron.spec.families import gpt2, llama, mistral, moe, qwen
from hetero_megatron.spec.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (llama.FAMILY, mistral.MISTRAL, mistral.MINISTRAL, qwen.QWEN2, qwen.QWEN3, gpt2.FAMILY,
                   moe.MIXTRAL, moe.QWEN2_MOE, moe.QWEN3_MOE, moe.OLMOE)
}

__all__ = ["FAMILIES", "Family"]
