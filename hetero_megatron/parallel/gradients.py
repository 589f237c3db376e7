"""Accumulating gradients over micro-batches and synchronising them bucket by bucket during the last backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.parallel.exchange import BucketExchange
from hetero_megatron.plan.buckets import Bucket


class GradientSync:
    """Gradients of one rank's parameters.

    Full-precision parameters accumulate in ``.grad`` as autograd does; 16-bit ones in an fp32 sum per parameter.
    In the last micro-batch a bucket is sent as soon as all its gradients are there; buckets of one group always
    go in bucket order, which is the same on all its members.

    Args:
        params: local parameters by logical name; boxes: the box of each in its logical tensor.
    """

    def __init__(
        self, comm: Comm, params: Mapping[str, torch.nn.Parameter], boxes: Mapping[str, Box], buckets: Sequence[Bucket]
    ) -> None:
        self.params = params
        self.exchanges = [BucketExchange(b, comm, boxes) for b in buckets if comm.rank in b.ranks]
        self._wide: dict[str, torch.Tensor] = {}
        self._armed = False
        self._missing: list[set[str]] = []
        self._queues: dict[tuple[int, ...], list[int]] = {}
        self._bucket_of = {name: i for i, e in enumerate(self.exchanges) for name in e.bucket.names}
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
                index = self._bucket_of[name]
                self._missing[index].discard(name)
                self._launch_ready(self.exchanges[index].bucket.ranks)

        return accumulated

    def begin_last_micro_batch(self) -> None:
        """From now on a complete bucket is sent at once."""
        self._arm()

    def _arm(self) -> None:
        self._armed = True
        self._missing = [set(e.bucket.names) for e in self.exchanges]
        queues: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, exchange in enumerate(self.exchanges):
            queues[exchange.bucket.ranks].append(i)
        self._queues = dict(queues)

    def _launch_ready(self, ranks: tuple[int, ...], force: bool = False) -> None:
        queue = self._queues[ranks]
        while queue and (force or not self._missing[queue[0]]):
            exchange = self.exchanges[queue.pop(0)]
            exchange.start_reduce({name: self.gradient(name) for name in exchange.bucket.names})

    def gradient(self, name: str) -> torch.Tensor:
        """The accumulated partial gradient of one local parameter (zeros where it took no part)."""
        grad = self._wide.get(name, self.params[name].grad)
        if grad is None:
            param = self.params[name]
            wide = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
            grad = torch.zeros_like(param, dtype=wide, requires_grad=False)
            self._wide[name] = grad
        return grad

    def finish(self) -> list[list[torch.Tensor]]:
        """Send what was not sent yet, wait, and return the summed gradients of the owned pieces per exchange.

        A bucket's local gradients are given up as soon as they are summed.
        """
        if not self._armed:
            self._arm()
        for ranks in self._queues:
            self._launch_ready(ranks, force=True)
        self._armed = False
        owned = []
        for exchange in self.exchanges:
            owned.append(exchange.finish_reduce({n: self.gradient(n) for n in exchange.bucket.names}))
            for name in exchange.bucket.names:
                self._wide.pop(name, None)
                self.params[name].grad = None
        return owned
