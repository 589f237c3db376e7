"""Seconds of what a chip is timed with alone, outside of pipelines: updates of weights, attention, a ring's blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

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
from hetero_megatron.training.calibration.runs import middle

OPTIMIZER_ELEMENTS = (1 << 18, 1 << 21)
TURN, ENOUGH = 0.05, 0.5  # seconds: of calls in a row; for each thing to time, of each step
LEAST, MOST = 5, 100  # turns of each, also where calls take long; calls of each step, also where they are short
VISITS = 4  # blocks of keys, against one

AttentionRow = tuple[int, int, int, float, float]  # length, heads, head_dim, forward, backward
K = TypeVar("K", bound=Hashable)


def alone_seconds(
    job: Job, spec: ModelSpec, lengths: Sequence[int], steps: int
) -> tuple[list[tuple[int, float]], list[AttentionRow], list[AttentionRow]]:
    """What a chip takes for updates, attention and visits of a ring's block.

    Returns:
        (elements, seconds) of norm, scaling and update of so many owned elements; rows of causal attention over one
        sequence of each length; rows of what one more block of keys and values costs in the ring beside its FLOPs
        (launches, merging, packing).
    """
    measures: dict[tuple[str, int], Callable[[], Sequence[float]]] = {}
    for elements in OPTIMIZER_ELEMENTS:
        # Pieces of one owner are not many and not small; 16 stand for a layer's.
        wide = torch.promote_types(job.dtype, torch.float32)
        masters = [torch.zeros(elements // 16, dtype=wide, device=job.comm.device) for _ in range(16)]
        optimizer = job.optimizer([{"params": masters, "decay": True}])
        measures["optimizer", elements] = partial(_update, job.comm, optimizer, masters)
    for length in lengths:
        measures["attention", length] = partial(_attention, job.comm, job.dtype, spec, length)
        if length >= VISITS:
            measures["visits", length] = partial(_visits, job.comm, *_ring(job, spec, length))
    found = interleaved(measures, steps)
    heads = (spec.num_heads, spec.head_dim)
    return (
        [(size, seconds[0]) for (kind, size), seconds in found.items() if kind == "optimizer"],
        [(size, *heads, s[0], s[1]) for (kind, size), s in found.items() if kind == "attention"],
        [(size, *heads, max(s[0], 1e-9), max(s[1], 1e-9)) for (kind, size), s in found.items() if kind == "visits"],
    )


def interleaved(measures: Mapping[K, Callable[[], Sequence[float]]], steps: int) -> dict[K, list[float]]:
    """:func:`middle` of each of the seconds that a measure returns, of all its calls after a first. Measures take
    turns until the time for all is over: a machine that is slow for a second is slow for all of them."""
    found: dict[K, list[Sequence[float]]] = {key: [] for key in measures}
    for measure in measures.values():
        measure()
    end, turn = time.perf_counter() + steps * ENOUGH * len(measures), 0
    while turn < LEAST or time.perf_counter() < end:
        wanted = [key for key in measures if len(found[key]) < steps * MOST]
        if not wanted:
            break
        for key in wanted:
            until = time.perf_counter() + TURN
            for _ in range(steps * MOST // LEAST):
                found[key].append(measures[key]())
                if time.perf_counter() >= until:
                    break
        turn += 1
    return {key: [middle(column) for column in zip(*calls)] for key, calls in found.items()}


def _update(comm: Comm, optimizer: Optimizer, masters: Sequence[torch.Tensor]) -> list[float]:
    grads = [torch.ones_like(m) for m in masters]
    before = comm.clock.computed
    with comm.clock.counting(), comm.clock.work():
        squared_norm([grads], lambda tensors: l2norm_aten(tensors)[0])
        torch._foreach_mul_(grads, 0.5)
        for master, grad in zip(masters, grads):
            master.grad = grad
        optimizer.step()
    return [comm.clock.computed - before]


def _attention(comm: Comm, dtype: torch.dtype, spec: ModelSpec, length: int) -> list[float]:
    q, k, v = (
        torch.randn(1, length, n, spec.head_dim, dtype=dtype, device=comm.device, requires_grad=True)
        for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    with comm.clock.counting(), comm.clock.work():
        at = [comm.clock.computed]
        out, _ = attention(q, k, v)
        comm.clock.settle()
        at.append(comm.clock.computed)
        torch.autograd.backward(out, torch.ones_like(out))
        comm.clock.settle()
        at.append(comm.clock.computed)
    return [at[1] - at[0], at[2] - at[1]]


def _ring(job: Job, spec: ModelSpec, length: int) -> tuple[BlockAttention, tuple[torch.Tensor, ...]]:
    """Attention to blocks of keys, and its q, k, v and gradient of the output."""
    repeat = spec.queries_per_kv
    block = BlockAttention(tile_kernel(job.comm.device), key_heads([i // repeat for i in range(spec.num_heads)]))
    counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    return block, tuple(
        torch.randn(1, length, n, spec.head_dim, dtype=job.dtype, device=job.comm.device) for n in counts
    )


def _visits(comm: Comm, attention: BlockAttention, tensors: tuple[torch.Tensor, ...]) -> list[float]:
    """Seconds (forward, backward) that a further block costs: the same keys pass in several and in one."""
    length = tensors[0].shape[1]
    several, one = (
        _visit(comm, attention, tensors, [(i * length // n, (i + 1) * length // n) for i in range(n)])
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
