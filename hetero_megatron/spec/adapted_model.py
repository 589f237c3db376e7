"""A model with adapters beside its frozen base: what may have them; how a base in few bits lies in memory."""

from __future__ import annotations

import math
from dataclasses import replace

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec.lora import (
    EVERY_TARGET,
    MLP_TARGETS,
    NF4_BLOCK,
    NF4_BYTES,
    NF4_GROUP,
    NF4_TABLES,
    Lora,
    nf4_blocks,
)
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.tensors import LogicalTensor, logical_tensors, may_be_adapted


def adapted(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """The model with adapters. UserError for a projection that it does not have."""
    experts = [name for name in lora.targets if name in MLP_TARGETS] if spec.moe is not None else []
    if lora.dropout and experts:
        raise UserError(
            f"adapters of experts ({experts[0]}) know no dropout, as in peft", field="dropout", value=lora.dropout,
            accepted=f"0, or targets other than {', '.join(MLP_TARGETS)}",
        )  # fmt: skip
    if lora.dora and experts:
        raise UserError(
            f"adapters of experts ({experts[0]}) know no DoRA", field="dora", value=lora.dora,
            accepted=f"targets other than {', '.join(MLP_TARGETS)}",
        )  # fmt: skip
    if lora.residual and experts:
        raise UserError(
            f"adapters of experts ({experts[0]}) know no such first values", field="residual", value=lora.residual,
            accepted=f"targets other than {', '.join(MLP_TARGETS)}",
        )  # fmt: skip
    if lora.dora and lora.dropout:
        raise UserError("adapters with DoRA know no dropout", field="dropout", value=lora.dropout, accepted="0")
    with_adapters = replace(spec, lora=lora)
    if lora.base_dtype == "nf4":
        _fits_nf4(with_adapters)
    model_places = {(t.layer, t.name.split(".")[-3]) for t in logical_tensors(with_adapters) if t.trained}
    if missing_targets := [name for name in lora.targets if name not in {target for _, target in model_places}]:
        adaptable = {t.name.split(".")[-2] for t in logical_tensors(spec.base) if may_be_adapted(t, spec)}
        raise UserError(
            f"{spec.name} has no such projection", field="targets", value=missing_targets[0],
            accepted=", ".join(name for name in EVERY_TARGET if name in adaptable),
        )  # fmt: skip
    for layer, target in ((n, name) for site in lora.sites for n in site.layers for name in site.targets):
        if (layer, target) not in model_places:
            raise UserError(
                f"layer {layer} of {spec.name} has no {target} that may have an adapter of its own", field="sites",
                value=f"{layer}:{target}", accepted=f"layers 0 to {spec.num_layers - 1}, none of experts",
            )  # fmt: skip
    return with_adapters


def evenly_adapted(spec: ModelSpec) -> ModelSpec:
    """With the largest rank in every layer, where adapters of layers differ: for what a stage has at most."""
    assert spec.lora is not None
    if not spec.lora.sites:
        return spec
    rank = max(spec.lora.rank, *(site.rank for site in spec.lora.sites))
    return replace(spec, lora=replace(spec.lora, rank=rank, sites=()))


SCALE_BYTES = 4  # fp32


def stored_bytes(tensor: LogicalTensor, box: Box) -> int:
    """Of a rank's box of a tensor that is stored in 8 or 4 bits, with its scales."""
    if tensor.int8:
        return box.size + SCALE_BYTES * math.prod(box.shape[:-1])
    groups = -(-tensor.size // (NF4_BLOCK * NF4_GROUP))
    return stored_box(tensor, box).size + SCALE_BYTES * (groups + 1 + NF4_TABLES)


def stored_box(tensor: LogicalTensor, box: Box) -> Box:
    """A box of a tensor in the array that has its values in memory: itself, but of one in 4 bits the bytes of all
    blocks in which some of its columns are."""
    if not tensor.nf4:
        return box
    a, b = nf4_blocks(box.lo[1], box.hi[1])
    return Box((box.lo[0], a * NF4_BYTES), (box.hi[0], b * NF4_BYTES))


def gathered_bytes(tensor: LogicalTensor, item: int) -> int:
    """Of a whole tensor with ``item`` bytes per element, or in few bits: what ranks that divide it send each other."""
    stored = stored_box(tensor, Box.whole(tensor.shape)).size
    return stored if tensor.int8 or tensor.nf4 else stored * item


def logical_box(tensor: LogicalTensor, stored: Box) -> Box:
    """The box of a tensor that one of whole blocks in memory stands for."""
    if not tensor.nf4:
        return stored
    a, b = (column // NF4_BYTES * NF4_BLOCK for column in (stored.lo[1], stored.hi[1]))
    return Box((stored.lo[0], a), (stored.hi[0], b))


def _fits_nf4(spec: ModelSpec) -> None:
    """UserError for a model of which not all frozen projections are rows of whole blocks, or with what knows none."""
    assert spec.lora is not None
    problem, accepted = "", "int8"
    if spec.moe is not None:
        problem = "matrices of experts are not stored in 4 bits"
    elif spec.lora.dora:
        problem = "DoRA knows no weights in 4 bits"
    for tensor in (t for t in logical_tensors(spec) if t.nf4 and t.shape[-1] % NF4_BLOCK):
        row = f"rows of {tensor.name}, of {tensor.shape[-1]:,} elements"
        problem = problem or f"blocks of {NF4_BLOCK} do not divide the {row}"
    if problem:
        raise UserError(problem, field="base_dtype", value="nf4", accepted=accepted)
