"""Seconds of what a chip is timed with alone, outside of pipelines: updates of weights, attention, a ring's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from statistics import median

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

UPDATED = 1 << 23  # elements, of all sets of weights of a size together: more than caches hold of them
OPTIMIZER_SETS = {1 << 18: 24, 1 << 21: 3}  # elements of an update: updates in a row that are timed, as in a step
TOKENS = 2048  # of attentions in a row, at least one: in the midst of a step's work, not after a pause
VISITS = 4  # blocks of keys, against one

AttentionRow = tuple[int, int, int, float, float]  # length, heads, head_dim, forward, backward
Measure = Callable[[], Sequence[float]]  # a call -> the seconds that it saw


@dataclass
class Alone:
    """What one rank measured.

    Attributes:
        optimizer: (elements, seconds) of norm, scaling and update.
        attention: rows of causal attention over one sequence.
        visits: rows of what one more block of keys and values costs in the ring beside its FLOPs (launches, merging,
            packing).
        spread: the largest (max - min) / median of the calls of updates and attention.
    """

    optimizer: list[tuple[int, float]] = field(default_factory=list)
    attention: list[AttentionRow] = field(default_factory=list)
    visits: list[AttentionRow] = field(default_factory=list)
    spread: float = 0.0


def measure_alone(job: Job, spec: ModelSpec, lengths: Sequence[int], calls: int) -> Alone:
    """Medians of ``calls`` calls each, after one that does not count; attention over sequences of ``lengths``."""
    found, heads = Alone(), (spec.num_heads, spec.head_dim)
    for elements, update in updates(job).items():
        (seconds,) = _timed(update, calls, found)
        found.optimizer.append((elements, seconds))
    for length in lengths:
        forward, backward = _timed(partial(_attention, job.comm, job.dtype, spec, length), calls, found)
        found.attention.append((length, *heads, forward, backward))
        if length >= VISITS:
            forward, backward = _timed(partial(_visits, job, spec, length), calls)
            found.visits.append((length, *heads, max(forward, 1e-9), max(backward, 1e-9)))
    return found


def _timed(measure: Measure, calls: int, noted: Alone | None = None) -> list[float]:
    """Medians of the seconds that ``calls`` calls saw, after one that does not count; their spread is ``noted``."""
    measure()
    columns = list(zip(*(measure() for _ in range(calls)), strict=True))
    if noted is not None:
        noted.spread = max(noted.spread, *((max(c) - min(c)) / max(median(c), 1e-9) for c in columns))
    return [median(column) for column in columns]


def updates(job: Job) -> dict[int, Measure]:
    """Updates of so many owned elements, one set of weights after the other, so that none is in a cache."""
    found: dict[int, Measure] = {}
    for elements, count in OPTIMIZER_SETS.items():
        sets = [_weights(job, elements) for _ in range(UPDATED // elements)]
        found[elements] = update = partial(_update, job.comm, cycle(sets), count)
        for _ in sets[count::count]:
            update()  # allocates; the last sets' first call is the one that does not count
    return found


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
