"""Which projections have which adapter. Where a family's files keep several projections in one matrix, an adapter of
that matrix has one A for all of them and, of B, the rows that are theirs, as peft has it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import EVERY_TARGET, FEW_BITS_TARGETS, Lora, Place, all_linear
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.tensors import ADAPTER_RANK, MAGNITUDE, LogicalTensor, logical_tensors, may_be_adapted


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


def choices(spec: ModelSpec, tensor: LogicalTensor) -> list[tuple[str, str | None]]:
    """What targets may call a tensor of the base, as it would have an adapter: (target, the family's module, if that
    holds several projections, of which this is one; else None), the family's first."""
    module, _, kind = tensor.name.rpartition(".")
    own = module.rpartition(".")[2]
    if kind != "weight" or not isinstance(tensor.layer, int) or not may_be_adapted(tensor, spec):
        return []
    if tensor.per_expert:
        return [(own, None)] if own in EVERY_TARGET else []
    names = FAMILIES[spec.hf_model_type].names
    source = names.source(spec, tensor.name)
    stored = source.name.removesuffix(".weight")
    if any(stored.endswith(f".{name}") for name in names.unadapted):
        return []
    theirs, found = stored.rpartition(".")[2], list[tuple[str, str | None]]()
    if source.rows is not None and not source.transpose and theirs in EVERY_TARGET:
        found.append((theirs, stored))
    name = theirs if ".linear_attn." in module else own
    if name in EVERY_TARGET and (name == own or source == HFSource(source.name)):
        found.append((name, None))
    return found


@lru_cache(maxsize=64)
def adapters(spec: ModelSpec) -> Mapping[str, Adapter]:
    """By logical module, those that a model has."""
    lora = spec.lora
    if lora is None:
        return {}
    base, parts, found = spec.base, dict[str, list[str]](), dict[str, tuple[Place, str | None]]()
    for tensor in logical_tensors(base):
        module = tensor.name.rpartition(".")[0]
        for target, fused in choices(base, tensor):
            if lora.site(tensor.layer, target, tensor.per_expert) is not None and isinstance(tensor.layer, int):
                parts.setdefault(fused or module, []).append(module)
                found[module] = (tensor.layer, target), fused
                break
    out = {}
    for module, ((layer, target), fused) in found.items():
        site = lora.site(layer, target, ".experts." in module)
        assert site is not None
        scale = site.alpha / (math.sqrt(site.rank) if lora.rslora else site.rank)
        out[module] = Adapter((layer, target), tuple(parts[fused or module]), fused is not None, site.rank, scale)
    return out


def with_adapters(tensors: Iterable[LogicalTensor], spec: ModelSpec, lora: Lora) -> Iterator[LogicalTensor]:
    """The frozen base, of which projections may be in 8 bits, and after each adapted matrix its A, unless one before it
    has it, and B, which are cut where it is; of the experts of a layer, one of each per expert. With DoRA also the
    lengths of its rows."""
    found = adapters(spec)
    for tensor in tensors:
        module, _, kind = tensor.name.rpartition(".")
        in_few_bits = kind == "weight" and module.rpartition(".")[2] in FEW_BITS_TARGETS
        int8, nf4 = (in_few_bits and lora.base_dtype == name for name in ("int8", "nf4"))
        yield replace(tensor, trained=False, int8=int8, nf4=nf4)
        adapter = found.get(module) if kind == "weight" else None
        if adapter is None:
            continue
        (*experts, outputs, inputs), (*expert_axes, rows, columns) = tensor.shape, tensor.axes
        for name, shape, axes in (
            ("lora_A", (adapter.rank, inputs), (ADAPTER_RANK, columns)),
            ("lora_B", (outputs, adapter.rank), (rows, ADAPTER_RANK)),
        ):  # fmt: skip
            if name == "lora_B" or adapter.first == module:
                yield LogicalTensor(f"{module}.{name}.weight", (*experts, *shape), (*expert_axes, *axes), tensor.layer)
        if lora.dora:
            yield LogicalTensor(f"{module}.{MAGNITUDE}.weight", (outputs,), (rows,), tensor.layer)


def all_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Every projection that may have an adapter, as peft would call them: what files keep together is one."""
    names = {name for tensor in logical_tensors(spec.base) for name, _ in choices(spec.base, tensor)[:1]}
    return tuple(name for name in EVERY_TARGET if name in names)


def default_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Every projection of a model: by their own names, but of a hybrid, in whose layers they differ, as peft calls
    them."""
    return all_modules(spec) if spec.hybrid else all_linear(spec.gated)
