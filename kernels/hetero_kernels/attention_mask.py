# mypy: allow-untyped-defs, allow-incomplete-defs
"""Which keys a query sees: one interval [low, high) of key indices, for every mask that this package has.

Causal, sliding window, position offsets, packed documents and sequences of unlike length all are such intervals,
and both ends never fall from one query to the next. So a kernel has three stretches of keys for a block of queries:
partly seen, seen by all (no mask needed), partly seen; blocks outside are never loaded.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def low_of(row, offset, keys, WINDOW: tl.constexpr):
    """First key that query ``row`` sees; ``offset`` = position of query 0 minus position of key 0."""
    low = row * 0
    if WINDOW > 0:
        low = tl.minimum(tl.maximum(row + offset - WINDOW + 1, 0), keys)
    return low


@triton.jit
def high_of(row, offset, keys, CAUSAL: tl.constexpr):
    """One past the last key that query ``row`` sees."""
    high = row * 0 + keys
    if CAUSAL:
        high = tl.minimum(tl.maximum(row + offset + 1, 0), keys)
    return high


@triton.jit
def intervals(bounds_ptr, row, queries, keys, offset, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDS: tl.constexpr):
    """(low, high) of each query in ``row``; rows past the end repeat the last. ``bounds_ptr``: int32 [2, queries]."""
    at = tl.minimum(row, queries - 1)
    if BOUNDS:
        low = tl.load(bounds_ptr + at)
        high = tl.load(bounds_ptr + queries + at)
    else:
        low = low_of(at, offset, keys, WINDOW)
        high = high_of(at, offset, keys, CAUSAL)
    return low, high


@triton.jit
def key_stretches(low, high, BLOCK_K: tl.constexpr):
    """(begin, full_begin, full_end, end) of the keys that a block of queries sees; all but end are block borders."""
    end = tl.max(high, 0)
    begin = tl.minimum(tl.min(low, 0) // BLOCK_K * BLOCK_K, end)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(tl.max(low, 0), BLOCK_K) * BLOCK_K, begin), end)
    full_end = tl.maximum(tl.minimum(tl.min(high, 0) // BLOCK_K * BLOCK_K, end), full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_stretches(
    stretch_ptr, first, last, queries, offset,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The same for the queries that see keys first .. last - 1. ``stretch_ptr``: int32 [4] of this block of keys."""
    if BOUNDS:
        begin = tl.load(stretch_ptr)
        full_begin = tl.load(stretch_ptr + 1)
        full_end = tl.load(stretch_ptr + 2)
        end = tl.load(stretch_ptr + 3)
    else:
        begin = first * 0
        full_begin = first * 0
        full_end = first * 0 + queries
        end = first * 0 + queries
        if CAUSAL:
            begin = first - offset
            full_begin = last - 1 - offset
        if WINDOW > 0:
            full_end = tl.minimum(first - offset + WINDOW, queries)
            end = tl.minimum(last - 1 - offset + WINDOW, queries)
    begin = tl.minimum(tl.maximum(begin, 0) // BLOCK_Q * BLOCK_Q, end)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_begin, 0), BLOCK_Q) * BLOCK_Q, begin), end)
    full_end = tl.maximum(tl.minimum(full_end // BLOCK_Q * BLOCK_Q, end), full_begin)
    return begin, full_begin, full_end, end


def document_bounds(documents: Sequence[Sequence[int]], queries: int, device: torch.device) -> torch.Tensor:
    """Packed documents: start offsets per batch row (ascending, the first is 0) -> bounds [b, 2, queries] int32.

    A token sees the tokens of its document; ``causal`` and ``window`` of the call cut further. For queries and keys
    over the same tokens.
    """
    rows = []
    for starts in documents:
        edges = torch.tensor([*starts, queries], dtype=torch.int64)
        lengths = edges.diff()
        rows.append(torch.stack([edges[:-1].repeat_interleave(lengths), edges[1:].repeat_interleave(lengths)]))
    return _upload(torch.stack(rows), device)


def _upload(bounds: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As int32 on the device, without holding up the host."""
    bounds = bounds.to(torch.int32)
    return bounds if device.type == "cpu" else bounds.pin_memory().to(device, non_blocking=True)


def varlen_bounds(
    cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int], device: torch.device, *, causal: bool,
    window: int | None = None, offsets: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sequences packed one after another, of unlike lengths in q and k (0 too) -> bounds [1, 2, cu_seqlens_q[-1]].

    Causal and window are in the result, so call attention with ``causal=False`` and batch size 1. Query i of sequence
    n stands at position offsets[n] + i (default 0: top-left), key j at j.
    """
    low, high = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]  # of no sequences
    for n, (a, b) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:])):
        first, last = cu_seqlens_k[n], cu_seqlens_k[n + 1]
        position = torch.arange(b - a) + (offsets[n] if offsets else 0)
        begin = position - window + 1 if window else torch.zeros_like(position)
        end = position + 1 if causal else torch.full_like(position, last - first)
        low.append(begin.clamp(0, last - first) + first)
        high.append(end.clamp(0, last - first) + first)
    return _upload(torch.stack([torch.cat(low), torch.cat(high)])[None], device)


class KeyIntervals:
    """Bounds cut further by causal and window, and what the kernels make of them, made once for any number of calls:
    with bounds of documents a batch's layers share one, forward and backward.

    Args:
        bounds: int32 [b, 2, queries] as in :func:`attention_fwd <hetero_kernels.attention.attention_fwd>`.
        offset: position of query 0 minus position of key 0.
    """

    def __init__(
        self, bounds: torch.Tensor, keys: int, offset: int = 0, causal: bool = True, window: int | None = None
    ) -> None:
        self.bounds, self.keys = merged_bounds(bounds, keys, offset, causal, window), keys
        self._stretches: dict[int, torch.Tensor] = {}

    def stretches(self, block: int) -> torch.Tensor:
        """:func:`key_block_stretches` of blocks of ``block`` keys."""
        if block not in self._stretches:
            self._stretches[block] = key_block_stretches(self.bounds, self.keys, block)
        return self._stretches[block]


def merged_bounds(bounds: torch.Tensor, keys: int, offset: int, causal: bool, window: int | None) -> torch.Tensor:
    """``bounds`` cut further by causal and window: contiguous int32 [b, 2, queries] with low <= high."""
    low, high = bounds[:, 0], bounds[:, 1]
    position = torch.arange(bounds.shape[-1], device=bounds.device, dtype=torch.int32) + offset
    if window is not None:
        low = torch.maximum(low, position - window + 1)
    if causal:
        high = torch.minimum(high, position + 1)
    low = low.clamp(0, keys)
    return torch.stack([low, torch.maximum(high.clamp(0, keys), low)], 1).to(torch.int32)


def key_block_stretches(bounds: torch.Tensor, keys: int, block: int) -> torch.Tensor:
    """Where the queries of each block of keys begin, begin to see it all, cease to, and end: int32 [b, blocks, 4]."""
    first = (
        torch.arange(0, keys, block, device=bounds.device, dtype=torch.int32).expand(bounds.shape[0], -1).contiguous()
    )
    last = (first + block).clamp_max(keys)
    low, high = bounds[:, 0].contiguous(), bounds[:, 1].contiguous()
    parts = [
        torch.searchsorted(high, first, right=True),
        torch.searchsorted(high, last),
        torch.searchsorted(low, first, right=True),
        torch.searchsorted(low, last),
    ]
    return torch.stack(parts, -1).to(torch.int32)
