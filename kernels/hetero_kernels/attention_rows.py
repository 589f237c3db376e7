# mypy: allow-untyped-defs, allow-incomplete-defs
"""Row operators around attention: delta = rowsum(dout * out), and merging two partial results by their log-sum-exp."""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import finite_or_zero, narrow, widen
from hetero_kernels.limits import Limits, accumulator, cdiv, config, limits_of, power_of_two, wide


def attention_delta_reference(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """sum over features of dout * out: [b, s, h, d] -> [b, h, s]."""
    dtype = wide(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def attention_merge_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two sets of keys from that over each; see :func:`attention_merge`."""
    lse = torch.logaddexp(lse_a, lse_b)
    weights = [torch.exp(part - lse.where(lse.isfinite(), 0.0)).transpose(1, 2)[..., None] for part in (lse_a, lse_b)]
    merged = out_a.to(wide(out_a.dtype)) * weights[0] + out_b.to(wide(out_b.dtype)) * weights[1]
    return merged.to(out_a.dtype), lse


@triton.jit(do_not_specialize=["tasks", "across"])
def _delta(
    do_ptr, out_ptr, delta_ptr, tasks, across, heads, queries, do_b, do_s, do_h, o_b, o_s, o_h,
    ACC: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = (task // across) % heads + tl.full([], 0, tl.int64)
        batch = task // across // heads + tl.full([], 0, tl.int64)
        row = (task % across) * BLOCK_S + tl.arange(0, BLOCK_S)
        live = row < queries
        ok = live[:, None] & (d < DIM)[None, :]
        at = row.to(tl.int64)[:, None]
        do = widen(tl.load(do_ptr + batch * do_b + head * do_h + at * do_s + d[None, :], mask=ok, other=0.0), ACC)
        out = widen(tl.load(out_ptr + batch * o_b + head * o_h + at * o_s + d[None, :], mask=ok, other=0.0), ACC)
        tl.store(delta_ptr + (batch * heads + head) * queries + row, tl.sum(do * out, 1), mask=live)


@triton.jit(do_not_specialize=["tasks", "across"])
def _merge(
    a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, out_ptr, lse_ptr, tasks, across, heads, queries,
    a_b, a_s, a_h, b_b, b_s, b_h, o_b, o_s, o_h,
    ACC: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = (task // across) % heads + tl.full([], 0, tl.int64)
        batch = task // across // heads + tl.full([], 0, tl.int64)
        row = (task % across) * BLOCK_S + tl.arange(0, BLOCK_S)
        live = row < queries
        ok = live[:, None] & (d < DIM)[None, :]
        at = row.to(tl.int64)[:, None]
        stats = (batch * heads + head) * queries + row
        lse_a = tl.load(lse_a_ptr + stats, mask=live, other=0.0)
        lse_b = tl.load(lse_b_ptr + stats, mask=live, other=0.0)
        top = tl.maximum(lse_a, lse_b)
        safe = finite_or_zero(top)
        weight_a = tl.exp(lse_a - safe)
        weight_b = tl.exp(lse_b - safe)
        total = weight_a + weight_b
        nothing = total == 0.0  # neither part saw a key: out 0, lse -inf
        total = tl.where(nothing, 1.0, total)
        a = widen(tl.load(a_ptr + batch * a_b + head * a_h + at * a_s + d[None, :], mask=ok, other=0.0), ACC)
        b = widen(tl.load(b_ptr + batch * b_b + head * b_h + at * b_s + d[None, :], mask=ok, other=0.0), ACC)
        out = a * (weight_a / total)[:, None] + b * (weight_b / total)[:, None]
        target = out_ptr + batch * o_b + head * o_h + at * o_s + d[None, :]
        tl.debug_barrier()  # in place: a warp may load a row's lse again, in another layout, after one has stored it
        tl.store(target, narrow(out, out_ptr.dtype.element_ty), mask=ok)
        tl.store(lse_ptr + stats, tl.where(nothing, float("-inf"), safe + tl.log(total)), mask=live)


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """x, copied where the elements of its last axis do not lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _walk(out: torch.Tensor, limits: Limits) -> tuple[tuple[int], int, int, int, int, int]:
    """(grid, tasks, tasks per head, BLOCK_S, BLOCK_D, warps)"""
    b, s, h, dim = out.shape
    chosen = config("attention_rows", dim, out.dtype, limits)
    block_d = power_of_two(dim)
    block_s = max(1, min(chosen["tile"] // block_d, power_of_two(s)))
    across = cdiv(s, block_s)
    tasks = across * b * h
    return (min(tasks, limits.max_grid),), tasks, across, block_s, block_d, chosen["num_warps"]


def attention_delta(dout: torch.Tensor, out: torch.Tensor, *, limits: Limits | None = None) -> torch.Tensor:
    """dout, out [b, s, h, d] -> sum over features of their product, [b, h, s] in at least fp32.

    Where the log-sum-exp has a gradient of its own, subtract it: attention_bwd(..., delta=delta - dlse).
    """
    limits = limits or limits_of(out.device)
    b, s, h, dim = out.shape
    delta = torch.empty((b, h, s), dtype=wide(out.dtype), device=out.device)
    if out.numel() == 0:
        return delta.zero_()
    dout, out = adjacent(dout), adjacent(out)
    grid, tasks, across, block_s, block_d, warps = _walk(out, limits)
    _delta[grid](
        dout, out, delta, tasks, across, h, s, *dout.stride()[:3], *out.stride()[:3], accumulator(out.dtype), dim,
        block_s, block_d, num_warps=warps,
    )  # fmt: skip
    return delta


def attention_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, inplace: bool = False,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Partial attention of the same queries over two sets of keys -> attention over both.

    out [b, s, h, d] (out_b may have another dtype), lse [b, h, s] in at least fp32, -inf for rows that saw nothing.
    ``inplace``: into out_a, and into lse_a where that is contiguous; both are returned.
    """
    limits = limits or limits_of(out_a.device)
    b, s, h, dim = out_a.shape
    lse_a, lse_b = lse_a.contiguous(), lse_b.contiguous()
    out = out_a if inplace else torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = lse_a if inplace else torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    if lse.numel() == 0 or dim == 0:
        return out, lse.copy_(torch.logaddexp(lse_a, lse_b))
    assert out.stride(-1) == 1 or dim == 1, "attention_merge: features must be adjacent"
    out_a, out_b = adjacent(out_a), adjacent(out_b)
    grid, tasks, across, block_s, block_d, warps = _walk(out_a, limits)
    _merge[grid](
        out_a, lse_a, out_b, lse_b, out, lse, tasks, across, h, s, *out_a.stride()[:3], *out_b.stride()[:3],
        *out.stride()[:3], accumulator(lse.dtype), dim, block_s, block_d, num_warps=warps,
    )  # fmt: skip
    return out, lse
