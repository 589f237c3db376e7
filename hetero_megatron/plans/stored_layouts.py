"""Layouts of frozen tensors as these lie in memory: of those in 4 bits, of the bytes of their blocks. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetero_megatron.layout import Box, Layout
from hetero_megatron.spec import LogicalTensor
from hetero_megatron.spec.adapted_model import logical_box, stored_box


def stored_layouts(tensors: Iterable[LogicalTensor], holders: Mapping[str, Layout]) -> dict[str, Layout]:
    """Holders of some tensors as these lie in memory; equal layers share layouts. Those in 4 bits are left out where a
    rank has a part of a block: it would own columns whose adapter others have."""
    by_layout: dict[tuple[int, bool], Layout | None] = {}
    stored: dict[str, Layout] = {}
    for tensor in tensors:
        layout = holders[tensor.name]
        key = id(layout), tensor.nf4
        if key not in by_layout:
            by_layout[key] = _in_bytes(tensor, layout) if tensor.nf4 else layout
        if (stored_layout := by_layout[key]) is not None:
            stored[tensor.name] = stored_layout
    return stored


def _in_bytes(tensor: LogicalTensor, layout: Layout) -> Layout | None:
    """None: a rank has a part of a block."""
    boxes = {rank: tuple(stored_box(tensor, box) for box in layout.of(rank)) for rank in layout.ranks}
    if any(tuple(logical_box(tensor, box) for box in boxes[rank]) != layout.of(rank) for rank in layout.ranks):
        return None
    return Layout(stored_box(tensor, Box.whole(tensor.shape)).hi, boxes)
