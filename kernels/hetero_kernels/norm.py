# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of rms_norm, add_rms_norm and layer_norm: normalisation of rows of a [rows, width] matrix.

Forward reads a row once and writes it once. Backward uses a fixed number of programs; each walks over rows and
keeps its share of the weight gradient in registers, so the partial sums do not grow with the rows and their order
is the same in every run. Rows wider than a tile take a path that reads them again (from the cache, mostly).
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import load_tile, narrow, store_tile, widen
from hetero_kernels.limits import Limits, accumulator, as_rows, cdiv, limits_of, power_of_two, row_tile, wide

WIDE_ELEMENTS = 65536  # of rows that a program of the wide backward reads twice: few enough to stay in the cache


@triton.jit
def _input(
    x_ptr, residual_ptr, row, live, col, inside, x_stride, residual_stride, ACC: tl.constexpr, ADD: tl.constexpr
):
    """x, or x + residual rounded to the dtype in which the sum is kept."""
    x = load_tile(x_ptr, row, live, col, inside, x_stride, ACC)
    if ADD:
        x += load_tile(residual_ptr, row, live, col, inside, residual_stride, ACC)
        x = widen(narrow(x, x_ptr.dtype.element_ty), ACC)
    return x


@triton.jit
def _scaled(x, w_ptr, col, inside, ACC: tl.constexpr, WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr):
    """x * weight. The weight is loaded where it is needed: held over a reduction it would cost registers."""
    if WEIGHT:
        w = widen(tl.load(w_ptr + col, mask=inside, other=0.0), ACC)
        if ONE_PLUS:
            w += 1.0
        x = x * w[None, :]
    return x


