"""Seconds of what a chip is timed with alone, outside of pipelines: updates of weights, attention, a ring's blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from math import ceil
from typing import Generic, TypeVar

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout.mask import FULL, Tile
from hetero_megatron.ops import attention
from hetero_megatron.ops.block_attention import BlockAttention, accumulators, key_heads
from hetero_megatron.ops.optimizer_ops import l2norm_aten
from hetero_megatron.ops.tile_kernels import tile_kernel
from hetero_megatron.parallel.optimizer import squared_norm
from hetero_megatron.parallel.update import Optimizer
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.calibration.chips import Job
from hetero_megatron.training.calibration.runs import middle, quiet

UPDATED = 1 << 23  # elements, of all sets of weights of a size together: more than caches hold of them
OPTIMIZER_SETS = {1 << 18: 24, 1 << 21: 3}  # elements of an update: updates in a row that are timed, as in a step
TURN, ENOUGH = 0.01, 0.5  # seconds: of calls in a row; for each thing to time, of each step
LEAST, MOST = 6, 150  # turns of each, also where calls take long; calls of each step, also where they are short
TOKENS = 2048  # of attentions in a row, at least one: in the midst of a step's work, not after a pause
VISITS = 4  # blocks of keys, against one

AttentionRow = tuple[int, int, int, float, float]  # length, heads, head_dim, forward, backward
RowsAlone = tuple[list[tuple[int, float]], list[AttentionRow], list[AttentionRow]]
K = TypeVar("K", bound=Hashable)


def measures_alone(
    job: Job, spec: ModelSpec, lengths: Sequence[int]
) -> dict[tuple[str, int], Callable[[], Sequence[float]]]:
    """What a chip is timed with alone, by kind and size: updates of so many owned elements; attention over one sequence
    of each of ``lengths``; visits of a ring's block of it."""
    measures: dict[tuple[str, int], Callable[[], Sequence[float]]] = {}
    for elements, count in OPTIMIZER_SETS.items():
        # In turns: a step's other work leaves nothing of a chip's state in caches.
        sets = [_weights(job, elements) for _ in range(UPDATED // elements)]
        measures["optimizer", elements] = update = partial(_update, job.comm, cycle(sets), count)
        for _ in sets[count::count]:
            update()  # allocates; the last sets' first call is the measure's own, which does not count
    for length in lengths:
        measures["attention", length] = partial(_attention, job.comm, job.dtype, spec, length)
        if length >= VISITS:
            measures["visits", length] = partial(_visits, job, spec, length)
    return measures


def often(key: tuple[str, int]) -> bool:
    """Whether one of :func:`measures_alone` has a turn every time: what is short, and changes with others' memory."""
    return key[0] == "optimizer"


def summary(key: tuple[str, int]) -> Callable[[Sequence[float]], float]:
    """What many calls of one of :func:`measures_alone` say."""
    return quiet if key[0] == "optimizer" else middle


def rows_alone(
    found: Mapping[tuple[str, int], Sequence[float]], spec: ModelSpec
) -> RowsAlone:
    """Of the seconds of :func:`measures_alone`: (elements, seconds) of norm, scaling and update; rows of causal
    attention; rows of what one more block of keys and values costs in the ring beside its FLOPs (launches, merging,
    packing)."""
    heads = (spec.num_heads, spec.head_dim)
    return (
        [(size, seconds[0]) for (kind, size), seconds in found.items() if kind == "optimizer"],
        [(size, *heads, s[0], s[1]) for (kind, size), s in found.items() if kind == "attention"],
        [(size, *heads, max(s[0], 1e-9), max(s[1], 1e-9)) for (kind, size), s in found.items() if kind == "visits"],
    )


class Interleaved(Generic[K]):
    """Times measures in turns and in parts, between other measurements: a machine that is slow for some seconds is so
    in a little of everything. Each returns the seconds that it saw; what its first call saw does not count.

    Args:
        steps: ``ENOUGH`` seconds for each measure, of each.
        summary: of a measure, what many of its seconds say.
        often: of a measure, whether it has a turn every time, however long the others take.
    """

    def __init__(
        self,
        measures: Mapping[K, Callable[[], Sequence[float]]],
        steps: int,
        summary: Callable[[K], Callable[[Sequence[float]], float]] = lambda _: middle,
        often: Callable[[K], bool] = lambda _: False,
    ) -> None:
        self._measures, self._steps, self._summary = measures, steps, summary
        self._found: dict[K, list[Sequence[float]]] = {}
        self._often = [key for key in measures if often(key)]
        self._turns, self._spent, self._total = 0, 0.0, steps * ENOUGH * len(measures)

    def take(self, share: float) -> None:
        """Go on until this share of the turns and of the time is over, or of the calls that are enough is done; what is
        timed often has one turn each time in any case: calls of one turn are alike."""
        if not self._found:
            for key, measure in self._measures.items():
                measure()
                self._found[key] = []
        most = ceil(self._steps * MOST * share)
        for key in self._often:
            self._turn(key, most)
        start, before = time.perf_counter(), self._spent
        while self._turns < LEAST * share or self._spent < self._total * share:
            wanted = [key for key, calls in self._found.items() if len(calls) < most]
            if not wanted:
                break
            for key in wanted:
                self._turn(key, most)
            self._turns += 1
            self._spent = before + time.perf_counter() - start

    def _turn(self, key: K, most: int) -> None:
        """Calls in a row, until the turn is over or there are ``most`` in all turns so far."""
        until = time.perf_counter() + TURN
        for _ in range(min(most - len(self._found[key]), self._steps * MOST // LEAST)):
            self._found[key].append(self._measures[key]())
            if time.perf_counter() >= until:
                break

    def seconds(self) -> dict[K, list[float]]:
        """Of each measure, what it returned, summed up."""
        return {key: [self._summary(key)(column) for column in zip(*calls)] for key, calls in self._found.items()}


def _weights(job: Job, elements: int) -> tuple[Optimizer, list[torch.Tensor]]:
    """So many, and what updates them. Pieces of one owner are not many and not small; 16 stand for a layer's."""
    wide = torch.promote_types(job.dtype, torch.float32)
    masters = [torch.zeros(elements // 16, dtype=wide, device=job.comm.device) for _ in range(16)]
    return job.optimizer([{"params": masters, "decay": True}]), masters


def _update(comm: Comm, sets: Iterator[tuple[Optimizer, list[torch.Tensor]]], count: int) -> list[float]:
    """Seconds of norm, scaling and update of one's weights: mean of the next ``count``, one after the other."""
    mine = [(optimizer, masters, [torch.ones_like(m) for m in masters]) for optimizer, masters in islice(sets, count)]
    before = comm.clock.computed
    with comm.clock.counting(), comm.clock.work():
        for optimizer, masters, grads in mine:
            squared_norm([grads], lambda tensors: l2norm_aten(tensors)[0])
            torch._foreach_mul_(grads, 0.5)
            for master, grad in zip(masters, grads):
                master.grad = grad
            optimizer.step()
    return [(comm.clock.computed - before) / count]


def _attention(comm: Comm, dtype: torch.dtype, spec: ModelSpec, length: int) -> list[float]:
    """Seconds (forward, backward) of attention over one sequence: means of some in a row."""
    count = max(1, TOKENS // length)
    q, k, v = (
        torch.randn(1, length, n, spec.head_dim, dtype=dtype, device=comm.device, requires_grad=True)
        for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    with comm.clock.counting(), comm.clock.work():
        at = [comm.clock.computed]
        outs = [attention(q, k, v)[0] for _ in range(count)]
        comm.clock.settle()
        at.append(comm.clock.computed)
        for out in outs:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        comm.clock.settle()
        at.append(comm.clock.computed)
    return [(at[1] - at[0]) / count, (at[2] - at[1]) / count]


def _ring(job: Job, spec: ModelSpec, length: int) -> tuple[BlockAttention, tuple[torch.Tensor, ...]]:
    """Attention to blocks of keys, and its q, k, v and gradient of the output."""
    repeat = spec.queries_per_kv
    block = BlockAttention(tile_kernel(job.comm.device), key_heads([i // repeat for i in range(spec.num_heads)]))
    counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    return block, tuple(
        torch.randn(1, length, n, spec.head_dim, dtype=job.dtype, device=job.comm.device) for n in counts
    )


def _visits(job: Job, spec: ModelSpec, length: int) -> list[float]:
    """Seconds (forward, backward) that a further block costs: the same keys pass in several and in one."""
    block, tensors = _ring(job, spec, length)  # not kept: pipelines between two calls need the memory
    several, one = (
        _visit(job.comm, block, tensors, [(i * length // n, (i + 1) * length // n) for i in range(n)])
        for n in (VISITS, 1)
    )
    return [(a - b) / (VISITS - 1) for a, b in zip(several, one)]


def _visit(
    comm: Comm, attention: BlockAttention, tensors: tuple[torch.Tensor, ...], blocks: Sequence[tuple[int, int]]
) -> list[float]:
    """Seconds (forward, backward) of attention to keys that come in ``blocks``, all visible to all queries."""
    q, k, v, grad = tensors
    tiles = [[(None, Tile(0, q.shape[1], 0, b - a, FULL, b - a))] for a, b in blocks]
    with comm.clock.counting(), comm.clock.work():
        at = [comm.clock.computed]
        out, lse = accumulators(q)
        for (a, b), mine in zip(blocks, tiles, strict=True):
            pair = torch.stack((k[:, a:b], v[:, a:b]))  # as it is sent on
            attention.forward(q, pair[0], pair[1], mine, out, lse)
        comm.clock.settle()
        at.append(comm.clock.computed)
        dq, delta = torch.zeros_like(out), attention.kernel.delta(grad, out)
        for (a, b), mine in zip(blocks, tiles, strict=True):
            pair = torch.stack((k[:, a:b], v[:, a:b]))
            sums = torch.zeros(pair.shape, dtype=out.dtype, device=out.device)
            attention.backward(grad, q, pair[0], pair[1], out, lse, mine, (dq, sums[0], sums[1]), delta)
            sums += torch.stack((sums[0], sums[1]))  # the sum so far arrives, and leaves
        comm.clock.settle()
        at.append(comm.clock.computed)
    return [at[1] - at[0], at[2] - at[1]]
