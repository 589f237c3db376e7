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
    """Where a logical tensor is stored: its row i is row ``start + step * i`` of tensor ``name``, which has ``rows`` of
    them (None: those of the logical tensor); ``transpose``: what is stored is the transposed tensor (Conv1D).

    ``expert``: (number, of how many), where the stored tensor has all experts along a further first axis.
    """

    name: str
    start: int = 0
    rows: int | None = None
    transpose: bool = False
    step: int = 1
    expert: tuple[int, int] | None = None

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored tensor, given the logical one's."""
        whole = logical if self.rows is None else (self.rows, *logical[1:])
        whole = whole[::-1] if self.transpose else whole
        return whole if self.expert is None else (self.expert[1], *whole)

    def view(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The form of the stored tensor, given its shape, in which ``slices`` are."""
        return stored

    def order(self, dims: int) -> tuple[int, ...]:
        """Axes of the logical tensor in the order in which the stored one has them."""
        return tuple(range(dims))[:: -1 if self.transpose else 1]

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where a box of the logical tensor, its axes in ``order``, is in the stored one."""
        rows, *rest = box.slices()
        first = self.start + rows.start * self.step
        last = self.start + (rows.stop - 1) * self.step if rows.stop > rows.start else first - 1
        found = (slice(first, last + 1, self.step), *rest)
        found = found[::-1] if self.transpose else found
        return found if self.expert is None else (slice(self.expert[0], self.expert[0] + 1), *found)


@dataclass(frozen=True)
class FusedExperts:
    """All experts of a layer in tensors [experts, inputs, outputs], biases in tensors [experts, outputs].

    Args:
        interleaved: output 2i is of the gate and 2i + 1 of up (gpt-oss); else the gate's outputs come first (Llama 4).
    """

    interleaved: bool = False

    def source(self, spec: ModelSpec, prefix: str, expert: int, projection: str, kind: str) -> HFSource:
        assert spec.moe is not None
        fused, outputs = "down_proj", None
        start, step = 0, 1
        if projection != "down_proj":
            fused, outputs = "gate_up_proj", 2 * spec.moe.ffn_hidden_size
            second = projection == "up_proj"
            start = int(second) * (1 if self.interleaved else spec.moe.ffn_hidden_size)
            step = 2 if self.interleaved else 1
        name = f"{prefix}.{fused}" + ("_bias" if kind == "bias" else "")
        return HFSource(name, start, outputs, kind == "weight", step, (expert, spec.moe.num_experts))


@dataclass(frozen=True)
class NameTable:
    """How a family calls the logical tensors.

    Args:
        layer: their decoder layer ``{}``.
        modules: logical module in a layer -> theirs, ``{}`` for the number of an expert; others have the same name.
        fused: their module in a layer -> the logical modules whose rows it holds, one after the other.
        transposed: their modules whose weights are stored transposed.
        experts: how they are stored, where not one by one.
        outside: logical tensor outside of the layers -> theirs; others have the same name.
    """

    layer: str = "model.layers.{}"
    modules: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    experts: FusedExperts | None = None
    outside: Mapping[str, str] = field(default_factory=dict)

    def source(self, spec: ModelSpec, name: str) -> HFSource:
        """The Hugging Face tensor that holds logical tensor ``name``."""
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            return HFSource(self.outside.get(name, name))
        layer, module, kind = found.groups()
        expert = _EXPERT.fullmatch(module)
        any_expert = module if expert is None else f"{expert[1]}.{{}}.{expert[3]}"
        if expert is not None and self.experts is not None:
            prefix = f"{self.layer.format(layer)}.{self.modules.get(expert[1], expert[1])}"
            return self.experts.source(spec, prefix, int(expert[2]), expert[3], kind)
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
