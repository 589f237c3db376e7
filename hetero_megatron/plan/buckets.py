"""Who holds and who owns each parameter, and in which buckets gradients are synchronised. No torch.

A raw gradient is a partial sum on every rank that holds a copy. Each element has one owner, which sums the
holders' gradients, counts the element in the norm, updates it and sends it back. A bucket is a run of tensors in
backward order with the same group of holders; one ragged all-to-all per bucket and direction moves everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.layout import Layout, assign_owners
from hetero_megatron.plan.canonical import Plan
from hetero_megatron.plan.context_plan import context_groups
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors, shares, stage_tensors, tensor_box

WHOLE_BYTES = 64 << 10  # smaller tensors have one owner: splitting them costs more messages than it saves bytes
BUCKET_BYTES = 32 << 20
IN_FLIGHT = 2  # buckets under way at once: what is packed and received for them is extra memory


@dataclass(frozen=True)
class Bucket:
    """Tensors synchronised together: ``names`` in backward order, ``ranks`` (holders) ascending."""

    index: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    holders: Mapping[str, Layout]
    owners: Mapping[str, Layout]


def tensor_holders(plan: Plan, spec: ModelSpec) -> dict[str, Layout]:
    """For every logical tensor, which box each rank of the plan holds; layers on the same stages share layouts."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    of_layer: dict[int, list[int]] = defaultdict(list)
    for at, stage in enumerate(stages):
        for layer in stage.layer_indices():
            of_layer[layer].append(at)
    split = {u.tp_split: shares(spec, u.tp_split) for stage in stages for u in stage.units}
    layouts: dict[tuple[object, ...], Layout] = {}
    out: dict[str, Layout] = {}
    place = 0  # of a tensor in its layer
    before: int | str | None = None
    for tensor in logical_tensors(spec):
        place = place + 1 if tensor.layer == before else 0
        before = tensor.layer
        if isinstance(tensor.layer, int):
            at_stages = of_layer[tensor.layer]
        else:
            at_stages = [i for i, s in enumerate(stages) if tensor in stage_tensors(spec, (), s.embed, s.head)]
        key = ("layer" if isinstance(tensor.layer, int) else tensor.layer, place, tuple(at_stages))
        if key not in layouts:
            boxes = {}
            for unit in (u for i in at_stages for u in stages[i].units):
                for rank, share in zip(unit.ranks, split[unit.tp_split], strict=True):
                    boxes[rank] = (tensor_box(tensor, share),)
            layouts[key] = Layout(tensor.shape, boxes)
        out[tensor.name] = layouts[key]
    return out


def backward_order(tensors: tuple[LogicalTensor, ...]) -> list[list[LogicalTensor]]:
    """Segments (head, last layer, …, first layer, embedding) in the order in which their gradients are complete."""
    segments: dict[float, list[LogicalTensor]] = defaultdict(list)
    for tensor in tensors:
        key = {"head": float("-inf"), "embed": float("inf")}.get(str(tensor.layer))
        segments[-float(tensor.layer) if key is None else key].append(tensor)
    return [segments[key] for key in sorted(segments)]


def make_buckets(
    plan: Plan, spec: ModelSpec, bucket_bytes: int = BUCKET_BYTES, itemsize: int = 4
) -> tuple[Bucket, ...]:
    """The same buckets on every rank, computed without talking."""
    holders = tensor_holders(plan, spec)
    weights = {rank: float(s.optimizer.share) for p in plan.pipelines for s in p.stages for rank in s.ranks}
    runs: list[tuple[tuple[int, ...], list[str], int]] = []
    for segment in backward_order(logical_tensors(spec)):
        for name in (t.name for t in segment):
            ranks = holders[name].ranks
            size = max(holders[name].elements(r) for r in ranks) * itemsize
            if runs and runs[-1][0] == ranks and runs[-1][2] + size <= bucket_bytes:
                runs[-1][1].append(name)
                runs[-1] = (ranks, runs[-1][1], runs[-1][2] + size)
            else:
                runs.append((ranks, [name], size))
    owners: dict[tuple[object, ...], list[Layout]] = {}
    buckets = []
    for i, (ranks, names, _) in enumerate(runs):
        held = {name: holders[name] for name in names}
        # Buckets of equal layouts are owned alike; names count only by their order, which breaks ties.
        key = (tuple(map(id, held.values())), tuple(sorted(range(len(names)), key=names.__getitem__)))
        if key not in owners:
            owners[key] = list(assign_owners(held, weights, whole_below=WHOLE_BYTES // itemsize).values())
        buckets.append(Bucket(i, ranks, tuple(names), held, dict(zip(names, owners[key], strict=True))))
    return tuple(buckets)


def plan_groups(plan: Plan, buckets: Sequence[Bucket]) -> list[tuple[int, ...]]:
    """All groups that some ranks of the plan exchange data in: TP and context groups, bucket holders, the world."""
    stages = [s for p in plan.pipelines for s in p.stages]
    units = [u.ranks for s in stages for u in s.units]
    context = [ranks for s in stages for ranks in context_groups(s, plan.seq_length)]
    return [plan.ranks, *units, *context, *(b.ranks for b in buckets)]
