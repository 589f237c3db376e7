"""The REDUCEs of one step on one rank: when each bucket starts and ends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.flat_memory import GradientSums
from hetero_megatron.parallel.side_stream import SideStream
from hetero_megatron.plans.buckets import IN_FLIGHT
from hetero_megatron.schedule import Action


class StepReduction:
    """Exists from the begin of a step's last backwards to the end of its last REDUCE.

    A REDUCE starts as soon as all gradients of its bucket have come, of the last micro-batch in each chunk of the stage
    and of every product that was put off, and fewer than ``IN_FLIGHT`` buckets are under way. Every rank starts its
    REDUCEs in the order of their list, which is one for all ranks, so that the first one under way anywhere can always
    complete; the host never waits inside backward, where a neighbour may be waiting for what comes after.

    Where a device's library moves the gradients, the host does not ask whether they have come: what arrives is summed
    up on a stream of its own, and before a bucket starts, the compute stream waits for the sums of the bucket
    ``IN_FLIGHT`` places before it. Elsewhere a bucket is summed up when it has come, and others start later, during
    backward or at its end.

    Args:
        reduces: the REDUCEs (bucket, hop) in their order; every bucket has its hops there.
        exchanges: by bucket.
        sums: of the step, to which backward still adds.
        aside: stream on which arrived parts are summed up.
        chunks: names of the parameters of each chunk of the stage; a name may be in several.
    """

    def __init__(
        self,
        reduces: Iterable[Action],
        exchanges: Mapping[int, BucketExchange],
        sums: GradientSums,
        aside: SideStream,
        chunks: Sequence[Collection[str]],
    ) -> None:
        self._queue = tuple(reduces)
        assert {a.micro_batch for a in self._queue} == exchanges.keys(), "every bucket is reduced once"
        self._exchanges, self._sums, self._aside = exchanges, sums, aside
        self._started = self._ended = 0  # of the queue
        self._missing = {i: set(e.bucket.names) for i, e in exchanges.items()}  # whose last gradient has not come
        self._open = Counter(name for names in chunks for name in names)  # chunks in which gradients may still begin
        self._summed: deque[tuple[int, Any]] = deque()  # buckets whose sums the compute stream has not waited for
        self._owned: list[list[torch.Tensor]] = []

    def last_of_chunk(self, names: Iterable[str], there: Collection[str]) -> None:
        """What runs next brings the last gradients of a chunk with these parameters; those of ``there`` have come."""
        for name in names:
            self._open[name] -= 1
            if not self._open[name] and name in there:
                self._missing[self._sums.bucket_of[name]].discard(name)
        self._progress()

    def has_come(self, name: str) -> None:
        """A gradient was added to the sum of ``name``."""
        if not self._open[name]:
            self._missing[self._sums.bucket_of[name]].discard(name)
            self._progress()

    def complete(self, action: Action) -> None:
        """Return when ``action`` has ended. Backward is over, so what has not come by now is zero."""
        self._missing = {bucket: set() for bucket in self._exchanges}
        end = self._queue.index(action) + 1
        while self._ended < end:
            if not self._start_next():
                self._end_next(wait=True)
        finished = {a.micro_batch for a in self._queue[:end]} - {a.micro_batch for a in self._queue[end:]}
        while self._summed and self._summed[0][0] in finished:
            self._join()

    def finish(self) -> list[list[torch.Tensor]]:
        """Complete what is left; returns the summed gradients of the owned pieces per exchange."""
        if self._queue:
            self.complete(self._queue[-1])
        return self._owned

    def _progress(self) -> None:
        """Sum what has arrived, start what can start, without waiting."""
        while self._end_next(wait=False) or self._start_next():
            pass

    def _end_next(self, wait: bool) -> bool:
        if self._ended == self._started:
            return False
        _, bucket, hop = self._queue[self._ended]
        exchange = self._exchanges[bucket]
        if not wait and not exchange.arrived(hop):
            return False
        with self._aside.current():
            owned = exchange.finish_reduce(hop)
        if hop + 1 == len(exchange.hops):
            self._owned.append(owned)
            self._summed.append((bucket, self._aside.moment()))
            if self._aside.same:
                self._join()
        self._ended += 1
        return True

    def _join(self) -> None:
        """The compute stream waits for the sums of the oldest bucket; what it was sent and summed from is given up."""
        bucket, moment = self._summed.popleft()
        self._aside.join(moment)
        exchange = self._exchanges[bucket]
        if not exchange.in_place:
            self._sums.give_up(bucket)
        exchange.forget()

    def _start_next(self) -> bool:
        if self._started == len(self._queue):
            return False
        _, bucket, hop = self._queue[self._started]
        busy_buckets = {a.micro_batch for a in self._queue[self._ended : self._started]}
        exchange = self._exchanges[bucket]
        if hop:
            if bucket in busy_buckets:  # its hop before has not ended
                return False
            with self._aside.current():
                exchange.start_reduce(hop)
        else:
            if self._missing[bucket] or len(busy_buckets) >= IN_FLIGHT:
                return False
            while len(self._summed) >= IN_FLIGHT:
                self._join()
            sums = self._sums.whole(bucket)
            self._aside.catch_up()
            exchange.start_reduce(0, sums)
        self._started += 1
        return True
