"""Buckets of the frozen weights that stages divide. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.layout import Layout
from hetero_megatron.plans.buckets import BUCKET_BYTES, Bucket, BucketMaker, backward_order, runs, tensor_holders
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.division import Division
from hetero_megatron.plans.stored_layouts import stored_layouts
from hetero_megatron.spec import ModelSpec, logical_tensors


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
