"""Logical tensor names -> Hugging Face names, as data: one table per family (``families/``), for both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_megatron.layout import Box
from hetero_megatron.spec.model_spec import ModelSpec

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


@dataclass(frozen=True)
class HFSource:
    """Where a logical tensor is stored: rows ``start`` and following of tensor ``name``, which has ``rows`` of them
    (None: those of the logical tensor); ``transpose``: what is stored is the transposed tensor (Conv1D)."""

    name: str
    start: int = 0
    rows: int | None = None
    transpose: bool = False

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored tensor, given the logical one's."""
        whole = logical if self.rows is None else (self.rows, *logical[1:])
        return whole[::-1] if self.transpose else whole

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where a box of the logical tensor is in the stored one (to be transposed where ``transpose`` says so)."""
        rows, *rest = box.slices()
        found = (slice(rows.start + self.start, rows.stop + self.start), *rest)
        return found[::-1] if self.transpose else found


@dataclass(frozen=True)
class NameTable:
    """How a family calls the logical tensors.

    Args:
        layer: their decoder layer ``{}``.
        modules: logical module in a layer -> theirs, ``{}`` for the number of an expert; others have the same name.
        fused: their module in a layer -> the logical modules whose rows it holds, one after the other.
        transposed: their modules whose weights are stored transposed.
        outside: logical tensor outside of the layers -> theirs; others have the same name.
    """

    layer: str = "model.layers.{}"
    modules: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    outside: Mapping[str, str] = field(default_factory=dict)

    def source(self, spec: ModelSpec, name: str) -> HFSource:
        """The Hugging Face tensor that holds logical tensor ``name``."""
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            return HFSource(self.outside.get(name, name))
        layer, module, kind = found.groups()
        expert = _EXPERT.fullmatch(module)
        any_expert = module if expert is None else f"{expert[1]}.{{}}.{expert[3]}"
        theirs, start, rows = self.modules.get(any_expert, any_expert), 0, None
        theirs = theirs if expert is None else theirs.format(expert[2])
        for fused, parts in self.fused.items():
            if module in parts:
                sizes = [_rows(spec, part) for part in parts]
                theirs, start, rows = fused, sum(sizes[: parts.index(module)]), sum(sizes)
        full = f"{self.layer.format(layer)}.{theirs}" + (f".{kind}" if kind else "")
        return HFSource(full, start, rows, theirs in self.transposed and kind == "weight")


def _rows(spec: ModelSpec, module: str) -> int:
    """Output features of a projection."""
    sizes = {
        "q_proj": spec.num_heads * spec.head_dim, "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim, "gate_proj": spec.ffn_hidden_size,
        "up_proj": spec.ffn_hidden_size,
    }  # fmt: skip
    return sizes[module.rpartition(".")[2]]
