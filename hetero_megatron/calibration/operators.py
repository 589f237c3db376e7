"""Seconds of what a chip is timed with outside of pipelines: attention alone, a ring's blocks, and Muon's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hetero_megatron.calibration.layers import Job
from hetero_megatron.calibration.measure import LEAST, repeated
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.layout.mask import FULL, Tile
from hetero_megatron.ops import attention
from hetero_megatron.ops.attention_op import definition
from hetero_megatron.ops.block_attention import BlockAttention, accumulators, key_heads
from hetero_megatron.ops.tile_kernels import tile_kernel
from hetero_megatron.parallel.muon import newton_schulz
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.muon import MuonRates

TOKENS = 2048  # of attentions in a row, at least one: in the midst of a step's work, not after a pause
VISITS = 4  # blocks of keys, against one
SIDE = {"cpu": 512}  # of the largest matrix that Muon updates here, by kind of device …
OTHER_SIDE = 4096  # … and of others
Tables = tuple[dict[str, list[list[float]]], dict[str, float]]  # rows as in the rates, and their spreads


def measure_operators(job: Job, spec: ModelSpec, lengths: Sequence[int], calls: int) -> Tables:
    """Medians of ``calls`` calls each: causal attention over one sequence of each of ``lengths`` (``attention``), and
    what one more block of keys and values costs in the ring beside its FLOPs (``visits``: launches, merging, packing);
    and Muon's update of a square matrix, as wide as the model if that is not too wide (``newton_schulz``)."""
    side = min(spec.hidden_size, SIDE.get(job.comm.device.type, OTHER_SIDE))
    (update, _), *_ = repeated(partial(_newton_schulz, job, side), calls)
    rows, spreads = {"newton_schulz": [[side, side, max(update, LEAST)]]}, dict[str, float]()
    for table, measure, shortest in (("attention", _attention, 1), ("visits", _visits, VISITS)):
        for length in (n for n in lengths if n >= shortest):
            (forward, forward_spread), (backward, backward_spread) = repeated(
                partial(measure, job, spec, length), calls
            )
            row = [length, spec.num_heads, spec.head_dim, max(forward, LEAST), max(backward, LEAST)]
            rows.setdefault(table, []).append(row)
            spreads[table] = max(spreads.get(table, 0.0), forward_spread, backward_spread)
    return rows, spreads


def timed(clock: Clock, *calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, one after the other."""
    moments = [clock.computed]
    with clock.counting(), clock.work():
        for call in calls:
            call()
            clock.settle()
            moments.append(clock.computed)
    return [b - a for a, b in zip(moments, moments[1:])]


def _random(job: Job, spec: ModelSpec, length: int, grad: bool) -> list[torch.Tensor]:
    """q, k, v of one sequence, and a gradient of the output."""
    counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    tensors = [torch.randn(1, length, n, spec.head_dim, dtype=job.dtype, device=job.comm.device) for n in counts]
    return [tensor.requires_grad_(grad) for tensor in tensors[:3]] + tensors[3:]


def _attention(job: Job, spec: ModelSpec, length: int) -> list[float]:
    """Seconds (forward, backward): means of some in a row."""
    count, outs = max(1, TOKENS // length), list[torch.Tensor]()
    q, k, v, grad = _random(job, spec, length, grad=True)

    def backward() -> None:
        for out in outs:
            torch.autograd.grad(out, (q, k, v), grad)

    attend = attention if q.device.type == "cpu" else definition
    seconds = timed(job.comm.clock, lambda: outs.extend(attend(q, k, v)[0] for _ in range(count)), backward)
    return [s / count for s in seconds]


def _newton_schulz(job: Job, side: int) -> list[float]:
    """Seconds of one matrix, in the dtype of the update."""
    dtype = torch.bfloat16 if job.dtype.itemsize == 2 else job.dtype
    matrix = torch.randn(side, side, dtype=dtype, device=job.comm.device)
    return timed(job.comm.clock, lambda: newton_schulz(matrix, MuonRates()))


def _visits(job: Job, spec: ModelSpec, length: int) -> list[float]:
    """Seconds (forward, backward) of one more block: the same keys pass in several blocks and in one."""
    heads = key_heads([i // spec.queries_per_kv for i in range(spec.num_heads)])
    block, tensors = BlockAttention(tile_kernel(job.comm.device), heads), _random(job, spec, length, grad=False)
    in_several, in_one = (_ring(job.comm.clock, block, tensors, n) for n in (VISITS, 1))
    return [(a - b) / (VISITS - 1) for a, b in zip(in_several, in_one, strict=True)]


def _ring(clock: Clock, block: BlockAttention, tensors: Sequence[torch.Tensor], blocks: int) -> list[float]:
    """Seconds (forward, backward) of attention to keys that come in so many blocks, all visible to all queries."""
    q, k, v, grad = tensors
    length, (out, lse) = q.shape[1], accumulators(q)
    cuts = [slice(i * length // blocks, (i + 1) * length // blocks) for i in range(blocks)]
    tiles = [[(None, Tile(0, length, 0, c.stop - c.start, FULL, c.stop - c.start))] for c in cuts]

    def forward() -> None:
        for cut, block_tiles in zip(cuts, tiles, strict=True):
            pair = torch.stack((k[:, cut], v[:, cut]))  # as it is sent on
            block.forward(q, pair[0], pair[1], block_tiles, out, lse)

    def backward() -> None:
        dq, output = torch.zeros_like(out), out.to(q.dtype)
        delta = block.kernel.delta(grad, output)
        for cut, block_tiles in zip(cuts, tiles, strict=True):
            pair = torch.stack((k[:, cut], v[:, cut]))
            sums = torch.zeros(pair.shape, dtype=out.dtype, device=out.device)
            block.backward(grad, q, pair[0], pair[1], output, lse, block_tiles, (dq, sums[0], sums[1]), delta)
            sums += torch.stack((sums[0], sums[1]))  # the sum so far arrives, and leaves

    return timed(clock, forward, backward)
