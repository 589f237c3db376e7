"""Buckets of the frozen weights that stages divide: gathered like others, and never changed.

A frozen tensor may be stored in fewer bits than it is computed in; what is divided are the bytes as they lie in memory,
in 4 bits those of whole blocks. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hetero_megatron.layout import Box, Layout
from hetero_megatron.plans.buckets import BUCKET_BYTES, Bucket, BucketMaker, backward_order, runs, tensor_holders
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.division import Division
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors
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


def frozen_buckets(plan: Plan, spec: ModelSpec, holders: Mapping[str, Layout] | None = None) -> tuple[Bucket, ...]:
    """Of each stage that divides them: they are gathered, and never change; ``holders``: of the tensors, if known."""
    if spec.lora is None or not plan.sharding_stages:
        return ()
    holders = tensor_holders(plan, spec) if holders is None else holders
    frozen = [t for t in logical_tensors(spec) if not t.trained]
    division, buckets = Division(plan), list[Bucket]()
    groups_of = {t.name: division.groups(t, holders[t.name]) for t in frozen}
    for group in dict.fromkeys(group for groups in groups_of.values() for group in groups):
        divided = [t for t in frozen if group in groups_of[t.name]]
        layouts = stored_layouts(divided, {t.name: division.only(holders[t.name], group) for t in divided})
        rows = [
            [(t.name, (t.wide, t.int8 or t.nf4, t.layer)) for t in segment]
            for segment in backward_order(t for t in divided if t.name in layouts)
        ]  # fmt: skip
        make = BucketMaker(plan, 4)
        for (_, in_bytes, segment), names in runs(rows, layouts, BUCKET_BYTES // 4):
            bucket = make(len(buckets), names, layouts, division.weights(group), segment)
            buckets.append(replace(bucket, trained=False, in_bytes=in_bytes))
    return tuple(buckets)
