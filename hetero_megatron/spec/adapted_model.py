"""A model with adapters beside its frozen base: what may have them; how a base in few bits lies in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec.adapter_choice import Adapter, choices
from hetero_megatron.spec.adapter_modules import adapters
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
from hetero_megatron.spec.tensors import LogicalTensor, logical_tensors


def adapted(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """The model with adapters. UserError for a projection that it does not have."""
    experts = [name for name in lora.targets if name in MLP_TARGETS] if spec.moe is not None else []
    if lora.dropout and experts:
        raise UserError(
            f"adapters of experts ({experts[0]}) know no dropout, as in peft", field="dropout", value=lora.dropout,
            accepted=f"0, or targets other than {', '.join(MLP_TARGETS)}",
        )  # fmt: skip
    if lora.residual and experts:
        raise UserError(
            f"adapters of experts ({experts[0]}) know no such first values", field="residual", value=lora.residual,
            accepted=f"targets other than {', '.join(MLP_TARGETS)}",
        )  # fmt: skip
    if lora.dora and lora.dropout:
        raise UserError("adapters with DoRA know no dropout", field="dropout", value=lora.dropout, accepted="0")
    with_adapters = replace(spec, lora=lora)
    adapter_of = adapters(with_adapters)
    _fits_fused(with_adapters, adapter_of)
    if lora.base_dtype == "nf4":
        _fits_nf4(with_adapters)
    model_places = {adapter.place for adapter in adapter_of.values()}
    if missing_targets := [name for name in lora.targets if name not in {target for _, target in model_places}]:
        adaptable = {name for t in logical_tensors(spec.base) for name, _ in choices(spec.base, t)}
        named_with = next((a for a in adapter_of.values() if missing_targets[0] in _own_names(a)), None)
        problem = f"{spec.name} has no such projection"
        if named_with is not None:
            problem = f"is a part of {named_with.place[1]}, which is named, too"
        raise UserError(
            problem, field="targets", value=missing_targets[0],
            accepted=", ".join(name for name in EVERY_TARGET if name in adaptable),
        )  # fmt: skip
    for layer, target in ((n, name) for site in lora.sites for n in site.layers for name in site.targets):
        if (layer, target) not in model_places:
            raise UserError(
                f"layer {layer} of {spec.name} has no {target} that may have an adapter of its own", field="sites",
                value=f"{layer}:{target}", accepted=f"layers 0 to {spec.num_layers - 1}, none of experts",
            )  # fmt: skip
    return with_adapters


def _own_names(adapter: Adapter) -> list[str]:
    return [part.rpartition(".")[2] for part in adapter.parts] if adapter.fused else []


def _fits_fused(spec: ModelSpec, adapter_of: Mapping[str, Adapter]) -> None:
    """UserError for what adapters of several projections in one matrix, or of linear attention, do not know."""
    assert spec.lora is not None
    lora, fields = spec.lora, (("dora", "DoRA"), ("residual", "first values of the base"))
    for module, adapter in adapter_of.items():
        if not adapter.fused and ".linear_attn." not in module:
            continue
        for field, what in fields:
            if value := getattr(lora, field):
                raise UserError(
                    f"adapters of {adapter.place[1]}, several projections in one matrix or one of linear attention, "
                    f"know no {what}", field=field, value=value, accepted="other targets, or plain adapters",
                )  # fmt: skip
    if lora.base_dtype is not None and spec.hybrid:
        raise UserError(
            "models with linear attention, or with layers of one block, are not stored in few bits", field="base_dtype",
            value=lora.base_dtype, accepted="the dtype of the run",
        )  # fmt: skip


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
