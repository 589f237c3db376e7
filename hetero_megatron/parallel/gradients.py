"""Accumulating gradients over micro-batches and synchronising them bucket by bucket during the last backwards."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.ops.gemm import WeightGradients, WeightKernel
from hetero_megatron.ops.joint_gemm import joint_rows
from hetero_megatron.parallel.exchange import BucketExchange, FlatTensors
from hetero_megatron.parallel.routes import HopRoutes
from hetero_megatron.parallel.side_stream import SideStream
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, sync_actions
from hetero_megatron.schedule import Action


class GradientSync:
    """Gradients of one rank's parameters.

    The gradients of a bucket are summed over the micro-batches in one piece of memory, in at least fp32. Weights whose
    gradient is a matrix product get it added there by that product; others through autograd. A REDUCE starts as soon
    as all gradients of its bucket have come, of the last micro-batch in each chunk of the stage and of every product
    that was put off, and fewer than ``IN_FLIGHT`` buckets are under way. Every rank starts its REDUCEs in the order of
    their list, which is one for all ranks, so that the first one under way anywhere can always complete; the host never
    waits inside backward, where a neighbour may be waiting for what comes after.

    Where a device's library moves the gradients, the host does not ask whether they have come: what arrives is summed
    up on a stream of its own, and before a bucket starts, the compute stream waits for the sums of the bucket
    ``IN_FLIGHT`` places before it. Elsewhere a bucket is summed up when it has come, and others start later, during
    backward or at its end.

    Gradients that a device graph computes (``parallel/device_graphs.py``) are always added to what is there, which is
    zero before the first ones of a step: ``captured``, ``before_graph`` and ``after_graph``.

    Args:
        params: local parameters by logical name; boxes: the box of each in its logical tensor. Those of a dense bucket
            are moved to one piece of memory, so that new values can come and go without being packed; what was
            together stays together.
        chunks: names of the parameters of each of the stage's chunks; a name may be in several. None: all in one.

    Attributes:
        reduces, spreads: what this rank does in every step, in order.
        flat: the parameters of every dense bucket, by its index.
    """

    def __init__(
        self,
        comm: Comm,
        params: Mapping[str, torch.nn.Parameter],
        boxes: Mapping[str, Box],
        buckets: Sequence[Bucket],
        chunks: Sequence[Collection[str]] | None = None,
    ) -> None:
        self.params = params
        routes: dict[tuple[object, ...], HopRoutes] = {}
        self.exchanges = [BucketExchange(b, comm, boxes, routes) for b in buckets if comm.rank in b.ranks]
        self.by_bucket = {e.bucket.index: e for e in self.exchanges}
        self.reduces, self.spreads = sync_actions(buckets, comm.rank)
        self.flat = self._flatten([e.bucket for e in self.exchanges if e.bucket.dense])
        self._grads: dict[int, FlatTensors] = {}  # made when the first gradient of the bucket comes; kept, if in place
        self._aside = SideStream(comm.accelerator)
        self._summed: deque[tuple[int, Any]] = deque()  # buckets whose sums the compute stream has not waited for
        self._come: set[str] = set()  # whose gradient has a value in this step
        self._ahead: set[str] = set()  # whose gradients have come before the last backward begins
        self._armed = False
        self._captured: list[str] | None = None  # whose gradients a graph that is being captured computes
        self._keep = False  # the memory of the gradients, from one step to the next
        self._chunks = chunks or (params.keys(),)
        self._open: dict[str, int] = {}  # in how many chunks gradients of it may come after the next one
        self._missing: dict[int, set[str]] = {}  # by bucket, whose last gradient has not come
        self._queue: Sequence[Action] = ()
        self._started = 0  # of the queue
        self._ended = 0
        self._owned: list[list[torch.Tensor]] = []
        self._bucket_of = {name: e.bucket.index for e in self.exchanges for name in e.bucket.names}
        # Garbage collection does not look into hooks: one that held this object would keep all parameters forever.
        accumulated = WeakMethod(self._accumulated)
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(partial(_call, accumulated, name))

    @torch.no_grad()
    def _flatten(self, buckets: Sequence[Bucket]) -> dict[int, FlatTensors]:
        """Each bucket's parameters in one piece of memory: one for several buckets where a product's weights are in
        both, so that they stay together."""
        runs: list[list[Bucket]] = []
        for bucket in buckets:
            border = [self.params[runs[-1][-1].names[-1]], self.params[bucket.names[0]]] if runs else []
            if border and joint_rows(border) is not None:
                runs[-1].append(bucket)
            else:
                runs.append([bucket])
        flat: dict[int, FlatTensors] = {}
        for run in runs:
            sizes = [sum(self.params[name].numel() for name in bucket.names) for bucket in run]
            memory = self.params[run[0].names[0]].new_empty(sum(sizes))
            for bucket, part in zip(run, memory.split(sizes), strict=True):
                flat[bucket.index] = FlatTensors({name: self.params[name].shape for name in bucket.names}, part)
                for name, view in flat[bucket.index].views.items():
                    view.copy_(self.params[name])
                    self.params[name].data = view
        return flat

    def take_products(self, products: Iterable[Sequence[torch.Tensor]], gradients: WeightGradients) -> None:
        """Have the gradients of some weights, each used once in a forward and by ``gemm`` alone, added up in place;
        ``products``: the weights of each, several where they are multiplied at once."""
        names = {id(param): name for name, param in self.params.items()}
        for weights in products:
            gradients.assign(weights, partial(self._add_product, [names[id(weight)] for weight in weights]))

    def take_ahead(self, weight: torch.Tensor, gradients: WeightGradients, again: bool) -> None:
        """The same of the weight whose gradient comes in forward, before any of backward: the head's, where its loss
        makes it. ``again``: it is the embedding, too, of which backward brings another part."""
        name = next(name for name, param in self.params.items() if param is weight)
        gradients.assign([weight], partial(self._add_ahead, name))
        if not again:
            self._ahead.add(name)

    def _add_ahead(self, name: str, dy: torch.Tensor, x: torch.Tensor, kernel: WeightKernel) -> None:
        kernel(dy, x, self._view(name), float(name in self._come))
        self._come.add(name)

    def _add_product(self, names: Sequence[str], dy: torch.Tensor, x: torch.Tensor, kernel: WeightKernel) -> None:
        views = [self._view(name) for name in names]
        into = joint_rows(views)
        if into is not None:
            kernel(dy, x, into, self._beta(names[0]))
        else:  # they are sent in several buckets
            for name, view, part in zip(names, views, dy.split([len(view) for view in views], -1), strict=True):
                kernel(part, x, view, self._beta(name))
        for name in names:
            self._has_come(name)

    def _beta(self, name: str) -> float:
        """What the memory of a gradient is multiplied by before something is added."""
        return float(name in self._come or self._captured is not None)

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """A graph is captured: the gradients that products leave here and those that ``add`` is given are its own.
        Gives the names of all of them."""
        assert self._captured is None
        self._keep, self._captured = True, []
        try:
            yield self._captured
        finally:
            self._captured = None

    def add(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """In a capture: of a parameter whose product nobody took."""
        assert self._captured is not None
        name = next(name for name, known in self.params.items() if known is param)
        self._view(name).add_(grad)
        self._has_come(name)

    def before_graph(self, names: Iterable[str]) -> None:
        """A graph will add the gradients that were captured under these names."""
        for name in names:
            self.gradient(name)

    def after_graph(self, names: Iterable[str]) -> None:
        for name in names:
            self._has_come(name)

    def _accumulated(self, name: str, param: torch.Tensor) -> None:
        if param.grad is None:  # its product was taken; torch 2.13 runs the hook all the same
            return
        if name in self._come:
            self._view(name).add_(param.grad)
        else:
            self._view(name).copy_(param.grad)
        param.grad = None
        self._has_come(name)

    def _has_come(self, name: str) -> None:
        if self._captured is not None:
            self._captured.append(name)
            return
        self._come.add(name)
        if self._armed and not self._open[name]:
            self._missing[self._bucket_of[name]].discard(name)
            self._progress()

    def _view(self, name: str) -> torch.Tensor:
        index = self._bucket_of[name]
        if index not in self._grads:
            first = self.params[name]
            shapes = {n: self.params[n].shape for n in self.by_bucket[index].bucket.names}
            wide = torch.promote_types(first.dtype, torch.float32)
            memory = first.new_empty(sum(map(math.prod, shapes.values())), dtype=wide)
            self._grads[index] = FlatTensors(shapes, memory)
        return self._grads[index].views[name]

    def begin(self, reduces: Iterable[Action]) -> None:
        """The last gradients of the first chunk will come: from now on the ``reduces`` start, in this order."""
        self._queue = tuple(reduces)
        assert {a.micro_batch for a in self._queue} == self.by_bucket.keys(), "every bucket is reduced once"
        self._armed, self._started, self._ended, self._owned = True, 0, 0, []
        self._missing = {e.bucket.index: set(e.bucket.names) for e in self.exchanges}
        self._open = Counter(name for names in self._chunks for name in names)

    def last_gradients(self, chunk: int, products: Iterable[torch.Tensor] | None) -> None:
        """In what runs next the last gradients of a chunk come: of those weights whose ``products`` it computes, all
        others are there; or, where that is None, of any of its parameters."""
        ids = None if products is None else {id(weight) for weight in products}
        for name in self._chunks[chunk]:
            self._open[name] -= 1
            there = name in self._ahead or (ids is not None and id(self.params[name]) not in ids)
            if not self._open[name] and there:
                self._missing[self._bucket_of[name]].discard(name)
        self._progress()

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
        with self._aside.current():
            sums = exchange.finish_reduce(hop)
        if hop + 1 == len(exchange.hops):
            self._owned.append(sums)
            self._summed.append((bucket, self._aside.moment()))
            if self._aside.same:
                self._join()
        self._ended += 1
        return True

    def _join(self) -> None:
        """The compute stream waits for the sums of the oldest bucket; what it was sent and summed from is given up."""
        bucket, moment = self._summed.popleft()
        self._aside.join(moment)
        exchange = self.by_bucket[bucket]
        if not exchange.in_place and not self._keep:
            del self._grads[bucket]
        exchange.forget()

    def _start_next(self) -> bool:
        if self._started == len(self._queue):
            return False
        _, bucket, hop = self._queue[self._started]
        under_way = {a.micro_batch for a in self._queue[self._ended : self._started]}
        exchange = self.by_bucket[bucket]
        if hop:
            if bucket in under_way:  # its hop before has not ended
                return False
            with self._aside.current():
                exchange.start_reduce(hop)
        else:
            if self._missing[bucket] or len(under_way) >= IN_FLIGHT:
                return False
            while len(self._summed) >= IN_FLIGHT:
                self._join()
            for name in exchange.bucket.names:
                self.gradient(name)
            self._aside.catch_up()
            exchange.start_reduce(0, self._grads[bucket])
        self._started += 1
        return True

    def gradient(self, name: str) -> torch.Tensor:
        """The accumulated partial gradient of one local parameter (zeros where it took no part)."""
        view = self._view(name)
        if name not in self._come:
            view.zero_()
            self._come.add(name)
        return view

    def complete(self, action: Action) -> None:
        """Return when ``action`` has ended. Backward is over, so what has not come by now is zero."""
        self._missing = {bucket: set() for bucket in self.by_bucket}
        end = self._queue.index(action) + 1
        while self._ended < end:
            if not self._start_next():
                self._end_next(wait=True)
        done = {a.micro_batch for a in self._queue[:end]} - {a.micro_batch for a in self._queue[end:]}
        while self._summed and self._summed[0][0] in done:
            self._join()

    def finish(self) -> list[list[torch.Tensor]]:
        """Complete what is left, and return the summed gradients of the owned pieces per exchange; the memory of the
        gradients that are summed up in place goes when these are given up."""
        if not self._armed:
            self.begin(self.reduces)
        if self._queue:
            self.complete(self._queue[-1])
        self._armed = False
        self._come.clear()
        owned, self._owned = self._owned, []
        for sums, exchange in zip(owned, self.exchanges, strict=True):
            for tensor in sums if not exchange.in_place else ():
                self._aside.give(tensor)
        return owned


def _call(method: WeakMethod[Any], name: str, param: torch.Tensor) -> None:
    if (alive := method()) is not None:
        alive(name, param)
