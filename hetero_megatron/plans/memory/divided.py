"""Bytes of buckets under way, and of weights that a stage divides with their gradients: what is there at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hetero_megatron.plans.buckets import IN_FLIGHT, Bucket, with_counts
from hetero_megatron.plans.canonical import Plan, Stage
from hetero_megatron.plans.program import splits_backward

Step = int | str
Moving = tuple[int, int]  # of a bucket on a rank: elements, and bytes that its gradients take while they travel


class DividedBytes(NamedTuple):
    """Bytes on a rank: weights that are whole at once; gradients that have not reached their owners, and what of them
    travels; messages of weights that are under way."""

    weights: int = 0
    gradients: int = 0
    messages: int = 0


def divided_bytes(
    plan: Plan, tied: bool, buckets: Iterable[Bucket], item: int, given_back: Mapping[int, Sequence[int]]
) -> dict[int, DividedBytes]:
    """By rank, of stages that divide their weights.

    Weights are exact, but where forward keeps them for backward: then it is all of them. Gradients are those of one
    layer, of a tied head, and of the buckets before it that are under way, less the activations that the layers behind
    have given back by then; with a split backward they are all there from B_INPUT to W, while the last ones of the W
    before may be under way.

    Args:
        tied: the head's matrix is the embedding's.
        item: bytes of a weight.
        given_back: by rank and chunk, bytes of activations that backward of a layer gives back.
    """
    stages, gradient_bytes = plan.sharding_stages, max(item, 4)
    sizes, messages = (defaultdict[int, dict[Step, int]](lambda: defaultdict(int)) for _ in range(2))
    gradients: dict[int, dict[Step, list[Moving]]] = defaultdict(lambda: defaultdict(list))
    for bucket, held_elements, owned_elements in with_counts(b for b in buckets if b.weights is not None):
        assert bucket.segment is not None
        element_bytes, copies = 1 if bucket.in_bytes else item, held_elements.sum() / owned_elements.sum()
        moving = buffer_bytes(held_elements, owned_elements, copies, item, bucket.dense)[0]
        columns = (column.tolist() for column in (held_elements, owned_elements, moving))
        for rank, held_by_rank, owned_by_rank, travels in zip(bucket.ranks, *columns, strict=True):
            sizes[rank][bucket.segment] += held_by_rank * element_bytes
            messages[rank][bucket.segment] += element_bytes * _message(
                held_by_rank, owned_by_rank, copies, bucket.dense
            )
            if bucket.trained:
                gradients[rank][bucket.segment].append((held_by_rank, int(travels)))
    split, all_bytes = splits_backward(plan), dict[int, DividedBytes]()
    for rank, steps in sizes.items():
        stage, parts = stages[rank], gradients[rank]
        if split:
            there = _put_off_gradients(parts, gradient_bytes)
        else:
            there = _gradients(parts, _backward_order(stage, tied), gradient_bytes, tied, given_back[rank])
        all_bytes[rank] = DividedBytes(_gathered(stage, tied, steps), there, _under_way(stage, messages[rank]))
    return all_bytes


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


def _under_way(stage: Stage, messages: Mapping[Step, int]) -> int:
    """Of one part by layer, and of two where several are gathered at once."""
    assert stage.weights is not None
    sizes = sorted(messages.values(), reverse=True)
    return sum(sizes[: 1 if stage.weights.gather == "layer" else 2])


def frozen_bytes(buckets: Iterable[Bucket], item: int) -> dict[int, int]:
    """By rank, bytes that frozen weights take less because their stage divides them, which keeps what ranks own."""
    by_rank: dict[int, int] = defaultdict(int)
    for bucket, held_elements, owned_elements in with_counts(b for b in buckets if not b.trained):
        away = (held_elements - owned_elements) * (1 if bucket.in_bytes else item)
        for rank, bytes_of_rank in zip(bucket.ranks, away.tolist(), strict=True):
            by_rank[rank] += bytes_of_rank
    return by_rank


def _gathered(stage: Stage, tied: bool, sizes: Mapping[Step, int]) -> int:
    """Bytes that are whole at once."""
    assert stage.weights is not None
    if not stage.weights.reshard_after_forward:
        return sum(sizes.values())
    largest, last = 0, len(stage.chunks) - 1
    for number, (a, b) in enumerate(stage.chunks):
        steps: list[set[Step]] = [{layer} for layer in range(a, b)]
        steps = [{"embed"}, *steps] if stage.embed and number == 0 else steps
        if stage.head and number == last:
            steps.append({"head", "embed"} if tied else {"head"})
        whole_at_once: Iterable[set[Step]]
        if stage.weights.gather == "micro-batch":
            whole_at_once = [set().union(*steps)]
        else:
            whole_at_once = [*steps, *(x | y for x, y in pairwise(steps))]
        largest = max([largest, *(sum(sizes.get(step, 0) for step in used) for used in whole_at_once)])
    return largest


def _backward_order(stage: Stage, tied: bool) -> list[list[Step]]:
    """By chunk, its parts in the order in which their gradients are complete: the embedding's last, also where the head
    has brought some of it."""
    first, last, order = stage.chunks[0], stage.chunks[-1], list[list[Step]]()
    for a, b in stage.chunks:
        head = stage.head and (a, b) == last
        embed = stage.embed and ((a, b) == first or head and tied)
        order.append([*["head"] * head, *reversed(range(a, b)), *["embed"] * embed])
    return order


def _gradients(
    parts: Mapping[Step, list[Moving]], chunks: Sequence[Sequence[Step]], wide: int, tied: bool,
    given_back: Sequence[int],
) -> int:  # fmt: skip
    """Bytes of gradients on a rank at once, beyond what activations have given back.

    Args:
        parts: their buckets; chunks: of :func:`_backward_order`; wide: bytes of an element.
        given_back: by chunk, bytes of activations that backward of a layer gives back.
    """

    def size(buckets: Iterable[Moving]) -> int:
        return sum(wide * elements + travels for elements, travels in buckets)

    ends = {(part, i): bucket for steps in chunks for part, i, bucket in _buckets(parts, steps)[-IN_FLIGHT:]}
    # Of the backward before, of any chunk; what ends first is the least of it.
    before = sorted(ends.values(), key=lambda bucket: size([bucket]))[-IN_FLIGHT:]
    largest = 0
    for steps, layer_bytes in zip(chunks, given_back, strict=True):
        in_flight, behind = before, 0
        head_brings = parts.get("embed", []) if tied and "head" in steps and "embed" in steps else []
        for part in steps:
            row = parts.get(part, [])
            there = row if part == "embed" else [*row, *head_brings]
            largest = max(largest, size(in_flight) + wide * sum(elements for elements, _ in there) - behind)
            in_flight = [*in_flight, *row][-IN_FLIGHT:]
            behind += layer_bytes if isinstance(part, int) else 0
    return largest


def _buckets(parts: Mapping[Step, list[Moving]], steps: Sequence[Step]) -> list[tuple[Step, int, Moving]]:
    return [(part, i, bucket) for part in steps for i, bucket in enumerate(parts.get(part, []))]


def _put_off_gradients(parts: Mapping[Step, list[Moving]], wide: int) -> int:
    """The same with a split backward: of all layers, and of the last ones of the W before, which are under way."""
    buckets = [bucket for row in parts.values() for bucket in row]
    under_way = [buckets[i : i + IN_FLIGHT] for i in range(len(buckets))]
    travels = max((sum(x for _, x in window) for window in under_way), default=0)
    last = max((sum(elements for elements, _ in window) for window in under_way), default=0)
    return wide * (sum(elements for elements, _ in buckets) + last) + travels


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
