"""Logical tensor names <-> Hugging Face names, by the table of the model's family."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.tensors import expert_tensor


def hf_source(spec: ModelSpec, name: str) -> HFSource:
    """The Hugging Face tensor that holds stored tensor ``name``."""
    return FAMILIES[spec.hf_model_type].names.source(spec, name)


def stored_tensors(spec: ModelSpec) -> Iterator[tuple[LogicalTensor, LogicalTensor]]:
    """(tensor as files have it, logical tensor that it is of), in model order: those over experts are one per expert in
    files, all others are the same."""
    for tensor in logical_tensors(spec):
        if tensor.per_expert:
            yield from ((expert_tensor(tensor, e), tensor) for e in range(tensor.shape[0]))
        else:
            yield tensor, tensor


def stored_boxes(tensor: LogicalTensor, box: Box) -> Iterator[tuple[LogicalTensor, Box]]:
    """The boxes of stored tensors that a box of a logical tensor is made of: itself, or one per expert."""
    if tensor.per_expert:
        inside = Box(box.lo[1:], box.hi[1:])
        yield from ((expert_tensor(tensor, e), inside) for e in range(box.lo[0], box.hi[0]))
    else:
        yield tensor, box


def name_table(spec: ModelSpec) -> dict[str, HFSource]:
    """All stored tensors of a model."""
    return {stored.name: hf_source(spec, stored.name) for stored, _ in stored_tensors(spec)}
