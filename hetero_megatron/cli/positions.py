"""Sequences that are longer than what a model is made for, in commands that plan and predict."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.spec import ModelSpec


def stretched(model: ModelSpec, seq_length: int) -> tuple[ModelSpec, list[str]]:
    """The model with at least so many positions, if they are not learned, and a notice of the flag that training needs
    for that."""
    if seq_length <= model.max_position_embeddings or model.position != "rope":
        return model, []
    needs = f"training at {seq_length} needs --max-position-embeddings {seq_length}"
    notice = f"{model.name} is made for {model.max_position_embeddings} positions; {needs}"
    return replace(model, max_position_embeddings=seq_length), [notice]
