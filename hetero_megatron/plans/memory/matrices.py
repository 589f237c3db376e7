"""Memory of Muon's matrices, each of which one rank owns whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.layout.layout import reduction_elements
from hetero_megatron.plans.buckets import Bucket

Ints = NDArray[np.int64]


class MatrixBytes:
    """What Muon's matrices take otherwise than elements that their holders own.

    Attributes:
        owned: elements; more: bytes of masters that are copies because the rank does not hold all of the matrix.
        sums: bytes of gradients, where a rank has summed up more than it held of what has travelled.
        update: bytes that the update works with.
    """

    def __init__(self, ranks: int, item: int) -> None:
        self.item, self.wide = item, max(item, 4)
        self.owned, self.more, self.sums, self.update, self._ahead = (np.zeros(ranks, np.int64) for _ in range(5))

    def add(self, bucket: Bucket, at: Ints, held: Ints, owned: Ints) -> Ints:
        """[2, ranks] bytes while the bucket is under way, and while it is summed; ``at``: places of its ranks."""
        given, taken, apart = exchanged(bucket)
        self.owned[at] += owned
        self.more[at] += apart * (self.item if self.item != 2 else 0)  # of 16-bit weights all masters are copies
        self._ahead[at] += owned - held
        self.sums[at] = np.maximum(self.sums[at], self._ahead[at] * self.wide)
        self.update[at] = np.maximum(self.update[at], update_bytes(bucket, self.item))
        if len(bucket.ranks) == 1:
            return np.zeros((2, 1), np.int64)
        return self.wide * np.array([given + taken, taken + owned])


def exchanged(bucket: Bucket) -> tuple[Ints, Ints, Ints]:
    """[ranks] elements of a bucket of matrices that each rank gives to other owners, and takes from other holders, and
    those of its own matrices that it does not hold whole itself: their masters are copies in any dtype."""
    index = {rank: i for i, rank in enumerate(bucket.ranks)}
    given, taken, apart = (np.zeros(len(index), np.int64) for _ in range(3))
    for name in bucket.names:
        holders, owners = bucket.holders[name], bucket.owners[name]
        source, target, sizes = reduction_elements(holders, owners)
        for a, b, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            if a != b:
                given[index[a]] += size
                taken[index[b]] += size
        for rank, box in owners.items():
            apart[index[rank]] += 0 if any(held.contains(box) for held in holders.of(rank)) else box.size
    return given, taken, apart


def update_bytes(bucket: Bucket, item: int) -> Ints:
    """[ranks] bytes that the update of one of the rank's matrices takes at most, beside gradient, master and momentum.

    The momentum that Nesterov looks ahead with, what becomes of it in two places, the Gram matrix and its polynomial;
    in bf16 where weights have 16 bits, else as wide as the masters. ``item``: bytes of a weight."""
    found = np.zeros(len(bucket.ranks), np.int64)
    for name in bucket.names:
        less, more = sorted(bucket.owners[name].shape[-2:])
        wide = max(item, 4)
        size = less * more * (wide + 2 * item) + 2 * less * less * item
        has = np.array([bool(boxes) for boxes in bucket.owners[name].boxes.values()])
        found = np.maximum(found, np.where(has, size, 0))
    return found
