"""Bytes of buckets under way, and of what ranks keep of weights that their stage divides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from hetero_megatron.plans.buckets import Bucket, Ints, with_counts
from hetero_megatron.plans.canonical import Plan


class DividedBytes(NamedTuple):
    """Bytes on a rank: most of the weights that are whole at once; at the worst moment of a step, gradients and
    messages under way, less what there is less of weights and activations than at most."""

    weights: int = 0
    moving: int = 0


def host_rows(buckets: Iterable[Bucket], item: int) -> dict[int, int]:
    """By rank, what host memory has of divided weights beside masters and moments, where an optimizer is there: rows as
    the device wants them (of fp32, the masters), and sums of gradients, with a bucket that is to be added to them."""
    by_rank, arriving = defaultdict[int, int](int), defaultdict[int, int](int)
    for bucket, _, owned_elements in with_counts(b for b in buckets if b.weights is not None):
        rows = 1 if bucket.in_bytes else item
        if bucket.trained:
            rows = (item if item < 4 or bucket.onward is not None else 0) + max(item, 4)
        for rank, elements in zip(bucket.ranks, owned_elements.tolist(), strict=True):
            by_rank[rank] += elements * rows
            arriving[rank] = max(arriving[rank], elements * max(item, 4) if bucket.trained else 0)
    return {rank: size + arriving[rank] for rank, size in by_rank.items()}


def owned_bytes(buckets: Iterable[Bucket], item: int, moments: int) -> dict[int, int]:
    """By rank, what it keeps of divided weights: frozen ones as they are stored, of others sums of gradients, and
    masters and moments, or, where other pipelines hold the same, values."""
    by_rank: dict[int, int] = defaultdict(int)
    for bucket, _, owned_elements in with_counts(buckets):
        element_bytes = 1 if bucket.in_bytes else item
        if bucket.trained:
            element_bytes = max(item, 4) * (moments + 2) if bucket.onward is None else max(item, 4) + item
        for rank, elements in zip(bucket.ranks, owned_elements.tolist(), strict=True):
            by_rank[rank] += elements * element_bytes
    return by_rank


def frozen_bytes(buckets: Iterable[Bucket], item: int, offloading: Collection[int] = ()) -> dict[int, int]:
    """By rank, bytes that frozen weights take less because their stage divides them, which keeps what ranks own, those
    that are ``offloading`` in host memory."""
    by_rank: dict[int, int] = defaultdict(int)
    for bucket, held_elements, owned_elements in with_counts(b for b in buckets if not b.trained):
        kept = owned_elements * [rank not in offloading for rank in bucket.ranks]
        away = (held_elements - kept) * (1 if bucket.in_bytes else item)
        for rank, bytes_of_rank in zip(bucket.ranks, away.tolist(), strict=True):
            by_rank[rank] += bytes_of_rank
    return by_rank


def in_device(bucket: Bucket, plan: Plan) -> Ints:
    """[ranks] 0 where what a rank holds of a bucket in which sums of divided weights go on is in host memory."""
    return np.array([not (r in plan.offloading and r in plan.sharding_stages) for r in bucket.ranks], np.int64)


def copied_masters(bucket: Bucket) -> Ints:
    """[ranks] elements that each rank owns and that do not lie in one piece where it holds them: their masters are
    copies in full precision, too."""
    copied = np.zeros(len(bucket.ranks), np.int64)
    if bucket.dense or bucket.weights is not None:
        return copied
    for name, owners in bucket.owners.items():
        for i, rank in enumerate(bucket.ranks):
            held_columns = {(box.lo[1:], box.hi[1:]) for box in bucket.holders[name].of(rank)}
            apart = (x for x in owners.of(rank) if (x.lo[1:], x.hi[1:]) not in held_columns and x.hi[0] - x.lo[0] > 1)
            copied[i] += sum(box.size for box in apart)
    return copied


def bucket_buffers(bucket: Bucket, held: Ints, owned: Ints, item: int) -> Ints:
    """[2, ranks] bytes while a bucket of several ranks is under way, and while it is summed."""
    return np.array(buffer_bytes(held, owned, held.sum() / owned.sum(), item, bucket.dense)).astype(np.int64)


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
