"""Who holds and who owns each parameter, and in which buckets gradients are synchronised. No torch.

A raw gradient is a partial sum on every rank that holds a copy. Each element has one owner, which sums the
holders' gradients, counts the element in the norm, updates it and sends it back. A bucket is a run of tensors in
backward order with the same group of holders; one ragged all-to-all per bucket and direction moves everything. Where
holders lie in several islands with slow links between, and several of one island hold the same elements, there are two:
the island sums up first, so that each element crosses once per island.

Weights that a stage divides (``weights`` in a plan) lie with their owners between uses: their buckets, which end with
their layer, are gathered and their gradients summed up inside forward and backward, not at the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.layout import Box, Layout, assign_owners, crossing_elements, representatives
from hetero_megatron.plans.canonical import Plan, WeightSharding
from hetero_megatron.plans.context_plan import context_groups
from hetero_megatron.plans.experts import WORTH_A_HOP, has_experts, routing_groups, sequence_group
from hetero_megatron.plans.shares import Islands, has_context, owner_weights, rank_shares, split_by_island
from hetero_megatron.spec import LogicalTensor, ModelSpec, Share, logical_tensors, stage_tensors, tensor_box

if TYPE_CHECKING:
    from hetero_megatron.plans.division import Division, Groups

Ints = NDArray[np.int64]
WHOLE_BYTES = 64 << 10  # smaller tensors have one owner: splitting them costs more messages than it saves bytes
BUCKET_BYTES = 32 << 20
IN_FLIGHT = 2  # buckets under way at once: what is packed and received for them is extra memory


@dataclass(frozen=True)
class Hop:
    """One exchange on the way from holders to owners: inside each of ``groups`` (disjoint) every element of ``sources``
    goes to the rank that has it in ``targets``. The way back is the same with source and target exchanged."""

    groups: tuple[tuple[int, ...], ...]
    sources: Mapping[str, Layout]
    targets: Mapping[str, Layout]

    @cached_property
    def _group_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: ranks for ranks in self.groups for rank in ranks}

    def group(self, rank: int) -> tuple[int, ...]:
        return self._group_of[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._group_of


@dataclass(frozen=True)
class Bucket:
    """Tensors synchronised together: ``names`` in backward order, ``ranks`` (holders) ascending; ``hops``: one from the
    holders to the owners, or two by way of a representative in each island. ``weights``: how its holders, all of one
    stage, divide them, and ``segment`` the layer (or ``embed``, ``head``) of all its tensors; None: they are whole.
    ``onward``: the bucket in which what its owners keep is summed up with what other pipelines hold of the same.
    ``trained``: False of weights that are gathered only; ``in_bytes``: these are in 8 or 4 bits, and boxes are those of
    their bytes (``spec.adapted_model.stored_box``). ``collects``: it is one in which others go on.
    ``matrices``: Muon's, each whole with its owner, which may hold only a part of it (``plans/matrices.py``)."""

    index: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    holders: Mapping[str, Layout]
    owners: Mapping[str, Layout]
    hops: tuple[Hop, ...]
    weights: WeightSharding | None = None
    segment: int | str | None = None
    onward: int | None = None
    trained: bool = True
    in_bytes: bool = False
    collects: bool = False
    matrices: bool = False

    @cached_property
    def dense(self) -> bool:
        """Whether all ranks hold the same boxes and sums go in one hop. Then each rank owns one run of the bucket, so
        gradients leave, and parameters arrive, where they are kept: nothing is packed for it. What collects others
        lies in arrays of these."""
        if len(self.hops) > 1 or len(self.ranks) == 1 or self.matrices or self.collects:
            return False
        return all(layout.alike for layout in self.holders.values())

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Equal for buckets of one plan whose tensors have the very same layouts."""
        return *map(id, self.holders.values()), *map(id, self.owners.values())

    def counts(self) -> tuple[Ints, Ints]:
        """[ranks] elements that each rank holds, and that it owns."""
        elements_held, elements_owned = (
            np.asarray(np.sum([layout.counts() for layout in layouts.values()], axis=0))
            for layouts in (self.holders, self.owners)
        )
        return elements_held, elements_owned


def with_counts(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, Ints, Ints]]:
    """Buckets of one plan with their :meth:`Bucket.counts`, which are summed up once for those of equal layouts."""
    counts: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
    for bucket in buckets:
        key = bucket.layout_key
        if key not in counts:
            counts[key] = bucket.counts()
        yield bucket, *counts[key]


def tensor_holders(plan: Plan, spec: ModelSpec) -> dict[str, Layout]:
    """For every logical tensor, which box each rank of the plan holds; layers on the same stages share layouts."""
    stages = plan.stages
    shares = _interned([rank_shares(spec, stage) for stage in stages])
    of_layer: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for layer in stage.layer_indices():
            of_layer[layer].append(index)
    layouts: dict[tuple[object, ...], Layout] = {}
    out: dict[str, Layout] = {}
    place = 0  # of a tensor in its layer
    layer_before: int | str | None = None
    for tensor in logical_tensors(spec):
        place = place + 1 if tensor.layer == layer_before else 0
        layer_before = tensor.layer
        if isinstance(tensor.layer, int):
            at_stages = of_layer[tensor.layer]
        else:
            at_stages = [i for i, s in enumerate(stages) if tensor in stage_tensors(spec, (), s.embed, s.head)]
        kind = "layer" if isinstance(tensor.layer, int) else tensor.layer
        key = (kind, place, tensor.shape, tensor.axes, tuple(at_stages))
        if key not in layouts:
            layouts[key] = Layout(tensor.shape, _boxes(tensor, [shares[i] for i in at_stages]))
        out[tensor.name] = layouts[key]
    return out


def _interned(stages: Sequence[Mapping[int, Share]]) -> list[Mapping[int, Share]]:
    """The same with one object for equal shares, so that they are compared once per stage and not once per tensor."""
    first: dict[Share, Share] = {}
    interned: dict[int, Share] = {}  # by identity: most stages have the very same shares
    for share in (share for shares in stages for share in shares.values()):
        if id(share) not in interned:
            interned[id(share)] = first.setdefault(share, share)
    return [{rank: interned[id(share)] for rank, share in shares.items()} for shares in stages]


def _boxes(tensor: LogicalTensor, stages: Sequence[Mapping[int, Share]]) -> dict[int, tuple[Box, ...]]:
    """What each rank of some stages holds of a tensor; ranks with one share have one tuple."""
    by_share: dict[int, tuple[Box, ...]] = {}
    boxes = {}
    for shares in stages:
        for rank, share in shares.items():
            box = by_share.get(id(share))
            if box is None:
                box = by_share[id(share)] = (tensor_box(tensor, share),)
            boxes[rank] = box
    return boxes


def backward_order(tensors: Iterable[LogicalTensor]) -> list[list[LogicalTensor]]:
    """Segments (head, last layer, …, first layer, embedding), and the tensors in them, in the order in which their
    gradients are complete: a bucket that ends inside a layer need not wait for the rest of it. Joint ones, whose
    gradients come at once, keep the order in which they lie. Last what has a dtype of its own (``wide``)."""
    segments: dict[tuple[bool, float], list[LogicalTensor]] = defaultdict(list)
    for tensor in tensors:
        key = {"head": float("-inf"), "embed": float("inf")}.get(str(tensor.layer))
        segments[tensor.wide, -float(tensor.layer) if key is None else key].append(tensor)
    return [_backwards(segments[key]) for key in sorted(segments)]


@lru_cache(maxsize=16)
def _trained_segments(spec: ModelSpec) -> tuple[list[LogicalTensor], ...]:
    return tuple(backward_order(t for t in logical_tensors(spec) if t.trained))


def _backwards(tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    runs = [list(run) for _, run in groupby(tensors, lambda tensor: tensor.joint or tensor.name)]
    return [tensor for run in reversed(runs) for tensor in run]


def make_buckets(
    plan: Plan, spec: ModelSpec, bucket_bytes: int = BUCKET_BYTES, itemsize: int = 4,
    holders: Mapping[str, Layout] | None = None, muon: bool = False,
) -> tuple[Bucket, ...]:  # fmt: skip
    """The same buckets on every rank, computed without talking; ``holders``: of the tensors, where they are known;
    ``muon``: matrices have whole owners."""
    holders = tensor_holders(plan, spec) if holders is None else holders
    division = None
    if plan.sharding_stages and spec.lora is None:
        from hetero_megatron.plans.division import Division

        division = Division(plan)
    if muon:
        from hetero_megatron.plans.matrices import in_order, matrix_owners
    buckets = list[Bucket]()
    for layouts in _apart(plan, holders):
        segments, whole_owners = _trained_segments(spec), dict[str, Layout]()
        if muon:
            whole_owners = matrix_owners((t for segment in segments for t in segment), layouts, owner_weights(plan))
            segments = tuple(in_order(segments))
        rows = [
            [(t.name, (layouts[t.name].ranks, t.wide, groups, t.layer if groups else None, t.name in whole_owners))
             for t in segment for groups in [division.groups(t, layouts[t.name]) if division is not None else ()]]
            for segment in segments
        ]  # fmt: skip
        make = BucketMaker(plan, itemsize)
        for (ranks, _, groups, segment, matrices), names in runs(rows, layouts, bucket_bytes // itemsize):
            if matrices:
                sources, owners = ({name: sides[name] for name in names} for sides in (layouts, whole_owners))
                hop = Hop((ranks,), sources, owners)
                buckets.append(Bucket(len(buckets), ranks, tuple(names), sources, owners, (hop,), matrices=True))
            else:
                buckets += _of_run(make, division, groups, len(buckets), names, layouts, segment)
    return by_islands(buckets, plan.islands, itemsize) if plan.islands else tuple(buckets)


def _apart(plan: Plan, holders: Mapping[str, Layout]) -> list[Mapping[str, Layout]]:
    """Holders whose gradients are summed together: all, or with outer steps those of each island. Tensors that share a
    layout do so there, too."""
    if plan.outer is None:
        return [holders]
    layouts = {id(layout): layout for layout in holders.values()}
    by_island: list[Mapping[str, Layout]] = []
    for ranks in plan.outer.islands:
        inside = {key: layout.only(ranks) for key, layout in layouts.items()}
        by_island.append({name: inside[id(layout)] for name, layout in holders.items()})
    return by_island


def _of_run(
    make: BucketMaker, division: Division | None, groups: Groups, first: int, names: Sequence[str],
    layouts: Mapping[str, Layout], segment: int | str | None,
) -> list[Bucket]:  # fmt: skip
    """Buckets from index ``first`` of tensors that ``groups`` divide: one of each group, and where others hold the same
    tensors one of all holders, in which sums go on from what the groups keep."""
    if division is None or not groups:
        return [make(first, names, layouts)]
    onward, buckets = first + len(groups) if groups != (layouts[names[0]].ranks,) else None, list[Bucket]()
    for group in groups:
        held = {name: division.only(layouts[name], group) for name in names}
        buckets.append(make(first + len(buckets), names, held, division.weights(group), segment, onward))
    if onward is not None:
        kept = {name: division.kept(layouts[name], [b.owners[name] for b in buckets]) for name in names}
        buckets.append(replace(make(onward, names, kept), collects=True))
    return buckets


Kind = TypeVar("Kind")


def runs(
    rows: Iterable[Iterable[tuple[str, Kind]]], holders: Mapping[str, Layout], most: int
) -> Iterator[tuple[Kind, list[str]]]:
    """Tensors of one kind that follow one another, up to ``most`` elements on a rank. ``rows``: (name, kind)."""
    run, kind, size = list[str](), None, 0
    for name, tensor_kind in (name_and_kind for row in rows for name_and_kind in row):
        size_of_tensor = holders[name].most
        if run and (tensor_kind != kind or size + size_of_tensor > most):
            yield cast(Kind, kind), run
            run, size = [], 0
        kind, size = tensor_kind, size + size_of_tensor
        run.append(name)
    if run:
        yield cast(Kind, kind), run


class BucketMaker:
    """Divides buckets among owners; those of equal layouts are owned alike."""

    def __init__(self, plan: Plan, itemsize: int) -> None:
        self._weights, self._whole_below = owner_weights(plan), WHOLE_BYTES // itemsize
        self._owners: dict[tuple[object, ...], list[Layout]] = {}
        self._divided: dict[tuple[object, ...], dict[str, Layout]] = {}

    def __call__(
        self, index: int, names: Sequence[str], holders: Mapping[str, Layout], weights: WeightSharding | None = None,
        segment: int | str | None = None, onward: int | None = None,
    ) -> Bucket:  # fmt: skip
        """``holders``: of these tensors and perhaps others; of equal layouts, the same ones."""
        sources = {name: holders[name] for name in names}
        key = (tuple(map(id, sources.values())), _order(names))
        if key not in self._owners:
            owners_of = _owners(sources, self._weights, self._whole_below, key[1], self._divided)
            self._owners[key] = list(owners_of.values())
        owners = dict(zip(names, self._owners[key], strict=True))
        ranks = sources[names[0]].ranks
        hops = (Hop((ranks,), sources, owners),)
        return Bucket(index, ranks, tuple(names), sources, owners, hops, weights, segment, onward)


def by_islands(buckets: Sequence[Bucket], islands: Islands, itemsize: int = 4) -> tuple[Bucket, ...]:
    """Buckets that go in one hop, in two where that saves bytes between these islands."""
    divided: dict[tuple[object, ...], list[Layout] | None] = {}
    routed = []
    for bucket in buckets:
        if bucket.weights is not None or bucket.matrices:  # one hop while it computes, or to one owner of all of it
            routed.append(bucket)
            continue
        islands_of_bucket, key = split_by_island(islands, bucket.ranks), (bucket.layout_key, _order(bucket.names))
        if key not in divided:
            layouts_between = island_layouts(bucket.holders, bucket.owners, islands_of_bucket, WHOLE_BYTES // itemsize)
            divided[key] = list(layouts_between.values()) if layouts_between is not None else None
        middle = divided[key]
        if middle is not None:
            by_name = dict(zip(bucket.names, middle, strict=True))
            hops = (Hop(islands_of_bucket, bucket.holders, by_name), Hop((bucket.ranks,), by_name, bucket.owners))
            bucket = replace(bucket, hops=hops)
        routed.append(bucket)
    return tuple(routed)


def _order(names: Sequence[str]) -> tuple[int, ...]:
    """What of the names of a bucket counts for its layouts: their order breaks ties."""
    return tuple(sorted(range(len(names)), key=names.__getitem__))


def _owners(
    held: Mapping[str, Layout], weights: Mapping[int, float], whole_below: int, order: tuple[int, ...],
    divided: dict[tuple[object, ...], dict[str, Layout]],
) -> dict[str, Layout]:  # fmt: skip
    """As :func:`assign_owners` has it, which goes by the order of ranks, not by their numbers: so stages that hold the
    same are divided once, and kept in ``divided``. ``order``: of the names."""
    ranks = next(iter(held.values())).ranks
    content = tuple((holders.shape, tuple(holders.boxes.values())) for holders in held.values())
    key = (content, tuple(weights[r] for r in ranks), order)
    if key not in divided:
        divided[key] = assign_owners(held, weights, whole_below=whole_below)
        return divided[key]
    return {name: layout.on_ranks(ranks) for name, layout in zip(held, divided[key].values(), strict=True)}


def island_layouts(
    holders: Mapping[str, Layout], owners: Mapping[str, Layout], islands: Sequence[tuple[int, ...]], whole_below: int
) -> dict[str, Layout] | None:
    """The representatives of a bucket, or None where going by them saves next to no bytes between islands."""
    if len(islands) < 2 or all(len(island) == 1 for island in islands):
        return None
    middle = representatives(holders, owners, islands, whole_below)
    direct = crossing_elements(holders, owners, islands)
    return middle if represented_elements(middle, owners) < (1 - WORTH_A_HOP) * direct else None


def represented_elements(middle: Mapping[str, Layout], owners: Mapping[str, Layout]) -> int:
    """Elements that cross between islands by way of ``middle``: all that an island's ranks represent and do not own."""
    return sum(int(layout.counts().sum() - owners[name].counts().sum()) for name, layout in middle.items())


