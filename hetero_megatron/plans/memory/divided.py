"""Bytes of buckets under way, and of weights that a stage divides with their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hetero_megatron.plans.buckets import IN_FLIGHT, Bucket, with_counts
from hetero_megatron.plans.canonical import Plan, Stage
from hetero_megatron.plans.context_plan import has_context
from hetero_megatron.plans.memory.activations import RankWork, backward_moments
from hetero_megatron.plans.memory.divided_moments import BucketBytes, ChunkSteps, DividedMoments, PartBytes, Step
from hetero_megatron.plans.program import splits_backward
from hetero_megatron.spec import ModelSpec


class DividedBytes(NamedTuple):
    """Bytes on a rank: most of the weights that are whole at once; at the worst moment of a step, gradients and
    messages under way, less what there is less of weights and activations than at most."""

    weights: int = 0
    moving: int = 0


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
    backwards = {
        rank: pipeline.num_micro_batches * len(stage.chunks)
        for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks
    }  # fmt: skip
    split, all_bytes = splits_backward(plan), dict[int, DividedBytes]()
    for rank, parts in _parts(buckets, item).items():
        stage = plan.sharding_stages[rank]
        most, known = activations[rank], not (split or has_context(stage, plan.seq_length))
        chunks = _chunk_steps(stage, spec, work[rank], item, parts, known)
        held = most - max(c.activations.most for c in chunks if c.activations) if known else most
        moments = DividedMoments(stage, parts, chunks, held, backwards[rank])
        weights = moments.weights()
        if split:
            moving = _put_off_gradients(parts) + _under_way(stage, parts)
        else:
            moving = moments.most() - weights - most
        all_bytes[rank] = DividedBytes(weights, moving)
    return all_bytes


def _parts(buckets: Iterable[Bucket], item: int) -> dict[int, dict[Step, PartBytes]]:
    """By rank, what it holds of divided weights, by what is gathered at once."""
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
                rows = (*rows, BucketBytes(wide * held, int(travels), int(sums), wide * owned))
            message += element_bytes * _message(held, owned, copies, bucket.dense)
            parts[rank][bucket.segment] = PartBytes(whole + element_bytes * held, message, rows)
    return {rank: dict(parts_of_rank) for rank, parts_of_rank in parts.items()}


def _chunk_steps(
    stage: Stage, spec: ModelSpec, work: Sequence[RankWork], item: int, parts: Mapping[Step, PartBytes], known: bool
) -> list[ChunkSteps]:
    """``known``: activations are, moment by moment."""
    chunks = []
    for number, ((a, b), chunk) in enumerate(zip(stage.chunks, work, strict=True)):
        used: dict[Step, tuple[Step, ...]] = {"embed": ("embed",)} if stage.embed and number == 0 else {}
        used |= {layer: (layer,) for layer in range(a, b)}
        if stage.head and number + 1 == len(stage.chunks):
            used["head"] = ("head", "embed") if spec.tied else ("head",)
        held = sum(bucket.held for bucket in parts.get("embed", PartBytes()).buckets)
        narrow = 0 if spec.lora is not None or not stage.embed else round(spec.vocab_size * spec.hidden_size * item / chunk.tp)
        tied = spec.tied and stage.embed and "head" in used
        # Autograd keeps a tied head's gradient until it adds the embedding's; chunks of logits add theirs to the sum.
        summed = tied and chunk.limit is not None
        embedding = max(3 * narrow - held, narrow) if tied and not summed else narrow
        moments = backward_moments(spec, chunk) if known else None
        chunks.append(ChunkSteps(used, moments, embedding, held if summed else narrow if tied else 0))
    return chunks


def owned_bytes(buckets: Iterable[Bucket], item: int, moments: int) -> dict[int, int]:
    """By rank, what it keeps of divided weights: frozen ones as they are stored, of others masters, moments and sums of
    gradients."""
    by_rank: dict[int, int] = defaultdict(int)
    for bucket, _, owned_elements in with_counts(buckets):
        element_bytes = max(item, 4) * (moments + 2) if bucket.trained else 1 if bucket.in_bytes else item
        for rank, elements in zip(bucket.ranks, owned_elements.tolist(), strict=True):
            by_rank[rank] += elements * element_bytes
    return by_rank


def _message(held: int, owned: int, copies: float, dense: bool) -> int:
    """Elements that gathering a bucket takes beside the weights: of two ranks that hold the same, none; of several, the
    own part once for each of them; else what is sent and what comes."""
    if dense:
        return round(owned * copies) if copies > 2 else 0
    return round(held - owned + owned * (copies - 1))


def _under_way(stage: Stage, parts: Mapping[Step, PartBytes]) -> int:
    """Messages of one part by layer, and of two where several are gathered at once."""
    assert stage.weights is not None
    sizes = sorted((part.message for part in parts.values()), reverse=True)
    return sum(sizes[: 1 if stage.weights.gather == "layer" else 2])


def frozen_bytes(buckets: Iterable[Bucket], item: int) -> dict[int, int]:
    """By rank, bytes that frozen weights take less because their stage divides them, which keeps what ranks own."""
    by_rank: dict[int, int] = defaultdict(int)
    for bucket, held_elements, owned_elements in with_counts(b for b in buckets if not b.trained):
        away = (held_elements - owned_elements) * (1 if bucket.in_bytes else item)
        for rank, bytes_of_rank in zip(bucket.ranks, away.tolist(), strict=True):
            by_rank[rank] += bytes_of_rank
    return by_rank


def _put_off_gradients(parts: Mapping[Step, PartBytes]) -> int:
    """Of all layers, and of the last ones of the W before, which are under way."""
    buckets = [bucket for part in parts.values() for bucket in part.buckets]
    under_way = [buckets[i : i + IN_FLIGHT] for i in range(len(buckets))]
    travels = max((sum(bucket.travels for bucket in window) for window in under_way), default=0)
    last = max((sum(bucket.held for bucket in window) for window in under_way), default=0)
    return sum(bucket.held for bucket in buckets) + last + travels


def buffer_bytes(held: Any, owned: Any, copies: float, item: int, dense: bool) -> tuple[Any, Any]:
    """Of a bucket that several ranks hold, on one of them or on several in arrays: (while it is under way, while what
    came is added up).

    Gradients of a dense bucket leave from where they are kept, and their sums lie there: only what comes needs memory,
    and of more than two ranks it comes in one piece with the own part. Else they are packed, and sums are new.

    Args:
        held, owned: elements; copies: ranks that hold the same ones.
    """
    gradient_bytes, taken_elements = max(item, 4), owned * (copies - 1)
    if dense:
        arriving = gradient_bytes * (taken_elements + (owned if copies > 2 else 0))
        return arriving, arriving
    return gradient_bytes * (held - owned + taken_elements), gradient_bytes * (taken_elements + owned)
