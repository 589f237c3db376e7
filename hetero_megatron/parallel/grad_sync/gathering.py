"""New values of parameters on their way from owners to holders, some of them while the next step's forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hetero_megatron.model.gpt import GPTStage
from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.gradients import GradientSync
from hetero_megatron.plans.buckets import IN_FLIGHT
from hetero_megatron.schedule import Action
from hetero_megatron.spec import LogicalTensor

Values = Callable[[BucketExchange], Mapping[str, torch.Tensor]]  # what new values of a bucket come into


class ParameterGather:
    """The ALL_GATHERs of one rank.

    All of them start at the end of the step, in the order of the step's list, which is one for all ranks: so none waits
    for what a peer starts only in its next forward. What comes into the memory of the parameters themselves
    (:attr:`~hetero_megatron.plans.buckets.Bucket.dense`) holds no other memory, and may be under way until
    :meth:`arrive` or :meth:`finish`; all other buckets have come when :meth:`run` returns.

    Args:
        values: by exchange, the arrays that its new values come into.
    """

    def __init__(self, sync: GradientSync, values: Values) -> None:
        self.sync, self._values = sync, values
        self._open: dict[int, Action] = {}  # by bucket, in the order in which they were started

    def run(
        self, masters: Mapping[int, Sequence[torch.Tensor]], keep_own: Callable[[BucketExchange], None],
        ahead: bool = False,
    ) -> None:  # fmt: skip
        """Send the owners' values.

        Args:
            masters: by bucket, values of the owned pieces; keep_own: writes those of a bucket into this rank's own
                parameters.
            ahead: return while dense buckets are under way.
        """
        self.finish()
        for action in self.sync.all_gathers:
            _, bucket, hop = action
            exchange = self.sync.by_bucket[bucket]
            # A bucket goes on when its hop before has come; others wait for their turn, to bound the memory.
            if bucket in self._open:
                self._arrive(bucket)
            while len(packed := self._packed()) >= IN_FLIGHT:
                self._arrive(packed[0])
            if hop + 1 == len(exchange.hops):
                keep_own(exchange)
            dtype = self.sync.params[exchange.bucket.names[0]].dtype
            exchange.start_spread(hop, masters[bucket], self._values(exchange), dtype, self.sync.flat.get(bucket))
            self._open[bucket] = action
        for bucket in list(self._open) if not ahead else self._packed():
            self._arrive(bucket)

    def arrive(self, buckets: Sequence[int]) -> None:
        """Those of them that are under way have come when this returns; on a device, for what is queued from now on."""
        for bucket in buckets if self._open else ():
            if bucket in self._open:
                self._arrive(bucket)

    def finish(self) -> None:
        """All of them."""
        self.arrive(list(self._open))

    def _packed(self) -> list[int]:
        return [bucket for bucket in self._open if not self.sync.by_bucket[bucket].bucket.dense]

    @torch.no_grad()
    def _arrive(self, bucket: int) -> None:
        exchange, action = self.sync.by_bucket[bucket], self._open.pop(bucket)
        exchange.finish_spread(action.chunk, self._values(exchange))


def apply_parameter_gather(
    model: GPTStage, gather: ParameterGather, tensors: Iterable[LogicalTensor]
) -> ParameterGather:
    """Have a stage wait for its embedding, its layers each for their own parameters, and its final norm for all that
    are left. ``tensors``: of the model. Returns the gather."""
    layer_of = {tensor.name: tensor.layer for tensor in tensors}
    needed: dict[int | str, list[int]] = {}
    for index, exchange in gather.sync.by_bucket.items():
        for step in dict.fromkeys(layer_of[name] for name in exchange.bucket.names):
            needed.setdefault(step, []).append(index)
    if model.has_embed:
        model.register_forward_pre_hook(partial(_wait, partial(gather.arrive, needed.get("embed", ()))))
    for layer in model.layers():
        layer.register_forward_pre_hook(partial(_wait, partial(gather.arrive, needed.get(layer.number, ()))))
    if model.has_head:
        model.model["norm"].register_forward_pre_hook(partial(_wait, gather.finish))
    return gather


def _wait(arrived: Callable[[], None], *_: Any) -> None:
    arrived()
