"""Gradients of weights that a stage divides: summed up at their owners after every backward, not at the step's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch

from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.flat_memory import FlatTensors, GradientSums
from hetero_megatron.parallel.grad_sync.routes import by_key
from hetero_megatron.plans.buckets import IN_FLIGHT


class DividedSums:
    """The sums of one rank's pieces over holders and micro-batches.

    A bucket goes to its owners as soon as its layer's backward is over, and what arrives is added up there, so that
    gradients of a few buckets exist at once. All holders are in one stage and send the same buckets in the same order;
    a rank without rows of a micro-batch sends zeros.

    Args:
        exchanges: by bucket; sums: to which backward adds.
    """

    def __init__(self, exchanges: Mapping[int, BucketExchange], sums: GradientSums) -> None:
        self._exchanges, self._sums = exchanges, sums
        self._under_way: deque[int] = deque()
        self._owned: dict[int, list[torch.Tensor]] = {}

    def reduce(self, buckets: Iterable[int]) -> None:
        """Send what has come since the last time."""
        for bucket in buckets:
            while bucket in self._under_way or len(self._under_way) >= IN_FLIGHT:
                self._end_oldest()
            self._exchanges[bucket].start_reduce(0, self._sums.taken(bucket))
            self._under_way.append(bucket)

    @torch.no_grad()
    def _end_oldest(self) -> None:
        bucket = self._under_way.popleft()
        exchange = self._exchanges[bucket]
        pieces, owned_sums = exchange.finish_reduce(0), self._owned.get(bucket)
        if owned_sums is None:  # in place, they lie in the memory of all gradients of the bucket
            self._owned[bucket] = [piece.clone() for piece in pieces] if exchange.in_place else pieces
        elif pieces:
            torch._foreach_add_(owned_sums, pieces)
        exchange.forget()

    def finish(self) -> dict[int, list[torch.Tensor]]:
        """By bucket, the sums of the step; zeros where there was no backward."""
        while self._under_way:
            self._end_oldest()
        owned, self._owned = self._owned, {}
        for bucket, exchange in self._exchanges.items():
            if bucket not in owned:
                empty = self._sums.view(exchange.bucket.names[0])
                owned[bucket] = [empty.new_zeros(piece.box.shape) for piece in exchange.pieces]
                self._sums.taken(bucket)
        return owned

    def hand_on(self) -> dict[int, list[torch.Tensor]]:
        """:meth:`finish`, but what goes on in another bucket is handed to the sums, as gradients of that."""
        owned = self.finish()
        for bucket, exchange in self._exchanges.items():
            if exchange.bucket.onward is not None:
                views = by_key(exchange.pieces, owned.pop(bucket))
                empty = self._sums.empty(exchange.bucket.names[0])
                self._sums.handed[exchange.bucket.onward] = FlatTensors(empty, views)
        return owned
