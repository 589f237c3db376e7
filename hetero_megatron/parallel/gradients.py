"""Accumulating gradients over micro-batches and synchronising them bucket by bucket during the last backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.parallel.exchange import BucketExchange
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket


class GradientSync:
    """Gradients of one rank's parameters.

    Full-precision parameters accumulate in ``.grad`` as autograd does; 16-bit ones in an fp32 sum per parameter.
    In the last micro-batch a bucket is sent as soon as all its gradients are there and fewer than ``IN_FLIGHT`` are
    under way. Every rank sends its buckets in the order of their index, so that the lowest one under way anywhere can
    always complete; nothing waits inside backward, where a neighbour may be waiting for what comes after it.

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
        self._under_way: deque[int] = deque()
        self._launched = 0
        self._owned: list[list[torch.Tensor]] = []
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
                self._missing[self._bucket_of[name]].discard(name)
                self._progress()

        return accumulated

    def begin_last_micro_batch(self) -> None:
        """From now on a complete bucket is sent at once."""
        self._armed, self._launched, self._owned = True, 0, []
        self._missing = [set(e.bucket.names) for e in self.exchanges]

    def _progress(self) -> None:
        """Sum what has arrived, send what is complete, without waiting."""
        while self._under_way and self.exchanges[self._under_way[0]].arrived:
            self._sum_oldest()
        while (
            self._launched < len(self.exchanges)
            and not self._missing[self._launched]
            and len(self._under_way) < IN_FLIGHT
        ):
            self._launch()

    def _launch(self) -> None:
        exchange = self.exchanges[self._launched]
        exchange.start_reduce({name: self.gradient(name) for name in exchange.bucket.names})
        self._under_way.append(self._launched)
        self._launched += 1

    def _sum_oldest(self) -> None:
        """A bucket's local gradients are given up as soon as they are summed."""
        exchange = self.exchanges[self._under_way.popleft()]
        self._owned.append(exchange.finish_reduce({n: self.gradient(n) for n in exchange.bucket.names}))
        for name in exchange.bucket.names:
            self._wide.pop(name, None)
            self.params[name].grad = None

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
        """Send what was not sent yet, wait, and return the summed gradients of the owned pieces per exchange."""
        if not self._armed:
            self.begin_last_micro_batch()
        self._armed = False
        while len(self._owned) < len(self.exchanges):
            while self._launched < len(self.exchanges) and len(self._under_way) < IN_FLIGHT:
                self._launch()
            self._sum_oldest()
        owned, self._owned = self._owned, []
        return owned
