# mypy: allow-untyped-defs, allow-incomplete-defs
"""Softmax over the last axis with a scale, a causal or a given mask. Rows that see nothing become zeros."""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import LOG2E, finite_or_zero, load_tile, store_tile, widen
from hetero_kernels.limits import Limits, accumulator, as_rows, limits_of, row_tile, wide


def softmax_reference(
    x: torch.Tensor, *, scale: float = 1.0, mask: torch.Tensor | None = None, causal: bool = False, diagonal: int = 0
) -> torch.Tensor:
    """softmax(scale * x) over the last axis where ``mask`` is True and, if causal, column <= row + diagonal."""
    scores = x.to(wide(x.dtype)) * scale
    keep = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    if causal:
        keep = keep & torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal)
    probabilities = torch.softmax(scores.masked_fill(~keep, float("-inf")), -1)
    return probabilities.masked_fill(~keep.any(-1, keepdim=True), 0.0).to(x.dtype)


@triton.jit
def _scores(
    x_ptr, mask_ptr, row, live, col, width, stride, queries, mask_rows, diagonal,
    SCALE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2, -inf where masked."""
    inside = live[:, None] & (col < width)[None, :]
    x = widen(tl.load(x_ptr + row[:, None] * stride + col[None, :], mask=inside, other=0.0), ACC)
    keep = inside  # loads have the plain mask: one that differs between neighbours would split them
    if CAUSAL:
        keep = keep & (col[None, :] <= (row % queries)[:, None] + diagonal)
    if MASK:
        at = (row % mask_rows)[:, None] * width + col[None, :]
        keep = keep & (tl.load(mask_ptr + at, mask=inside, other=0) != 0)
    return tl.where(keep, x * (SCALE * LOG2E), float("-inf"))


@triton.jit(do_not_specialize=["diagonal"])
def _softmax_fwd(
    x_ptr, mask_ptr, y_ptr, rows, width, stride, queries, mask_rows, diagonal,
    SCALE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_C)
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        live = row < rows
        if WHOLE:
            s = _scores(
                x_ptr, mask_ptr, row, live, lane, width, stride, queries, mask_rows, diagonal, SCALE, MASK, CAUSAL, ACC
            )
            p = tl.exp2(s - finite_or_zero(tl.max(s, 1))[:, None])
            total = tl.sum(p, 1)
            store_tile(y_ptr, row, live, lane, lane < width, width, p / tl.where(total == 0.0, 1.0, total)[:, None])
        else:
            top = tl.full([BLOCK_R], float("-inf"), ACC)
            total = tl.zeros([BLOCK_R], ACC)
            for start in range(0, width, BLOCK_C):
                s = _scores(
                    x_ptr, mask_ptr, row, live, start + lane, width, stride, queries, mask_rows, diagonal,
                    SCALE, MASK, CAUSAL, ACC,
                )  # fmt: skip
                higher = tl.maximum(top, tl.max(s, 1))
                safe = finite_or_zero(higher)
                total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
                top = higher
            safe = finite_or_zero(top)
            total = tl.where(total == 0.0, 1.0, total)
            for start in range(0, width, BLOCK_C):
                col = start + lane
                s = _scores(
                    x_ptr, mask_ptr, row, live, col, width, stride, queries, mask_rows, diagonal,
                    SCALE, MASK, CAUSAL, ACC,
                )  # fmt: skip
                store_tile(y_ptr, row, live, col, col < width, width, tl.exp2(s - safe[:, None]) / total[:, None])


@triton.jit
def _softmax_bwd(
    dy_ptr, y_ptr, dx_ptr, rows, width, dy_stride, y_stride,
    SCALE: tl.constexpr, ACC: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_C)
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        live = row < rows
        if WHOLE:
            y = load_tile(y_ptr, row, live, lane, lane < width, y_stride, ACC)
            dy = load_tile(dy_ptr, row, live, lane, lane < width, dy_stride, ACC)
            along = tl.sum(y * dy, 1)
            store_tile(dx_ptr, row, live, lane, lane < width, width, y * (dy - along[:, None]) * SCALE)
        else:
            products = tl.zeros([BLOCK_R, BLOCK_C], ACC)
            for start in range(0, width, BLOCK_C):
                col = start + lane
                y = load_tile(y_ptr, row, live, col, col < width, y_stride, ACC)
                products += y * load_tile(dy_ptr, row, live, col, col < width, dy_stride, ACC)
            along = tl.sum(products, 1)
            for start in range(0, width, BLOCK_C):
                col = start + lane
                y = load_tile(y_ptr, row, live, col, col < width, y_stride, ACC)
                dy = load_tile(dy_ptr, row, live, col, col < width, dy_stride, ACC)
                store_tile(dx_ptr, row, live, col, col < width, width, y * (dy - along[:, None]) * SCALE)


def softmax_fwd(
    x: torch.Tensor, *, scale: float = 1.0, mask: torch.Tensor | None = None, causal: bool = False, diagonal: int = 0,
    limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [..., q, k] -> softmax over k (saved).

    Args:
        mask: bool, True = seen; its shape is a trailing part of x's (for example [q, k]).
        causal: column j is seen by row i if j <= i + diagonal.

    Raises:
        ValueError: the mask has another shape.
    """
    limits = limits or limits_of(x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if mask is not None and (mask.shape != x.shape[x.dim() - mask.dim() :] or mask.dtype != torch.bool):
        raise ValueError(f"mask {mask.dtype} {list(mask.shape)}: expected bool, the last axes of {list(x.shape)}")
    if y.numel() == 0:
        return y
    flat = as_rows(x)
    bits = None if mask is None else as_rows(mask.contiguous()).view(torch.uint8)
    rows, width = flat.shape
    tile = row_tile("softmax", rows, width, x.dtype, limits)
    _softmax_fwd[tile.grid](
        flat, bits, y, rows, width, flat.stride(0), x.shape[-2] if x.dim() > 1 else 1,
        1 if bits is None else bits.shape[0], diagonal, scale, bits is not None, causal, accumulator(x.dtype),
        tile.whole, tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    return y


def softmax_bwd(dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, limits: Limits | None = None) -> torch.Tensor:
    """-> dx. Masks need not be given again: y is zero there."""
    limits = limits or limits_of(y.device)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    grad, flat = as_rows(dy), as_rows(y)
    rows, width = flat.shape
    tile = row_tile("softmax", rows, width, y.dtype, limits)
    _softmax_bwd[tile.grid](
        grad, flat, dx, rows, width, grad.stride(0), flat.stride(0), scale, accumulator(y.dtype), tile.whole,
        tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    return dx
