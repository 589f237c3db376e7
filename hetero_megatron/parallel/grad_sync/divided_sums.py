"""Gradients of weights that a stage divides: summed up at their owners after every backward, not at the step's end, and
in host memory where the optimizer is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.flat_memory import FlatTensors, GradientSums
from hetero_megatron.parallel.grad_sync.routes import by_key
from hetero_megatron.plans.buckets import IN_FLIGHT

if TYPE_CHECKING:
    from hetero_megatron.parallel.host_memory import HostRows


class _Leaving(NamedTuple):
    """A bucket's pieces on their way to host memory, where ``copies`` are complete at ``moment``: the sums of the step,
    or what is still to be added to them."""

    bucket: int
    pieces: list[torch.Tensor]  # not released before
    copies: list[torch.Tensor]
    first: bool
    moment: Any


class DividedSums:
    """The sums of one rank's pieces over holders and micro-batches.

    A bucket goes to its owners as soon as its layer's backward is over, and what arrives is added up there, so that
    gradients of a few buckets exist at once. All holders are in one stage and send the same buckets in the same order;
    a rank without rows of a micro-batch sends zeros. With ``host`` the sums are in host memory: one bucket's pieces are
    on their way there while others travel between ranks.

    Args:
        exchanges: by bucket; sums: to which backward adds; host: of an optimizer in host memory.
    """

    def __init__(
        self, exchanges: Mapping[int, BucketExchange], sums: GradientSums, host: HostRows | None = None
    ) -> None:
        self._exchanges, self._sums, self._host = exchanges, sums, host
        self._leaving: _Leaving | None = None
        self._host_sums_of: dict[int, list[torch.Tensor]] = {}
        self._under_way: deque[int] = deque()
        self._owned: dict[int, list[torch.Tensor]] = {}

    def reduce(self, buckets: Iterable[int]) -> None:
        """Send what has come since the last time."""
        for bucket in buckets:
            while bucket in self._under_way or len(self._under_way) >= IN_FLIGHT:
                self._end_oldest()
            if self._leaving is not None and self._leaving.bucket == bucket:
                self._arrive()
            self._exchanges[bucket].start_reduce(0, self._sums.taken(bucket))
            self._under_way.append(bucket)

    @torch.no_grad()
    def _end_oldest(self) -> None:
        bucket = self._under_way.popleft()
        exchange = self._exchanges[bucket]
        self._arrive()
        pieces = exchange.finish_reduce(0)
        if self._host is not None:
            if not exchange.in_place:  # the sums are memory of their own
                exchange.forget()
            first = bucket not in self._owned
            places = self._host_sums(bucket) if first else [self._host.memory.take_like(piece) for piece in pieces]
            if first:
                self._owned[bucket] = places
            self._leaving = _Leaving(bucket, pieces, places, first, self._host.store(pieces, places))
            return
        owned_sums = self._owned.get(bucket)
        if owned_sums is None:  # in place, they lie in the memory of all gradients of the bucket
            self._owned[bucket] = [piece.clone() for piece in pieces] if exchange.in_place else pieces
        elif pieces:
            torch._foreach_add_(owned_sums, pieces)
        exchange.forget()

    @torch.no_grad()
    def _arrive(self) -> None:
        """What is on its way to host memory is added up there."""
        if self._leaving is None:
            return
        assert self._host is not None
        leaving, self._leaving = self._leaving, None
        self._host.out.wait(leaving.moment)
        if leaving.copies and not leaving.first:
            torch._foreach_add_(self._owned[leaving.bucket], leaving.copies)
            self._host.memory.give_back(leaving.copies)
        self._exchanges[leaving.bucket].forget()

    def _host_sums(self, bucket: int) -> list[torch.Tensor]:
        """Where a bucket's sums are in host memory, in every step."""
        assert self._host is not None
        if bucket not in self._host_sums_of:
            exchange = self._exchanges[bucket]
            like = self._sums.empty(exchange.bucket.names[0])
            self._host_sums_of[bucket] = [self._host.memory.room(p.box.shape, like.dtype) for p in exchange.pieces]
        return [*self._host_sums_of[bucket]]

    def finish(self) -> dict[int, list[torch.Tensor]]:
        """By bucket, the sums of the step; zeros where there was no backward."""
        while self._under_way:
            self._end_oldest()
        self._arrive()
        owned, self._owned = self._owned, {}
        for bucket, exchange in self._exchanges.items():
            if bucket not in owned:
                owned[bucket] = self._zeros(exchange)
                self._sums.taken(bucket)
        return owned

    def _zeros(self, exchange: BucketExchange) -> list[torch.Tensor]:
        if self._host is not None:
            return [x.zero_() for x in self._host_sums(exchange.bucket.index)]
        like = self._sums.view(exchange.bucket.names[0])
        return [like.new_zeros(piece.box.shape) for piece in exchange.pieces]

    def hand_on(self) -> dict[int, list[torch.Tensor]]:
        """:meth:`finish`, but what goes on in another bucket is handed to the sums, as gradients of that."""
        owned = self.finish()
        for bucket, exchange in self._exchanges.items():
            if exchange.bucket.onward is not None:
                views = by_key(exchange.pieces, owned.pop(bucket))
                empty = self._sums.empty(exchange.bucket.names[0])
                self._sums.handed[exchange.bucket.onward] = FlatTensors(empty, views)
        return owned
