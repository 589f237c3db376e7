"""Logical tensor names <-> Hugging Face names, by the table of the model's family."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from hetero_megatron.layout import Box
from hetero_megatron.spec import Axis, LogicalTensor, ModelSpec, logical_tensors
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.families.family import Wrapper
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import LATENT_TARGETS, MLP_TARGETS, all_linear
from hetero_megatron.spec.tensors import expert_tensor
from hetero_megatron.utils.text import listed


def hf_source(spec: ModelSpec, name: str) -> HFSource:
    """The Hugging Face tensor that holds stored tensor ``name``."""
    return FAMILIES[spec.hf_model_type].names.source(spec, name)


def module_names(spec: ModelSpec) -> dict[str, str]:
    """Projection -> what the family calls it, of those that have a matrix of their own in its files."""
    modules = {}
    for name in all_linear(spec.gated) + (LATENT_TARGETS if spec.mla is not None else ()):
        block = "mlp" if name in MLP_TARGETS else "self_attn"
        source = hf_source(spec, f"model.layers.0.{block}.{name}.weight")
        if source == HFSource(source.name):
            modules[name] = source.name.split(".")[-2]
    return modules


def stored_tensors(spec: ModelSpec) -> Iterator[tuple[LogicalTensor, LogicalTensor]]:
    """(tensor as files have it, logical tensor that it is of), in model order: those over experts are one per expert in
    files, norms of some families one per head, all others are the same."""
    for tensor in logical_tensors(spec):
        for stored, _ in stored_boxes(spec, tensor, Box.whole(tensor.shape)):
            yield stored, tensor


def repeated_tensors(spec: ModelSpec) -> dict[str, str]:
    """What released files repeat for each layer that predicts further tokens, by their name -> the logical tensor that
    it is a copy of."""
    layer = FAMILIES[spec.hf_model_type].names.layer
    embedding = "model.embed_tokens.weight"
    head = embedding if spec.tied else "lm_head.weight"
    parts = {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
    return {f"{layer.format(i)}.{part}": original for i in spec.predictions for part, original in parts.items()}


def stored_boxes(spec: ModelSpec, tensor: LogicalTensor, box: Box) -> Iterator[tuple[LogicalTensor, Box]]:
    """The boxes of stored tensors that a box of a logical tensor is made of, along its first axis: itself, or one per
    expert or head."""
    if tensor.per_expert:
        expert_box = Box(box.lo[1:], box.hi[1:])
        yield from ((expert_tensor(tensor, e), expert_box) for e in range(box.lo[0], box.hi[0]))
    elif heads_apart(spec, tensor):
        (lo,), (hi,), d = box.lo, box.hi, spec.head_dim
        module = tensor.name.removesuffix(".weight")
        for head in range(lo // d, -(-hi // d)):
            stored = replace(tensor, name=f"{module}.{head}.weight", shape=(d,), axes=(Axis("head_dim"),))
            yield stored, Box((max(lo - head * d, 0),), (min(hi - head * d, d),))
    else:
        yield tensor, box


def heads_apart(spec: ModelSpec, tensor: LogicalTensor) -> bool:
    """Files have a tensor of it for each head."""
    suffixes = FAMILIES[spec.hf_model_type].names.heads_apart
    return bool(suffixes) and tensor.name.removesuffix(".weight").endswith(tuple(suffixes))


def name_table(spec: ModelSpec) -> dict[str, HFSource]:
    """All stored tensors of a model."""
    return {stored.name: hf_source(spec, stored.name) for stored, _ in stored_tensors(spec)}


# Components anywhere in a name, and prefixes of all names -> who wraps models so.
_INSIDE = {
    "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}  # fmt: skip
_PREFIXES = {
    "module.": "DistributedDataParallel", "_forward_module.": "Lightning", "base_model.model.": "PEFT",
    "model.": "a module around the model",
}  # fmt: skip
_ADAPTERS = ("lora_", "base_layer", "modules_to_save", "original_module", "ia3_", "vera_", "boft_", "hada_", "lokr_")


@dataclass(frozen=True)
class Names:
    """Attributes:
        plain: name in the files -> the family's.
        taken_off: wrappers, each with who puts it there.
        added: the base's prefix that the names lack, or "".
        clash: two names in the files that would be one, or None.
        adapters: names of adapters beside the weights that they belong to."""

    plain: Mapping[str, str]
    taken_off: tuple[str, ...] = ()
    added: str = ""
    clash: tuple[str, str] | None = None
    adapters: tuple[str, ...] = ()

    @property
    def changed(self) -> str:
        """How the names differ from the family's; "": they do not."""
        parts = [f"without {' and '.join(self.taken_off)}"] if self.taken_off else []
        parts += [f"with {self.added} before them (a base model, saved without its head)"] if self.added else []
        return ", ".join(parts)


def plain_names(names: Collection[str], layer: str, head: str, outer: Wrapper | None = None) -> Names:
    """The names that a family would use.

    Args:
        layer: the family's name of a layer, such as ``model.layers.{}``.
        head: its name of the head, which no base has.
        outer: the model of more than language that it may be a part of; None: there is none.
    """
    adapters = tuple(n for n in names if any(part.startswith(_ADAPTERS) for part in n.split(".")))
    renamed, removed = {name: name for name in names}, dict[str, None]()
    for part, wrapper in _INSIDE.items():
        if any(part in name.split(".") for name in renamed.values()):
            renamed = {raw: ".".join(p for p in name.split(".") if p != part) for raw, name in renamed.items()}
            removed[f"{part}. ({wrapper})"] = None
    base, _, layers_name = layer.removesuffix(".{}").partition(".")
    removable = (f"{base}.{layers_name}.", f"{layers_name}.", *([outer.prefix] if outer is not None else []))
    while start := _common(renamed.values(), removable, f"{base}."):
        renamed = {raw: name.removeprefix(start) for raw, name in renamed.items()}
        removed[f"{start} ({_PREFIXES[start]})"] = None
    added_prefix = ""
    values = renamed.values()
    if any(n.startswith(f"{layers_name}.") for n in values) and not any(n.startswith(f"{base}.") for n in values):
        added_prefix = f"{base}."
        renamed = {raw: name if name == head else added_prefix + name for raw, name in renamed.items()}
    if outer is not None and outer.plain:
        renamed = {raw: re.sub(f"^{re.escape(outer.prefix)}", outer.plain, name) for raw, name in renamed.items()}
    raw_names: dict[str, str] = {}
    clash = next(((raw_names[n], raw) for raw, n in renamed.items() if raw_names.setdefault(n, raw) != raw), None)
    return Names(renamed, tuple(removed), added_prefix, clash, adapters)


def _common(names: Collection[str], family_prefixes: tuple[str, ...], base: str) -> str:
    """A wrapper that all names begin with, or "".

    Args:
        family_prefixes: how names of the family begin, with and without its ``base``, which may be called as a wrapper
            is.
    """
    for start in _PREFIXES:
        after_start = tuple(start + begin for begin in family_prefixes if start != base or begin.startswith(base))
        if all(n.startswith(start) for n in names) and any(n.startswith(after_start) for n in names):
            return start
    return ""


def unmerged(names: Names) -> str:
    """What a directory with adapters in it holds, for its refusal."""
    return f"holds adapters of PEFT's that are not merged into the weights ({listed(names.adapters, 2)})"
