"""Which projections have which adapter. Where a family's files keep several projections in one matrix, an adapter of
that matrix has one A for all of them and, of B, the rows that are theirs, as peft has it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import EVERY_TARGET, MLP_TARGETS, Lora, Place
from hetero_megatron.spec.model_spec import ModelSpec


class Parameter(Protocol):
    """A logical tensor."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int | str: ...
    @property
    def per_expert(self) -> bool: ...


@dataclass(frozen=True)
class Adapter:
    """Of one projection.

    Attributes:
        place: its layer, and what targets call it: the family's module, where that is one of several projections or of
            linear attention, else the projection.
        parts: logical modules of the matrix that it is of, in model order; the first one has A.
        fused: files have them in one matrix, of whose adapter this is a part.
        rank, scale: how much B A counts.
    """

    place: Place
    parts: tuple[str, ...]
    fused: bool
    rank: int
    scale: float

    @property
    def first(self) -> str:
        return self.parts[0]


def choices(spec: ModelSpec, tensor: Parameter) -> list[tuple[str, str | None]]:
    """What targets may call a tensor of the base, as it would have an adapter: (target, the family's module, if that
    holds several projections, of which this is one; else None), the family's first."""
    module, _, kind = tensor.name.rpartition(".")
    projection = module.rpartition(".")[2]
    if kind != "weight" or not isinstance(tensor.layer, int) or not may_be_adapted(tensor, spec):
        return []
    if tensor.per_expert:
        return [(projection, None)] if projection in EVERY_TARGET else []
    from hetero_megatron.spec.families import FAMILIES  # only models with adapters need them all

    names = FAMILIES[spec.hf_model_type].names
    source = names.source(spec, tensor.name)
    stored = source.name.removesuffix(".weight")
    if any(stored.endswith(f".{name}") for name in names.unadapted):
        return []
    stored_projection, targets = stored.rpartition(".")[2], list[tuple[str, str | None]]()
    if source.rows is not None and not source.transpose and stored_projection in EVERY_TARGET:
        targets.append((stored_projection, stored))
    name = stored_projection if ".linear_attn." in module else projection
    if name in EVERY_TARGET and (name == projection or source == HFSource(source.name)):
        targets.append((name, None))
    return targets


def may_be_adapted(tensor: Parameter, spec: ModelSpec) -> bool:
    """Of a mixture of experts, adapters of the MLP are the routed experts': peft has no way to name these together with
    dense layers or what all tokens share."""
    return tensor.per_expert or spec.moe is None or tensor.name.split(".")[-2] not in MLP_TARGETS


def adapters_among(tensors: Iterable[Parameter], spec: ModelSpec, lora: Lora) -> Mapping[str, Adapter]:
    """By logical module, the adapters of the tensors of a base."""
    parts, place_of = dict[str, list[str]](), dict[str, tuple[Place, str | None]]()
    for tensor in tensors:
        module = tensor.name.rpartition(".")[0]
        for target, fused in choices(spec, tensor):
            if lora.site(tensor.layer, target, tensor.per_expert) is not None and isinstance(tensor.layer, int):
                parts.setdefault(fused or module, []).append(module)
                place_of[module] = (tensor.layer, target), fused
                break
    out = {}
    for module, ((layer, target), fused) in place_of.items():
        site = lora.site(layer, target, ".experts." in module)
        assert site is not None
        scale = site.alpha / (math.sqrt(site.rank) if lora.rslora else site.rank)
        out[module] = Adapter((layer, target), tuple(parts[fused or module]), fused is not None, site.rank, scale)
    return out