def plan_groups(
    plan: Plan, buckets: Sequence[Bucket], spec: ModelSpec, pairs: bool = False
) -> list[tuple[int, ...]]:
    """All groups that some ranks of the plan exchange data in: those of layers, bucket holders, the world.

    Gradients travel during the last backward, as its own exchanges do, and start when they can; so a group that both
    need is listed twice, and the second one is for gradients.

    Args:
        pairs: the loss is one of preference pairs.
    """
    layers = layer_groups(plan, spec) | (answer_groups(plan) if pairs else set())
    sync = {ranks for b in buckets for hop in b.hops for ranks in hop.groups}
    outer = [plan.ranks] if plan.outer is not None else []  # of exchanges that are under way beside the steps' own
    return [*sorted({plan.ranks, *layers, *sync}), *sorted(r for r in sync & layers if len(r) > 1), *outer]


def layer_groups(plan: Plan, spec: ModelSpec) -> set[tuple[int, ...]]:
    """TP, context and expert groups, and those that balance experts over a sequence: of forward and backward."""
    stages, length = plan.stages, plan.seq_length
    units = {tuple(sorted(u.ranks)) for s in stages for u in s.units}
    if spec.moe is not None:
        units |= {group for s in stages for group in routing_groups(spec, s, plan.islands)}
        units |= {sequence_group(s, rank) for s in stages if has_experts(spec, s) for rank in s.ranks}
    return units | {tuple(sorted(g)) for s in stages if has_context(s, length) for g in context_groups(spec, s)}


def answer_groups(plan: Plan) -> set[tuple[int, ...]]:
    """Of stages with a head, the ranks that have tokens of the same sequences: they add up log-probabilities of
    answers."""
    return {sequence_group(s, rank) for s in plan.stages if s.head for rank in s.ranks}
