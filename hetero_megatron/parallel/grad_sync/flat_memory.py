"""The tensors of a bucket in one piece of memory: parameters, and the sums of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero_megatron.ops.gemm import joint_rows
from hetero_megatron.plans.buckets import Bucket


@dataclass(frozen=True)
class FlatTensors:
    """Tensors one after the other in one piece of memory, or, where nobody asks for that, apart.

    Attributes:
        memory: [elements], [0] of tensors that lie apart; views: every tensor, by name, in order.
    """

    memory: torch.Tensor
    views: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], memory: torch.Tensor) -> FlatTensors:
        """Those of given shapes in ``memory`` [elements]."""
        parts = zip(shapes.items(), memory.split([math.prod(shape) for shape in shapes.values()]), strict=True)
        return cls(memory, {name: part.view(*shape) for (name, shape), part in parts})


@torch.no_grad()
def flatten_parameters(
    params: Mapping[str, torch.nn.Parameter], buckets: Sequence[Bucket], together: bool = False
) -> dict[int, FlatTensors]:
    """Move each bucket's parameters to one piece of memory: one for several buckets where a product's weights are in
    both, so that they stay together, or for all of them (``together``). Values of those that have memory are kept.
    Returns them by the bucket's index."""
    runs: list[list[Bucket]] = []
    for bucket in buckets:
        border = [params[runs[-1][-1].names[-1]], params[bucket.names[0]]] if runs else []
        if border and (together or joint_rows(border) is not None):
            runs[-1].append(bucket)
        else:
            runs.append([bucket])
    flat: dict[int, FlatTensors] = {}
    for run in runs:
        sizes = [sum(params[name].numel() for name in bucket.names) for bucket in run]
        memory = params[run[0].names[0]].new_empty(sum(sizes))
        for bucket, part in zip(run, memory.split(sizes), strict=True):
            flat[bucket.index] = FlatTensors.of({name: params[name].shape for name in bucket.names}, part)
            for name, view in flat[bucket.index].views.items():
                if params[name].untyped_storage().nbytes():
                    view.copy_(params[name])
                params[name].data = view
    return flat


class GradientSums:
    """One rank's partial gradients, summed over the micro-batches of a step, in at least fp32.

    Args:
        params: local parameters by logical name; buckets: those that this rank holds a part of.

    Attributes:
        filled: names whose memory holds a sum of this step; all other memory holds anything.
        keep: whether memory that could be given up stays from one step to the next, for whoever has its address.
        allocated: by bucket; made when its first gradient comes.
        handed: the same of buckets whose gradients were summed up elsewhere before.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], buckets: Iterable[Bucket]) -> None:
        self._params = params
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self.bucket_of = {name: bucket.index for bucket in self._buckets.values() for name in bucket.names}
        self.filled: set[str] = set()
        self.keep = False
        self.allocated: dict[int, FlatTensors] = {}
        self.handed: dict[int, FlatTensors] = {}

    def view(self, name: str) -> torch.Tensor:
        """The memory of a parameter's gradient, of its shape."""
        index = self.bucket_of[name]
        if index not in self.allocated:
            shapes = {n: self._params[n].shape for n in self._buckets[index].names}
            memory = self.empty(name, sum(map(math.prod, shapes.values())))
            self.allocated[index] = FlatTensors.of(shapes, memory)
        return self.allocated[index].views[name]

    def empty(self, name: str, elements: int = 0) -> torch.Tensor:
        """[elements] of the dtype and on the device of a parameter's gradient."""
        param = self._params[name]
        return param.new_empty(elements, dtype=torch.promote_types(param.dtype, torch.float32))

    def sum(self, name: str) -> torch.Tensor:
        """The sum so far; zeros where nothing has come."""
        view = self.view(name)
        if name not in self.filled:
            view.zero_()
            self.filled.add(name)
        return view

    def add(self, name: str, grad: torch.Tensor) -> None:
        """Add what autograd made; the caller says that the parameter is ``filled``."""
        if name in self.filled:
            self.view(name).add_(grad)
        else:
            self.view(name).copy_(grad)

    def whole(self, bucket: int) -> FlatTensors:
        """All sums of a bucket, to be sent."""
        if bucket in self.handed:
            return self.handed[bucket]
        for name in self._buckets[bucket].names:
            self.sum(name)
        return self.allocated[bucket]

    def taken(self, bucket: int) -> FlatTensors:
        """The same, as the caller's own: what is added from now on begins another sum."""
        flat = self.whole(bucket)
        del self.allocated[bucket]
        self.filled.difference_update(self._buckets[bucket].names)
        return flat

    def give_up(self, bucket: int) -> None:
        """The bucket was sent and summed up elsewhere."""
        if self.handed.pop(bucket, None) is None and not self.keep:
            del self.allocated[bucket]
