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
        given_elements, taken_elements, divided_elements = exchanged(bucket)
        self.owned[at] += owned
        # Of 16-bit weights all masters are copies.
        self.more[at] += divided_elements * (self.item if self.item != 2 else 0)
        self._ahead[at] += owned - held
        self.sums[at] = np.maximum(self.sums[at], self._ahead[at] * self.wide)
        self.update[at] = np.maximum(self.update[at], update_bytes(bucket, self.item))
        if len(bucket.ranks) == 1:
            return np.zeros((2, 1), np.int64)
        return self.wide * np.array([given_elements + taken_elements, taken_elements + owned])


def exchanged(bucket: Bucket) -> tuple[Ints, Ints, Ints]:
    """[ranks] elements of a bucket of matrices that each rank gives to other owners, and takes from other holders, and
    those of its own matrices that it does not hold whole itself: their masters are copies in any dtype."""
    index = {rank: i for i, rank in enumerate(bucket.ranks)}
    given_elements, taken_elements, divided_elements = (np.zeros(len(index), np.int64) for _ in range(3))
    for name in bucket.names:
        holders, owners = bucket.holders[name], bucket.owners[name]
        source, target, sizes = reduction_elements(holders, owners)
        for a, b, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            if a != b:
                given_elements[index[a]] += size
                taken_elements[index[b]] += size
        for rank, box in owners.items():
            divided_elements[index[rank]] += (
                0 if any(held_box.contains(box) for held_box in holders.of(rank)) else box.size
            )
    return given_elements, taken_elements, divided_elements


def update_bytes(bucket: Bucket, item: int) -> Ints:
    """[ranks] bytes that the update of one of the rank's matrices takes at most, beside gradient, master and momentum.

    The momentum that Nesterov looks ahead with, what becomes of it in two places, the Gram matrix and its polynomial;
    in bf16 where weights have 16 bits, else as wide as the masters. ``item``: bytes of a weight."""
    most_bytes = np.zeros(len(bucket.ranks), np.int64)
    for name in bucket.names:
        rows, columns = sorted(bucket.owners[name].shape[-2:])
        master_bytes = max(item, 4)
        size = rows * columns * (master_bytes + 2 * item) + 2 * rows * rows * item
        owns_matrix = np.array([bool(boxes) for boxes in bucket.owners[name].boxes.values()])
        most_bytes = np.maximum(most_bytes, np.where(owns_matrix, size, 0))
    return most_bytes