@triton.jit
def _write(x, w_ptr, b_ptr, y_ptr, sum_ptr, mean, rstd, row, live, col, inside, width, ACC: tl.constexpr,
           WEIGHT: tl.constexpr, ONE_PLUS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    y = _scaled((x - mean[:, None]) * rstd[:, None], w_ptr, col, inside, ACC, WEIGHT, ONE_PLUS)
    if BIAS:
        y += widen(tl.load(b_ptr + col, mask=inside, other=0.0), ACC)[None, :]
    store_tile(y_ptr, row, live, col, inside, width, y)
    if ADD:
        store_tile(sum_ptr, row, live, col, inside, width, x)


@triton.jit
def _norm_fwd(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, width, x_stride, residual_stride,
    EPS: tl.constexpr, ACC: tl.constexpr, CENTER: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ONE_PLUS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_C)
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        live = row < rows
        mean = tl.zeros([BLOCK_R], ACC)
        if WHOLE:
            inside = lane < width
            x = _input(x_ptr, residual_ptr, row, live, lane, inside, x_stride, residual_stride, ACC, ADD)
            centred = x
            if CENTER:
                mean = tl.sum(x, 1) / width
                centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
            rstd = tl.rsqrt(tl.sum(centred * centred, 1) / width + EPS)
            _write(x, w_ptr, b_ptr, y_ptr, sum_ptr, mean, rstd, row, live, lane, inside, width,
                   ACC, WEIGHT, ONE_PLUS, BIAS, ADD)  # fmt: skip
        else:
            if CENTER:
                total = tl.zeros([BLOCK_R, BLOCK_C], ACC)
                for start in range(0, width, BLOCK_C):
                    col = start + lane
                    total += _input(
                        x_ptr, residual_ptr, row, live, col, col < width, x_stride, residual_stride, ACC, ADD
                    )
                mean = tl.sum(total, 1) / width
            square = tl.zeros([BLOCK_R, BLOCK_C], ACC)
            for start in range(0, width, BLOCK_C):
                col = start + lane
                x = _input(x_ptr, residual_ptr, row, live, col, col < width, x_stride, residual_stride, ACC, ADD)
                centred = tl.where((col < width)[None, :], x - mean[:, None], 0.0)
                square += centred * centred
            rstd = tl.rsqrt(tl.sum(square, 1) / width + EPS)
            for start in range(0, width, BLOCK_C):
                col = start + lane
                inside = col < width
                x = _input(x_ptr, residual_ptr, row, live, col, inside, x_stride, residual_stride, ACC, ADD)
                _write(x, w_ptr, b_ptr, y_ptr, sum_ptr, mean, rstd, row, live, col, inside, width,
                       ACC, WEIGHT, ONE_PLUS, BIAS, ADD)  # fmt: skip
        tl.store(rstd_ptr + row, rstd, mask=live)
        if CENTER:
            tl.store(mean_ptr + row, mean, mask=live)


@triton.jit
def _raw(ptr, row, live, col, inside, stride):
    return tl.load(ptr + row[:, None] * stride + col[None, :], mask=live[:, None] & inside[None, :], other=0.0)


@triton.jit
def _normed(raw, mean_ptr, rstd_ptr, row, live, ACC: tl.constexpr, CENTER: tl.constexpr):
    """The normalised rows again, and 1 / their deviation."""
    x = widen(raw, ACC)
    rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
    if CENTER:
        x -= tl.load(mean_ptr + row, mask=live, other=0.0)[:, None]
    return x * rstd[:, None], rstd


@triton.jit
def _norm_bwd(
    dy_ptr, dsum_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, width, dy_stride, dsum_stride,
    x_stride, ACC: tl.constexpr, CENTER: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Whole rows in a tile; program p adds dy * normed (and dy) over its rows into partial[p]."""
    col = tl.arange(0, BLOCK_C)
    inside = col < width
    dw = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    db = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    step = tl.num_programs(0) * BLOCK_R
    ahead = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    dy_ahead = _raw(dy_ptr, ahead, ahead < rows, col, inside, dy_stride)
    x_ahead = _raw(x_ptr, ahead, ahead < rows, col, inside, x_stride)
    for first in range(tl.program_id(0) * BLOCK_R, rows, step):
        row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
        live = row < rows
        dy = widen(dy_ahead, ACC)
        normed, rstd = _normed(x_ahead, mean_ptr, rstd_ptr, row, live, ACC, CENTER)
        if ADD:
            dsum = _raw(dsum_ptr, row, live, col, inside, dsum_stride)  # on its way while the rows are reduced
        ahead = row + step  # the next rows are on their way while these are reduced
        dy_ahead = _raw(dy_ptr, ahead, ahead < rows, col, inside, dy_stride)
        x_ahead = _raw(x_ptr, ahead, ahead < rows, col, inside, x_stride)
        scaled = _scaled(dy, w_ptr, col, inside, ACC, WEIGHT, ONE_PLUS)
        dx = scaled - normed * (tl.sum(scaled * normed, 1) / width)[:, None]
        if CENTER:
            dx -= (tl.sum(scaled, 1) / width)[:, None]
        dx *= rstd[:, None]
        if ADD:
            dx += widen(dsum, ACC)
        store_tile(dx_ptr, row, live, col, inside, width, dx)
        if WEIGHT:
            dw += dy * normed
        if BIAS:
            db += dy
    if WEIGHT:
        out = partial_ptr + tl.program_id(0) * width * (2 if BIAS else 1)
        tl.store(out + col, tl.sum(dw, 0), mask=inside)
        if BIAS:
            tl.store(out + width + col, tl.sum(db, 0), mask=inside)


@triton.jit
def _add_to(ptr, col, inside, x, first: tl.constexpr):
    """Add x to what this program wrote there before."""
    if not first:
        x += tl.load(ptr + col, mask=inside, other=0.0)
    tl.store(ptr + col, x, mask=inside)


@triton.jit
def _wide_rows(
    first, dy_ptr, dsum_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, out_ptr, rows, width, dy_stride, dsum_stride,
    x_stride, ACC: tl.constexpr, CENTER: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_C)
    row = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
    live = row < rows
    along = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    total = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    for start in range(0, width, BLOCK_C):
        col = start + lane
        inside = col < width
        dy = load_tile(dy_ptr, row, live, col, inside, dy_stride, ACC)
        scaled = _scaled(dy, w_ptr, col, inside, ACC, WEIGHT, ONE_PLUS)
        raw = _raw(x_ptr, row, live, col, inside, x_stride)
        normed, rstd = _normed(raw, mean_ptr, rstd_ptr, row, live, ACC, CENTER)
        along += scaled * normed
        total += scaled
    along_mean = tl.sum(along, 1) / width
    total_mean = tl.sum(total, 1) / width
    tl.debug_barrier()  # the partial sums of the rows before are in memory
    for start in range(0, width, BLOCK_C):
        col = start + lane
        inside = col < width
        dy = load_tile(dy_ptr, row, live, col, inside, dy_stride, ACC)
        raw = _raw(x_ptr, row, live, col, inside, x_stride)
        normed, rstd = _normed(raw, mean_ptr, rstd_ptr, row, live, ACC, CENTER)
        dx = _scaled(dy, w_ptr, col, inside, ACC, WEIGHT, ONE_PLUS) - normed * along_mean[:, None]
        if CENTER:
            dx -= total_mean[:, None]
        dx *= rstd[:, None]
        if ADD:
            dx += load_tile(dsum_ptr, row, live, col, inside, dsum_stride, ACC)
        store_tile(dx_ptr, row, live, col, inside, width, dx)
        if WEIGHT:
            _add_to(out_ptr, col, inside, tl.sum(dy * normed, 0), START)
        if BIAS:
            _add_to(out_ptr + width, col, inside, tl.sum(dy, 0), START)


@triton.jit
def _norm_bwd_wide(
    dy_ptr, dsum_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, width, dy_stride, dsum_stride,
    x_stride, ACC: tl.constexpr, CENTER: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows wider than a tile, read twice: the second time from the cache, as are the program's partial sums."""
    out = partial_ptr + tl.program_id(0) * width * (2 if BIAS else 1)
    begin = tl.program_id(0) * BLOCK_R
    step = tl.num_programs(0) * BLOCK_R
    _wide_rows(begin, dy_ptr, dsum_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, out, rows, width, dy_stride,
               dsum_stride, x_stride, ACC, CENTER, ADD, WEIGHT, BIAS, ONE_PLUS, BLOCK_R, BLOCK_C, True)  # fmt: skip
    for first in range(begin + step, rows, step):
        _wide_rows(first, dy_ptr, dsum_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, out, rows, width, dy_stride,
                   dsum_stride, x_stride, ACC, CENTER, ADD, WEIGHT, BIAS, ONE_PLUS, BLOCK_R, BLOCK_C,
                   False)  # fmt: skip


@triton.jit
def _column_sum(x_ptr, out_ptr, rows, width, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    for first in range(tl.program_id(0) * BLOCK_C, width, tl.num_programs(0) * BLOCK_C):
        col = first + tl.arange(0, BLOCK_C)
        total = tl.zeros([BLOCK_R, BLOCK_C], ACC)
        for start in range(0, rows, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            total += load_tile(x_ptr, row, row < rows, col, col < width, width, ACC)
        tl.store(out_ptr + col, narrow(tl.sum(total, 0), out_ptr.dtype.element_ty), mask=col < width)


def column_sum(x: torch.Tensor, dtype: torch.dtype, limits: Limits) -> torch.Tensor:
    """Sum over the rows of a contiguous [rows, width], accumulated in x's dtype, rounded once to ``dtype``."""
    rows, width = x.shape
    out = torch.empty(width, dtype=dtype, device=x.device)
    tile = row_tile("column_sum", rows, width, x.dtype, limits)
    grid = (min(cdiv(width, tile.block_cols), limits.max_grid),)
    _column_sum[grid](
        x, out, rows, width, accumulator(x.dtype), tile.block_rows, tile.block_cols, num_warps=tile.num_warps
    )
    return out


def _rows(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else as_rows(x)


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """The kernels take vectors without strides."""
    return None if x is None else x.contiguous()


def norm_fwd(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
    center: bool, zero_centered: bool, limits: Limits | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(y, x + residual, mean, rstd); None for what the operator does not have."""
    limits = limits or limits_of(x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    rstd = torch.empty(x.shape[:-1], dtype=wide(x.dtype), device=x.device)
    mean = torch.empty_like(rstd) if center else None
    if x.numel() == 0:
        return y, total, None if mean is None else mean.zero_(), rstd.fill_(eps**-0.5)
    flat, other, weight, bias = as_rows(x), _rows(residual), _dense(weight), _dense(bias)
    rows, width = flat.shape
    tile = row_tile("norm_fwd", rows, width, x.dtype, limits)
    _norm_fwd[tile.grid](
        flat, other, weight, bias, y, total, mean, rstd, rows, width, flat.stride(0),
        0 if other is None else other.stride(0), eps, accumulator(x.dtype), center, other is not None,
        weight is not None, bias is not None, zero_centered, tile.whole, tile.block_rows, tile.block_cols,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return y, total, mean, rstd


def norm_bwd(
    dy: torch.Tensor, dsum: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor | None, bias: bool,
    mean: torch.Tensor | None, rstd: torch.Tensor, zero_centered: bool, grad_dtype: torch.dtype | None,
    limits: Limits | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx + dsum, dw, db); dw and db in ``grad_dtype`` (default: the weight's), accumulated in fp32."""
    limits = limits or limits_of(x.device)
    assert weight is not None or not bias, "a bias comes with a weight"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    if x.numel() == 0:
        none = None if weight is None else torch.zeros(width, dtype=grad_dtype or weight.dtype, device=x.device)
        return dx, none, none.clone() if bias and none is not None else None
    flat, grad, other = as_rows(x), as_rows(dy), _rows(dsum)
    weight, mean, rstd = _dense(weight), _dense(mean), rstd.contiguous()
    rows = flat.shape[0]
    tile = row_tile("norm_bwd", rows, width, x.dtype, limits)
    strides = (grad.stride(0), 0 if other is None else other.stride(0), flat.stride(0))
    acc, center, parts = accumulator(x.dtype), mean is not None, 2 if bias else 1
    flags = (acc, center, other is not None, weight is not None)
    kernel, grid, block_rows, block_cols = _norm_bwd, tile.grid, tile.block_rows, tile.block_cols
    if not tile.whole:
        kernel = _norm_bwd_wide
        block_rows = max(1, min(WIDE_ELEMENTS // power_of_two(width), power_of_two(rows)))
        block_cols = max(1, tile.block_cols // block_rows)
        grid = (min(cdiv(rows, block_rows), limits.processors, limits.max_grid),)
    shape = (grid[0], parts * width) if weight is not None else (0, 0)
    partial = torch.empty(shape, dtype=wide(x.dtype), device=x.device)
    kernel[grid](
        grad, other, flat, weight, mean, rstd, dx, partial, rows, width, *strides, *flags, bias, zero_centered,
        block_rows, block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    if weight is None:
        return dx, None, None
    grads = column_sum(partial, grad_dtype or weight.dtype, limits)
    return dx, grads[:width], grads[width:] if bias else None
