"""Attention, forward and backward, with the log-sum-exp of every row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from hetero_kernels.attention_backward import attention_backward_kv, attention_backward_q
from hetero_kernels.attention_forward import attention_forward
from hetero_kernels.attention_mask import KeyIntervals
from hetero_kernels.attention_rows import adjacent, attention_delta
from hetero_kernels.dropout import dropout_keep_reference, signed
from hetero_kernels.limits import (
    INTERPRETED,
    TRITON_DTYPES,
    Limits,
    accumulator,
    cdiv,
    config,
    limits_of,
    power_of_two,
    wide,
)


class AttentionDropout(NamedTuple):
    """Which probabilities are dropped: see ``dropout.py``; column: key token, row: query token.

    Args:
        dropped: probability times 2**16.
        key: 64 bits; sample: number of the first row. Integers, or int64 [] on q's device, read when the kernel runs.
        head, q_start, k_start: numbers of the first query head, query token and key token.
    """

    dropped: int
    key: int | torch.Tensor
    sample: int | torch.Tensor = 0
    head: int = 0
    q_start: int = 0
    k_start: int = 0


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, causal: bool = True,
    q_start: int = 0, k_start: int = 0, window: int | None = None, bounds: torch.Tensor | None = None,
    softcap: float | None = None, dropout: AttentionDropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :func:`attention_fwd`; materialised scores in at least fp32."""
    dtype, group = wide(q.dtype), q.shape[2] // max(k.shape[2], 1)
    k, v = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), k) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    row = torch.arange(q.shape[1], device=q.device)[:, None] + q_start
    column = torch.arange(k.shape[1], device=q.device)[None] + k_start
    keep = torch.ones(1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    keep = keep & (column <= row) if causal else keep
    keep = keep & (column > row - window) if window is not None else keep
    if bounds is not None:
        index = (column - k_start)[None]
        keep = keep & (index >= bounds[:, 0, :, None]) & (index < bounds[:, 1, :, None])
    scores = scores.masked_fill(~keep[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.where(lse.isfinite(), 0.0)[..., None]).exp()
    if dropout is not None:
        b, heads, queries, keys = (torch.arange(n, device=q.device) for n in p.shape)
        stays = dropout_keep_reference(
            dropout.key, dropout.dropped, keys + dropout.k_start, (queries + dropout.q_start)[:, None],
            (heads + dropout.head)[:, None, None], (b + dropout.sample)[:, None, None, None],
        )  # fmt: skip
        p = p * stays * (65536 / (65536 - dropout.dropped))
    return torch.einsum("bhqk,bkhd->bqhd", p, v).to(q.dtype), lse


def shared_bytes(
    op: str, block_q: int, block_k: int, stages: int, dim: int, dim_v: int, item_bytes: int, bounds: bool = False
) -> int:
    """On-chip memory of a program of ``op``: what rests there, and per stage what is loaded ahead.

    Forward keeps q, and loads k and v; dQ keeps q and dout; dK and dV keep k and v, and load q, dout, and lse and delta
    of each query (with ``bounds`` its interval, too), which are needed one product later.
    """
    both = (dim + dim_v) * item_bytes
    if op == "attention_bwd_kv":
        rows = (stages - 1) * block_q * max(item_bytes, 4) * (4 if bounds else 2)
        return block_k * both + stages * block_q * both + rows
    return block_q * (dim * item_bytes if op == "attention_fwd" else both) + stages * block_k * both


@dataclass(frozen=True)
class _Call:
    """What forward and backward hand to their kernels alike."""

    sizes: tuple[int, int, int, int, int]  # heads, group, queries, keys, offset
    flags: tuple[Any, ...]  # SCALE, SOFTCAP .. BOUNDS
    dims: tuple[int, int, int, int]  # DIM, DIM_V, BLOCK_D, BLOCK_V
    intervals: KeyIntervals | None
    limits: Limits
    item_bytes: int
    dropout: AttentionDropout | None

    def drop(self, block_k: int) -> tuple[int | bool | torch.Tensor, ...]:
        """What the kernels take about dropout."""
        found = self.dropout or AttentionDropout(0, 0)
        numbers = (signed(x, 32) for x in (found.sample, found.head, found.q_start, found.k_start))
        aligned = found.k_start % 8 == 0 and block_k % 8 == 0
        return signed(found.key, 64), *numbers, found.dropped, aligned

    def blocks(self, op: str, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """(BLOCK_Q, BLOCK_K, warps, stages) from the table, cut to the lengths and to the on-chip memory."""
        chosen = config(op, max(self.dims[0], self.dims[1]), dtype, self.limits)
        smallest = 1 if INTERPRETED else 16  # of a matrix unit's operand
        block_q = min(chosen["block_q"], max(power_of_two(self.sizes[2]), smallest))
        block_k = min(chosen["block_k"], max(power_of_two(self.sizes[3]), smallest))
        stages, features = chosen["num_stages"], (*self.dims[2:], self.item_bytes, self.intervals is not None)
        masked = self.dropout is not None  # a tile of masks goes through on-chip memory, a byte for each element
        while (
            shared_bytes(op, block_q, block_k, stages, *features) + masked * block_q * block_k
            > self.limits.shared_bytes
        ):
            moving_q = op == "attention_bwd_kv"
            if stages > 1:
                stages -= 1
            elif max(block_q, block_k) <= 16:
                break
            elif block_q > block_k or (block_q == block_k and moving_q):
                block_q //= 2
            else:
                block_k //= 2
        return block_q, block_k, chosen["num_warps"], stages

    def launch(self, kernel: Any, programs: int, *arguments: Any, **options: int) -> None:
        """In pieces where the grid may not hold all programs; ``arguments``: before and after the piece's first."""
        before, after = arguments
        for first in range(0, programs, self.limits.max_grid):
            grid = (min(self.limits.max_grid, programs - first),)
            kernel[grid](*before, first, *after, **options)


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool, q_start: int, k_start: int,
    window: int | None, bounds: torch.Tensor | KeyIntervals | None, allow_tf32: bool, limits: Limits | None,
    softcap: float | None, dropout: AttentionDropout | None,
) -> _Call:  # fmt: skip
    b, queries, heads, dim = q.shape
    keys, kv_heads, dim_v = k.shape[1], k.shape[2], v.shape[3]
    assert k.shape == (b, keys, kv_heads, dim) and v.shape[:3] == k.shape[:3], "q, k and v do not fit together"
    assert heads % max(kv_heads, 1) == 0, f"{heads} query heads over {kv_heads} KV heads"
    assert q.dtype == k.dtype == v.dtype, "q, k and v have one dtype"
    assert window is None or window > 0, "a window holds at least the token itself"
    assert scale is None or scale > 0, "the kernels take a row's maximum before they scale it"
    assert softcap is None or softcap > 0, "scores are squeezed to +- softcap"
    offset = q_start - k_start
    if isinstance(bounds, torch.Tensor):
        bounds = KeyIntervals(bounds, keys, offset, causal, window)
    if bounds is not None:
        found = list(bounds.bounds.shape)
        assert found == [b, 2, queries], f"bounds {found}: expected {[b, 2, queries]}"
        assert bounds.keys == keys, f"bounds for {bounds.keys} keys: expected {keys}"
        causal, window = False, None
    dot = tl.float32 if INTERPRETED and q.dtype in (torch.float16, torch.bfloat16) else TRITON_DTYPES[q.dtype]
    precision = "tf32" if allow_tf32 else "ieee"
    smallest = 1 if INTERPRETED else 16
    blocks = max(power_of_two(dim), smallest), max(power_of_two(dim_v), smallest)
    return _Call(
        (heads, heads // max(kv_heads, 1), queries, keys, offset),
        (
            scale or 1 / math.sqrt(dim), softcap or 0.0, accumulator(q.dtype), dot, precision, causal, window or 0,
            bounds is not None,
        ),
        (dim, dim_v, *blocks), bounds, limits or limits_of(q.device), q.element_size(), dropout,
    )  # fmt: skip



def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, causal: bool = True,
    q_start: int = 0, k_start: int = 0, window: int | None = None, bounds: torch.Tensor | KeyIntervals | None = None,
    allow_tf32: bool = False, limits: Limits | None = None, softcap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v over the keys that each query sees.

    Args:
        q: [b, sq, hq, d]; k: [b, sk, hkv, d]; v: [b, sk, hkv, dv], hq a multiple of hkv; views are fine.
        scale: default 1 / sqrt(d).
        q_start, k_start: position of the first query and of the first key.
        causal: key j is seen by query i if k_start + j <= q_start + i.
        window: only keys at most window - 1 positions before the query.
        bounds: int32 [b, 2, sq]: query i sees only keys bounds[:, 0, i] <= j < bounds[:, 1, i] (indices, not
            positions); neither may fall with i. See document_bounds and varlen_bounds. A KeyIntervals, which saves the
            calls of a batch their preparations, has causal, window and positions in it: those given here do not count.
        allow_tf32: fp32 products with 10 bits of mantissa, where the chip has them.
        softcap: scores, scaled, become softcap x tanh(score / softcap).
        dropout: of the probabilities; the log-sum-exp knows nothing of it. Where ``k_start`` of it is no multiple of 8,
            every probability takes a block of random bits instead of an eighth of one.

    Returns:
        out [b, sq, hq, dv] in q's dtype; lse [b, hq, sq], natural logarithm, in at least fp32. Rows that see
        nothing: out 0, lse -inf.
    """
    call = _prepare(q, k, v, scale, causal, q_start, k_start, window, bounds, allow_tf32, limits, softcap, dropout)
    heads, _, queries, keys, _ = call.sizes
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], heads, queries), dtype=wide(q.dtype), device=q.device)
    if lse.numel() == 0 or keys == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = adjacent(q), adjacent(k), adjacent(v)
    block_q, block_k, warps, stages = call.blocks("attention_fwd", q.dtype)
    q_blocks = cdiv(queries, block_q)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    call.launch(
        attention_forward, q_blocks * heads * q.shape[0],
        (q, k, v, out, lse, lse if call.intervals is None else call.intervals.bounds),
        (*call.sizes, q_blocks, *strides, *call.drop(block_k), *call.flags,
         keys % block_k == 0, *call.dims, block_q, block_k),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def attention_bwd(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    lse: torch.Tensor, *, scale: float | None = None, causal: bool = True, q_start: int = 0, k_start: int = 0,
    window: int | None = None, bounds: torch.Tensor | KeyIntervals | None = None, delta: torch.Tensor | None = None,
    grad_dtype: torch.dtype | None = None, allow_tf32: bool = False, limits: Limits | None = None,
    softcap: float | None = None, dropout: AttentionDropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dq, dk, dv, contiguous, in ``grad_dtype`` (default: q's; fp32 to add up partial results).

    ``out`` and ``lse`` may be those of attention over more keys than ``k`` holds (merged): the result is then this
    part's share. ``delta``: attention_delta(dout, out), if it is there already (then ``out`` may be None).
    """
    call = _prepare(q, k, v, scale, causal, q_start, k_start, window, bounds, allow_tf32, limits, softcap, dropout)
    heads, group, queries, keys, _ = call.sizes
    dtype = grad_dtype or q.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    if dq.numel() == 0 or dk.numel() == 0 or dv.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if delta is None:
        assert out is not None, "attention_bwd needs out or delta"
        delta = attention_delta(dout, out, limits=call.limits)
    q, k, v, dout = adjacent(q), adjacent(k), adjacent(v), adjacent(dout)
    lse, delta = lse.contiguous(), delta.contiguous()
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    inputs = (q, k, v, dout, lse, delta)
    block_q, block_k, warps, stages = call.blocks("attention_bwd_kv", q.dtype)
    k_blocks = cdiv(keys, block_k)
    seen = call.intervals
    bounds, stretches = (lse, lse) if seen is None else (seen.bounds, seen.stretches(block_k))
    call.launch(
        attention_backward_kv, k_blocks * (heads // group) * q.shape[0],
        (*inputs, dk, dv, bounds, stretches),
        (*call.sizes, k_blocks, *strides, *call.drop(block_k), *call.flags,
         queries % block_q == 0, *call.dims, block_q, block_k),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    block_q, block_k, warps, stages = call.blocks("attention_bwd_q", q.dtype)
    q_blocks = cdiv(queries, block_q)
    call.launch(
        attention_backward_q, q_blocks * heads * q.shape[0],
        (*inputs, dq, bounds),
        (*call.sizes, q_blocks, *strides, *call.drop(block_k), *call.flags,
         keys % block_k == 0, *call.dims, block_q, block_k),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
