"""What ranks whose stage divides its weights hold of these and of gradients, by :mod:`.divided_moments`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hetero_megatron.plans.buckets import Bucket, with_counts
from hetero_megatron.plans.canonical import Plan, Stage
from hetero_megatron.plans.context_plan import has_context
from hetero_megatron.plans.memory.activations import RankWork, backward_moments, embedding_gradients, forward_bytes
from hetero_megatron.plans.memory.divided import DividedBytes, buffer_bytes
from hetero_megatron.plans.memory.divided_moments import (
    BucketBytes,
    ChunkSteps,
    DividedMoments,
    PartBytes,
    Step,
    under_way,
)
from hetero_megatron.plans.program import moments_by_stages
from hetero_megatron.spec import ModelSpec


def divided_bytes(
    plan: Plan, spec: ModelSpec, buckets: Iterable[Bucket], item: int, work: Mapping[int, Sequence[RankWork]],
    activations: Mapping[int, int],
) -> dict[int, DividedBytes]:  # fmt: skip
    """By rank, of stages that divide their weights.

    With a split backward gradients are all there from B_INPUT to W, while the last ones of the W before may be under
    way, and messages count beside activations at their most.

    Args:
        item: bytes of a weight.
        work: of each rank by chunk; activations: bytes of them at most.
    """
    places = {
        rank: (pipeline.num_micro_batches * len(stage.chunks), splits)
        for pipeline, splits in ((p, bool(moments_by_stages(plan, p))) for p in plan.pipelines)
        for stage in pipeline.stages for rank in stage.ranks
    }  # fmt: skip
    all_bytes = dict[int, DividedBytes]()
    for rank, parts in _parts(buckets, item, plan.offloading).items():
        stage, (backwards, split) = plan.sharding_stages[rank], places[rank]
        most, has_moments = activations[rank], not (split or has_context(stage, plan.seq_length))
        chunks = _chunk_steps(stage, spec, work[rank], item, parts, has_moments)
        held = most - max(c.activations.most for c in chunks if c.activations) if has_moments else most
        moments = DividedMoments(stage, parts, chunks, held, backwards)
        weights = moments.weights()
        if split:
            moving = _put_off_gradients(parts, under_way(stage)) + _gathering(stage, parts)
        else:
            moving = moments.most() - weights - most
        all_bytes[rank] = DividedBytes(weights, moving)
    return all_bytes


def _parts(buckets: Iterable[Bucket], item: int, offloading: Collection[int]) -> dict[int, dict[Step, PartBytes]]:
    """By rank, what it holds of divided weights, by what is gathered at once; those ``offloading`` sum up gradients in
    host memory."""
    parts: dict[int, dict[Step, PartBytes]] = defaultdict(lambda: defaultdict(PartBytes))
    wide = max(item, 4)
    for bucket, held_elements, owned_elements in with_counts(b for b in buckets if b.weights is not None):
        assert bucket.segment is not None
        element_bytes, copies = 1 if bucket.in_bytes else item, held_elements.sum() / owned_elements.sum()
        moving, summing = buffer_bytes(held_elements, owned_elements, copies, item, bucket.dense)
        columns = (column.tolist() for column in (held_elements, owned_elements, moving, summing))
        for rank, held, owned, travels, sums in zip(bucket.ranks, *columns, strict=True):
            whole, message, rows = parts[rank][bucket.segment]
            if bucket.trained:
                sum_bytes = 0 if rank in offloading else wide * owned
                rows = (*rows, BucketBytes(wide * held, int(travels), int(sums), sum_bytes))
            message += element_bytes * _message(held, owned, copies, bucket.dense)
            parts[rank][bucket.segment] = PartBytes(whole + element_bytes * held, message, rows)
    return {rank: dict(parts_of_rank) for rank, parts_of_rank in parts.items()}


def _chunk_steps(
    stage: Stage, spec: ModelSpec, work: Sequence[RankWork], item: int, parts: Mapping[Step, PartBytes],
    has_moments: bool,
) -> list[ChunkSteps]:
    """``has_moments``: activations are known moment by moment."""
    chunks = []
    for number, ((a, b), chunk) in enumerate(zip(stage.chunks, work, strict=True)):
        used: dict[Step, tuple[Step, ...]] = {"embed": ("embed",)} if stage.embed and number == 0 else {}
        used |= {layer: (layer,) for layer in range(a, b)}
        if stage.head and number + 1 == len(stage.chunks):
            used["head"] = ("head", "embed") if spec.tied else ("head",)
        held = sum(bucket.held for bucket in parts.get("embed", PartBytes()).buckets)
        brought, embedding = embedding_gradients(spec, replace(chunk, embed=stage.embed))
        if brought:
            embedding = max(embedding - held, brought)  # their sum is where the others' is
        elif spec.tied and stage.embed and "head" in used and chunk.limit is not None:
            brought = held
        moments, forward = (backward_moments(spec, chunk), forward_bytes(spec, chunk)) if has_moments else (None, ())
        chunks.append(ChunkSteps(used, moments, forward, embedding, brought))
    return chunks


def _message(held: int, owned: int, copies: float, dense: bool) -> int:
    """Elements that gathering a bucket takes beside the weights: none of ranks that hold the same; else what is sent
    and what comes."""
    return 0 if dense else round(held - owned + owned * (copies - 1))


def _gathering(stage: Stage, parts: Mapping[Step, PartBytes]) -> int:
    """Messages of one part by layer, and of two where several are gathered at once."""
    assert stage.weights is not None
    sizes = sorted((part.message for part in parts.values()), reverse=True)
    return sum(sizes[: 1 if stage.weights.gather == "layer" else 2])


def _put_off_gradients(parts: Mapping[Step, PartBytes], most: int) -> int:
    """Of all layers, and of the last ones of the W before, which are under way."""
    buckets = [bucket for part in parts.values() for bucket in part.buckets]
    windows = [buckets[i : i + most] for i in range(len(buckets))]
    travels = max((sum(bucket.travels for bucket in window) for window in windows), default=0)
    last = max((sum(bucket.held for bucket in window) for window in windows), default=0)
    return sum(bucket.held for bucket in buckets) + last + travels
