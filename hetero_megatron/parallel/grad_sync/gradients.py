"""Accumulating gradients over micro-batches, and synchronising them bucket by bucket during the last backwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.ops.gemm import WeightGradients, WeightKernel, joint_rows
from hetero_megatron.parallel.grad_sync.divided_sums import DividedSums
from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.flat_memory import GradientSums, flatten_parameters
from hetero_megatron.parallel.grad_sync.routes import HopRoutes, OwnedPiece
from hetero_megatron.parallel.side_stream import SideStream
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.program import sync_actions
from hetero_megatron.schedule import Action

if TYPE_CHECKING:
    from hetero_megatron.parallel.grad_sync.reduction import StepReduction
    from hetero_megatron.parallel.host_memory import HostRows


class GradientSync:
    """Gradients of one rank's parameters.

    In a step, gradients are summed over the micro-batches (:class:`GradientSums`). Weights whose gradient is a matrix
    product get it added there by that product; others through autograd. From :meth:`begin` to :meth:`finish`, buckets
    whose sums are complete go to their owners (:class:`StepReduction`, which exists only then).

    Gradients that a device graph computes (``parallel/device_graphs.py``) are always added to what is there, which is
    zero before the first ones of a step: ``captured``, ``before_graph`` and ``after_graph``.

    Args:
        params: local parameters by logical name; boxes: the box of each in its logical tensor. Those of a dense bucket
            are moved to one piece of memory, so that new values can come and go without being packed; what was
            together stays together.
        buckets: of the plan.
        sent_as: dtype in which gradients travel between ranks; None: that of their sums.
        chunks: names of the parameters of each of the stage's chunks; a name may be in several. None: all in one.
        late: buckets start when backward is over, as the same ranks gather weights in it: which of several transfers of
            one group a rank starts first must not depend on when earlier ones end.
        fixed_order: no library of devices adds up gradients, in an order of its own.
        host: where sums of divided weights are, of an optimizer in host memory.

    Attributes:
        exchanges: of the buckets that this rank is in, in their order, but those of which sums go on in another one;
            by_bucket: by the bucket's index; all_exchanges: those, too.
        divided: of weights that the stage divides, also where sums go on, by bucket, divided_names; divided_sums: of
            their gradients, None without such weights.
        reduces, all_gathers: what this rank does in every step, in order.
        flat: the parameters of every dense bucket, by its index.
        sums: this rank's partial gradients of the step.
    """

    def __init__(
        self,
        comm: Comm,
        params: Mapping[str, torch.nn.Parameter],
        boxes: Mapping[str, Box],
        buckets: Sequence[Bucket],
        chunks: Sequence[Collection[str]] | None = None,
        sent_as: torch.dtype | None = None,
        late: bool = False,
        fixed_order: bool = False,
        host: HostRows | None = None,
    ) -> None:
        self.params, self._late = params, late
        routes: dict[tuple[object, ...], HopRoutes] = {}
        self.all_exchanges = list[BucketExchange]()
        kept: dict[int, Sequence[OwnedPiece]] = {}  # by bucket in which sums go on
        for bucket in (b for b in buckets if comm.rank in b.ranks):
            exchange = BucketExchange(bucket, comm, boxes, routes, sent_as, kept.get(bucket.index), fixed_order)
            self.all_exchanges.append(exchange)
            if bucket.onward is not None:
                kept[bucket.onward] = exchange.pieces
        self.exchanges = [e for e in self.all_exchanges if e.bucket.onward is None]
        self.by_bucket = {e.bucket.index: e for e in self.exchanges}
        self.divided = {e.bucket.index: e for e in self.all_exchanges if e.bucket.weights is not None}
        self.reduces, self.all_gathers = sync_actions(buckets, comm.rank)
        self.flat = flatten_parameters(params, [
            e.bucket for e in self.exchanges if e.bucket.dense and e.bucket.weights is None
        ])  # fmt: skip
        self.sums = GradientSums(params, [e.bucket for e in self.all_exchanges if e.bucket.index not in kept])
        self._reduction: StepReduction | None = None
        self._accelerator = comm.accelerator
        self.divided_names = {name for e in self.divided.values() for name in e.bucket.names}
        self.divided_sums = DividedSums(self.divided, self.sums, host) if self.divided else None
        self._divided_owned: dict[int, list[torch.Tensor]] | None = None  # by bucket, once backward is over
        self._chunks = [list(names) for names in chunks or (params.keys(),)]
        self._ahead: set[str] = set()  # whose gradients have come before the last backward begins
        self._captured: list[str] | None = None  # whose gradients a graph that is being captured computes
        # Garbage collection does not look into hooks: one that held this object would keep all parameters forever.
        accumulated = WeakMethod(self._accumulated)
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(partial(_call, accumulated, name))

    def fuse_wgrad_accumulation(self, products: Iterable[Sequence[torch.Tensor]], gradients: WeightGradients) -> None:
        """Have the gradients of some weights added up in place by the product that makes them.

        Args:
            products: the weights of each product, [out, in], several where they are multiplied at once. Each is used
                once in a forward, and by ``gemm`` alone.
            gradients: of the kernel plan, which calls back with dy [..., out] and x [..., in].
        """
        names = {id(param): name for name, param in self.params.items()}
        for weights in products:
            gradients.assign(weights, partial(self._add_product, [names[id(weight)] for weight in weights]))

    def fuse_head_wgrad(self, weight: torch.Tensor, gradients: WeightGradients, again: bool) -> None:
        """The same of the weight whose gradient comes in forward, before any of backward: the head's, [V_local, h],
        where its loss makes it.

        Args:
            again: the weight is the embedding, too, of which backward brings another part.
        """
        name = self._name(weight)
        gradients.assign([weight], partial(self._add_ahead, name))
        if not again:
            self._ahead.add(name)

    def _name(self, param: torch.Tensor) -> str:
        return next(name for name, candidate in self.params.items() if candidate is param)

    def _add_ahead(self, name: str, dy: torch.Tensor, x: torch.Tensor, kernel: WeightKernel) -> None:
        """dy: [tokens, V_local], x: [tokens, h]."""
        kernel(dy, x, self.sums.view(name), float(name in self.sums.filled))
        self.sums.filled.add(name)

    def _add_product(self, names: Sequence[str], dy: torch.Tensor, x: torch.Tensor, kernel: WeightKernel) -> None:
        """dy: [tokens, outputs of all of them], x: [tokens, inputs]."""
        views = [self.sums.view(name) for name in names]
        joint_sum = joint_rows(views)
        if joint_sum is not None:
            kernel(dy, x, joint_sum, self._beta(names[0]))
        else:  # they are sent in several buckets
            for name, view, part in zip(names, views, dy.split([len(view) for view in views], -1), strict=True):
                kernel(part, x, view, self._beta(name))
        for name in names:
            self._has_come(name)

    def _beta(self, name: str) -> float:
        """What the memory of a gradient is multiplied by before something is added."""
        return float(name in self.sums.filled or self._captured is not None)

    def _accumulated(self, name: str, param: torch.Tensor) -> None:
        """Called when autograd has made a parameter's gradient."""
        if param.grad is None:  # its product was taken; torch 2.13 runs the hook all the same
            return
        self.sums.add(name, param.grad)
        param.grad = None
        self._has_come(name)

    def _has_come(self, name: str) -> None:
        if self._captured is not None:
            self._captured.append(name)
            return
        self.sums.filled.add(name)
        if self._reduction is not None and not self._late:
            self._reduction.has_come(name)

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """Context in which a graph is captured: the gradients that products leave here and those that ``add`` is given
        are its own. Gives the list of their names, which grows meanwhile. From now on the memory of all sums stays."""
        assert self._captured is None
        self.sums.keep, self._captured = True, []
        try:
            yield self._captured
        finally:
            self._captured = None

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """In a capture: add the gradient, of the parameter's shape, of one whose product nobody took."""
        assert self._captured is not None
        name = self._name(param)
        self.sums.view(name).add_(grad)
        self._has_come(name)

    def before_graph(self, names: Iterable[str]) -> None:
        """A graph will add the gradients that were captured under these names: zeros where nothing has come yet."""
        for name in names:
            self.sums.sum(name)

    def after_graph(self, names: Iterable[str]) -> None:
        """A graph has added them."""
        for name in names:
            self._has_come(name)

    @cached_property
    def _aside(self) -> SideStream:
        return SideStream(self._accelerator)

    def begin(self, reduces: Iterable[Action]) -> None:
        """The last gradients of the first chunk will come: from now on the ``reduces`` start, in this order, each as
        soon as its bucket is complete. Every bucket of this rank is among them but those of divided
        weights, which are summed up after every backward."""
        from hetero_megatron.parallel.grad_sync.reduction import StepReduction

        undivided = {index: e for index, e in self.by_bucket.items() if index not in self.divided}
        self._reduction = StepReduction(reduces, undivided, self.sums, self._aside, self._chunks)

    def last_gradients(self, chunk: int, products: Iterable[torch.Tensor] | None) -> None:
        """What runs next brings the last gradients of a chunk. Called after :meth:`begin`, once per chunk.

        Args:
            chunk: its number on this stage.
            products: the weights, [outputs, inputs] each, whose products run next, while the gradients of all others
                are there; None: those of any of its parameters may come.
        """
        assert self._reduction is not None, "before begin"
        if self._late:
            return
        names, ahead_names = self._chunks[chunk], self._ahead
        if products is not None:
            ids = {id(weight) for weight in products}
            ahead_names = ahead_names | {name for name in names if id(self.params[name]) not in ids}
        self._reduction.last_of_chunk(names, ahead_names)

    def complete(self, action: Action) -> None:
        """Return when the REDUCE ``action`` has ended. Backward is over, so what has not come by now is zero.

        Raises:
            CommError: a peer is gone.
        """
        assert self._reduction is not None, "before begin"
        self._end_divided()
        self._reduction.complete(action)

    def _end_divided(self) -> None:
        """Backward is over: sums of divided weights are complete, and some of them go on."""
        if self.divided_sums is not None and self._divided_owned is None:
            self._divided_owned = self.divided_sums.hand_on()

    def finish(self) -> list[list[torch.Tensor]]:
        """Complete what is left; the step ends, and the next gradient begins another one.

        Returns:
            per exchange, the sums over all holders of the pieces that this rank owns, in the dtype of ``sums``; where
            they are summed up in place, in the memory of ``sums``, which the next step overwrites.

        Raises:
            CommError: a peer is gone.
        """
        if self._reduction is None:
            self.begin(self.reduces)
        assert self._reduction is not None
        self._end_divided()
        undivided_sums, divided = iter(self._reduction.finish()), self._divided_owned or {}
        owned = [divided[index] if index in divided else next(undivided_sums) for index in self.by_bucket]
        self._reduction = self._divided_owned = None
        self.sums.filled.clear()
        for pieces, exchange in zip(owned, self.exchanges, strict=True):
            aside = not exchange.in_place and exchange.bucket.index not in self.divided  # those are summed in backward
            for tensor in pieces if aside else ():
                self._aside.give(tensor)
        return owned

    def rehearsed(self) -> None:
        """Send the sums off as a step does, and forget them: what was added up so far was no step's."""
        self.finish()
        if not self.sums.keep:
            self.sums.allocated.clear()


def _call(method: WeakMethod[Any], name: str, param: torch.Tensor) -> None:
    if (alive := method()) is not None:
        alive(name, param)
