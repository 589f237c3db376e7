"""Logical tensor names <-> Hugging Face names, by the table of the model's family."""

from __future__ import annotations

from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.hf_names import HFSource


def hf_source(spec: ModelSpec, name: str) -> HFSource:
    """The Hugging Face tensor that holds logical tensor ``name``."""
    return FAMILIES[spec.hf_model_type].names.source(spec, name)


def name_table(spec: ModelSpec) -> dict[str, HFSource]:
    """All logical tensors of a model."""
    return {t.name: hf_source(spec, t.name) for t in logical_tensors(spec)}
