"""Accumulating gradients over micro-batches and synchronising them bucket by bucket during the last backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.parallel.exchange import BucketExchange
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, sync_actions
from hetero_megatron.schedule import Action


class GradientSync:
    """Gradients of one rank's parameters.

    Full-precision parameters accumulate in ``.grad`` as autograd does; 16-bit ones in an fp32 sum per parameter.
    In the last micro-batch a REDUCE starts as soon as all its gradients are there and fewer than ``IN_FLIGHT`` buckets
    are under way. Every rank starts its REDUCEs in the order of their list, which is one for all ranks, so that the
    first one under way anywhere can always complete; nothing waits inside backward, where a neighbour may be waiting
    for what comes after it.

    Args:
        params: local parameters by logical name; boxes: the box of each in its logical tensor.

    Attributes:
        reduces, spreads: what this rank does in every step, in order.
    """

    def __init__(
        self, comm: Comm, params: Mapping[str, torch.nn.Parameter], boxes: Mapping[str, Box], buckets: Sequence[Bucket]
    ) -> None:
        self.params = params
        self.exchanges = [BucketExchange(b, comm, boxes) for b in buckets if comm.rank in b.ranks]
        self.by_bucket = {e.bucket.index: e for e in self.exchanges}
        self.reduces, self.spreads = sync_actions(buckets, comm.rank)
        self._wide: dict[str, torch.Tensor] = {}
        self._armed = False
        self._missing: dict[int, set[str]] = {}
        self._queue: Sequence[Action] = ()
        self._started = 0  # of the queue
        self._ended = 0
        self._owned: list[list[torch.Tensor]] = []
        self._bucket_of = {name: e.bucket.index for e in self.exchanges for name in e.bucket.names}
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def accumulated(param: torch.Tensor) -> None:
            if param.dtype in (torch.float16, torch.bfloat16):
                assert param.grad is not None
                if name in self._wide:
                    self._wide[name] += param.grad
                else:
                    self._wide[name] = param.grad.float()
                param.grad = None
            if self._armed:
                self._missing[self._bucket_of[name]].discard(name)
                self._progress()

        return accumulated

    def begin(self, reduces: Iterable[Action]) -> None:
        """The last backward of the step begins: from now on the ``reduces`` start, in this order."""
        self._queue = tuple(reduces)
        assert {a.micro_batch for a in self._queue} == self.by_bucket.keys(), "every bucket is reduced once"
        self._armed, self._started, self._ended, self._owned = True, 0, 0, []
        self._missing = {e.bucket.index: set(e.bucket.names) for e in self.exchanges}

    def _progress(self) -> None:
        """Sum what has arrived, start what can start, without waiting."""
        while self._end_next(wait=False) or self._start_next():
            pass

    def _end_next(self, wait: bool) -> bool:
        if self._ended == self._started:
            return False
        _, bucket, hop = self._queue[self._ended]
        exchange = self.by_bucket[bucket]
        if not wait and not exchange.arrived(hop):
            return False
        sums = exchange.finish_reduce(hop)
        if hop + 1 == len(exchange.hops):
            self._owned.append(sums)
        self._ended += 1
        return True

    def _start_next(self) -> bool:
        """A bucket's local gradients are given up as soon as they are packed, but for what is summed here."""
        if self._started == len(self._queue):
            return False
        _, bucket, hop = self._queue[self._started]
        under_way = {a.micro_batch for a in self._queue[self._ended : self._started]}
        exchange = self.by_bucket[bucket]
        if hop:
            if bucket in under_way:  # its hop before has not ended
                return False
            exchange.start_reduce(hop)
        else:
            if self._missing[bucket] or len(under_way) >= IN_FLIGHT:
                return False
            exchange.start_reduce(0, {name: self.gradient(name) for name in exchange.bucket.names})
            for name in exchange.bucket.names:
                self._wide.pop(name, None)
                self.params[name].grad = None
        self._started += 1
        return True

    def gradient(self, name: str) -> torch.Tensor:
        """The accumulated partial gradient of one local parameter (zeros where it took no part)."""
        grad = self._wide.get(name, self.params[name].grad)
        if grad is None:
            param = self.params[name]
            wide = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
            grad = torch.zeros_like(param, dtype=wide, requires_grad=False)
            self._wide[name] = grad
        return grad

    def complete(self, action: Action) -> None:
        """Return when ``action`` has ended. Backward is over, so what has not come by now is zero."""
        self._missing = {bucket: set() for bucket in self.by_bucket}
        end = self._queue.index(action) + 1
        while self._ended < end:
            if not self._start_next():
                self._end_next(wait=True)

    def finish(self) -> list[list[torch.Tensor]]:
        """Complete what is left, and return the summed gradients of the owned pieces per exchange."""
        if not self._armed:
            self.begin(self.reduces)
        if self._queue:
            self.complete(self._queue[-1])
        self._armed = False
        owned, self._owned = self._owned, []
        return owned
