"""Logical tensor names -> Hugging Face names, as data: one table per family (``families/``), for both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hetero_megatron.layout import Box
from hetero_megatron.spec.model_spec import ModelSpec

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")

_HEAD_NORM = re.compile(r"(.*_norm)\.(\d+)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


@dataclass(frozen=True)
class HFSource:
    """Where a logical tensor is stored: its row i is row ``start + step * i`` of tensor ``name``, which has ``rows`` of
    them (None: those of the logical tensor); ``transpose``: what is stored is the transposed tensor (Conv1D).

    ``expert``: (number, of how many), where the stored tensor has all experts along a further first axis. ``block``:
    only so many rows lie together, and the next ones begin ``period`` rows after them; 0: all do. ``width``: what is
    stored is this vector as a matrix of so many columns; 0: as it is. ``filters``: what is stored has a second axis of
    one channel (Conv1d). ``within``: so many axes of length 1 are before and after those of what is stored.
    """

    name: str
    start: int = 0
    rows: int | None = None
    transpose: bool = False
    step: int = 1
    expert: tuple[int, int] | None = None
    block: int = 0
    period: int = 0
    width: int = 0
    filters: bool = False
    within: tuple[int, int] = (0, 0)

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored tensor, given the logical one's."""
        if self.width:
            return (logical[0] // self.width, self.width)
        stored = logical if self.rows is None else (self.rows, *logical[1:])
        stored = stored[::-1] if self.transpose else stored
        stored = (stored[0], 1, *stored[1:]) if self.filters else stored
        stored = (*(1,) * self.within[0], *stored, *(1,) * self.within[1])
        return stored if self.expert is None else (self.expert[1], *stored)

    def view(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The form of the stored tensor, given its shape, in which ``slices`` are."""
        stored = stored[self.within[0] : len(stored) - self.within[1]]
        if self.filters:
            return (stored[0], *stored[2:])
        return (stored[0] * stored[1],) if self.width else stored

    def order(self, dims: int) -> tuple[int, ...]:
        """Axes of the logical tensor in the order in which the stored one has them."""
        return tuple(range(dims))[:: -1 if self.transpose else 1]

    def runs(self, box: Box) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Parts of a box: (its first axis' part, where that is in the stored tensor)."""
        if not self.block:
            yield slice(None), self.slices(box)
            return
        rows, *other_axes = box.slices()
        row = rows.start
        while row < rows.stop:
            end = min(rows.stop, (row // self.block + 1) * self.block)
            stored_row = self.start + row // self.block * self.period + row % self.block
            yield slice(row - rows.start, end - rows.start), (slice(stored_row, stored_row + end - row), *other_axes)
            row = end

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where a box of the logical tensor, its axes in ``order``, is in the stored one, if it lies together."""
        rows, *other_axes = box.slices()
        first_row = self.start + rows.start * self.step
        last_row = self.start + (rows.stop - 1) * self.step if rows.stop > rows.start else first_row - 1
        stored_slices = (slice(first_row, last_row + 1, self.step), *other_axes)
        stored_slices = stored_slices[::-1] if self.transpose else stored_slices
        return stored_slices if self.expert is None else (slice(self.expert[0], self.expert[0] + 1), *stored_slices)


@dataclass(frozen=True)
class FusedExperts:
    """All experts of a layer in tensors [experts, inputs, outputs], biases in tensors [experts, outputs].

    Args:
        interleaved: output 2i is of the gate and 2i + 1 of up (gpt-oss); else the gate's outputs come first (Llama 4).
        transposed: False: tensors [experts, outputs, inputs] (Qwen3.5, GraniteMoE).
        tensors: what that of gate and up is called, and that of down.
    """

    interleaved: bool = False
    transposed: bool = True
    tensors: tuple[str, str] = ("gate_up_proj", "down_proj")

    def source(self, spec: ModelSpec, prefix: str, expert: int, projection: str, kind: str) -> HFSource:
        assert spec.moe is not None
        start, step, outputs = 0, 1, None
        if projection != "down_proj":
            outputs = 2 * spec.moe.ffn_hidden_size
            second = projection == "up_proj"
            start = int(second) * (1 if self.interleaved else spec.moe.ffn_hidden_size)
            step = 2 if self.interleaved else 1
        name = f"{prefix}.{self.tensors[projection == 'down_proj']}" + ("_bias" if kind == "bias" else "")
        transpose = self.transposed and kind == "weight"
        return HFSource(name, start, outputs, transpose, step, (expert, spec.moe.num_experts))


@dataclass(frozen=True)
class NameTable:
    """How a family calls the logical tensors.

    Args:
        layer: their decoder layer ``{}``.
        modules: logical module in a layer -> theirs, ``{}`` for the number of an expert; others have the same name.
        fused: their module in a layer -> the logical modules whose rows it holds, one after the other.
        by_group: those of them with such rows of one group after the other -> which groups: of a key-value head with
            its queries, of a query head, or of a key head of linear attention with its value heads.
        alike: logical module -> another one, never in the same model, whose place in files it has.
        two_norms: logical norm -> theirs in layers whose attention and MLP take one input through norms of their own,
            where it is called otherwise there.
        heads_apart: logical modules whose vector is stored as a tensor for each head, ``{}`` in theirs for its number.
        head_rows: logical modules whose vector is stored as a matrix, with a row for each head.
        transposed: their modules whose weights are stored transposed; filters: as those of a Conv1d; within: with so
            many further axes of length 1 before and after.
        experts: how they are stored, where not one by one; stacked: how files may have them that store them together,
            though transformers writes them one by one; otherwise: parts of names -> what files may have there.
        outside: logical tensor outside of the layers -> theirs; others have the same name.
        unadapted: their modules that have no adapters, as peft refuses them.
        loaded: parts of names in files -> what transformers calls modules there, and peft adapters of them.
        experts_in: what transformers calls the block with the experts.
    """

    layer: str = "model.layers.{}"
    modules: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_group: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    two_norms: Mapping[str, str] = field(default_factory=dict)
    heads_apart: frozenset[str] = frozenset()
    head_rows: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    filters: frozenset[str] = frozenset()
    experts: FusedExperts | None = None
    stacked: FusedExperts | None = None
    otherwise: Mapping[str, str] = field(default_factory=dict)
    within: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    unadapted: frozenset[str] = frozenset()
    loaded: Mapping[str, str] = field(default_factory=dict)
    experts_in: str = "mlp"

    def in_transformers(self, name: str) -> str:
        """A name in files, as transformers' modules have it."""
        for part, other in self.loaded.items():
            name = name.replace(part, other)
        return name

    def source(self, spec: ModelSpec, name: str) -> HFSource:
        """The Hugging Face tensor that holds logical tensor ``name``."""
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return HFSource(self.outside.get(name, name))
        layer, module, kind = match.groups()
        module = self.alike.get(module, module)
        expert = _EXPERT.fullmatch(module)
        any_expert = module if expert is None else f"{expert[1]}.{{}}.{expert[3]}"
        if expert is not None and self.experts is not None:
            prefix = f"{self.layer.format(layer)}.{self.modules.get(expert[1], expert[1])}"
            return self.experts.source(spec, prefix, int(expert[2]), expert[3], kind)
        module_name, start, rows, block, period = self.modules.get(any_expert, any_expert), 0, None, 0, 0
        head = _HEAD_NORM.fullmatch(module)
        if head is not None:
            module_name = self.modules[head[1]].format(head[2])
        if spec.parallel_block == "two_norms":
            module_name = self.two_norms.get(module, module_name)
        module_name = module_name if expert is None else module_name.format(expert[2])
        for fused, fused_modules in self.fused.items():
            if module in fused_modules:
                sizes = [_rows(spec, fused_module) for fused_module in fused_modules]
                module_name, rows = fused, sum(sizes)
                if fused in self.by_group:
                    sizes = [size // _groups(spec, self.by_group[fused]) for size in sizes]
                    block, period = sizes[fused_modules.index(module)], sum(sizes)
                start = sum(sizes[: fused_modules.index(module)])
        full = f"{self.layer.format(layer)}.{module_name}" + (f".{kind}" if kind else "")
        width = spec.head_dim if module in self.head_rows else 0
        transpose = module_name in self.transposed and kind == "weight"
        return HFSource(
            full, start, rows, transpose, block=block, period=period, width=width,
            filters=module_name in self.filters and kind == "weight", within=self.within.get(module_name, (0, 0)),
        )  # fmt: skip


def _groups(spec: ModelSpec, kind: str) -> int:
    """How many there are of what ``NameTable.by_group`` names."""
    if kind == "key_heads":
        assert spec.delta is not None
        return spec.delta.key_heads
    return spec.num_kv_heads if kind == "kv_heads" else spec.num_heads


def _rows(spec: ModelSpec, module: str) -> int:
    """Output features of a projection, or features of a convolution."""
    if module.startswith("linear_attn."):
        delta = spec.delta
        assert delta is not None
        kinds = {"qk": delta.key_width, "vz": delta.value_width, "ba": delta.value_heads}
        return next(size for letters, size in kinds.items() if module.split(".")[1][0] in letters)
    sizes = {
        "q_proj": spec.num_heads * spec.head_dim, "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim, "gate_proj": spec.ffn_hidden_size,
        "up_proj": spec.ffn_hidden_size, "g_proj": spec.num_heads * spec.head_dim,
    }  # fmt: skip
    return sizes[module.rpartition(".")[2]]
