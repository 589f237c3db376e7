# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows times the matrix of their group (experts): y[i] = x[i] W[g]^T, and its two gradients.

The rows of a group lie side by side, and where each ends is read on the device: nothing waits for the host. A program
finds its group from the number of its tile; a grid for the worst case has at most one tile more per group.
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, widen
from hetero_kernels.limits import INTERPRETED, Limits, accumulator, cdiv, config, limits_of, power_of_two, wide

MANY = 4096  # rows in a tile under the interpreter, if there are more


def grouped_gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, k], weight [groups, n, k], ends [groups] (ascending, the last one is rows) -> [rows, n]."""
    kind, parts, start = wide(x.dtype), [], 0
    for group, end in enumerate(ends.tolist()):
        part = x[start:end].to(kind) @ weight[group].to(kind).t()
        parts.append(part if bias is None else part + bias[group].to(kind))
        start = end
    return torch.cat(parts).to(x.dtype)


@triton.jit
def _find_group(tile, ends_ptr, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """(group, its first row of the tile, the group's end) of a tile of rows; group ``GROUPS`` if there is none."""
    g = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + g, mask=g < groups, other=0)
    starts = tl.load(ends_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)
    tiles = tl.where(g < groups, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(tiles, 0)
    group = tl.sum((upto <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(upto <= tile, tiles, 0), 0)
    mine = g == group
    start = tl.sum(tl.where(mine, starts, 0), 0) + (tile - before) * BLOCK_M
    return group, start, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _grouped_rows(
    x_ptr, w_ptr, b_ptr, y_ptr, ends_ptr, tiles, groups, n, k, x_m, w_g, w_n, w_k, y_m,
    BIAS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x W[g]^T (+ b[g]); W has any strides, so that it is also what backward multiplies by."""
    across = tl.cdiv(n, BLOCK_N)
    for task in range(tl.program_id(0), tiles * across, tl.num_programs(0)):
        group, start, end = _find_group(task // across, ends_ptr, groups, BLOCK_M, GROUPS)
        if group < groups:
            row = start + tl.arange(0, BLOCK_M)
            col = (task % across) * BLOCK_N + tl.arange(0, BLOCK_N)
            live, inside = row < end, col < n
            inner = tl.arange(0, BLOCK_K)
            x_at = x_ptr + row[:, None].to(tl.int64) * x_m + inner[None, :]
            w_at = w_ptr + group.to(tl.int64) * w_g + col[None, :].to(tl.int64) * w_n + inner[:, None] * w_k
            total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
            for at in range(0, k, BLOCK_K):
                x = tl.load(x_at, mask=live[:, None] & (inner < k - at)[None, :], other=0.0)
                w = tl.load(w_at, mask=inside[None, :] & (inner < k - at)[:, None], other=0.0)
                total = tl.dot(widen(x, DOT), widen(w, DOT), total, input_precision=PRECISION, out_dtype=ACC)
                x_at += BLOCK_K
                w_at += BLOCK_K * w_k
            if BIAS:
                bias = tl.load(b_ptr + group.to(tl.int64) * n + col, mask=inside, other=0.0)
                total += widen(bias, ACC)[None, :]
            y_at = y_ptr + row[:, None].to(tl.int64) * y_m + col[None, :]
            tl.store(y_at, narrow(total, y_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _grouped_weights(
    dy_ptr, x_ptr, dw_ptr, ends_ptr, groups, n, k, dy_m, x_m,
    BETA: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dW[g] = dy^T x over the group's rows, added to what is there where BETA; groups without rows too."""
    across, down = tl.cdiv(k, BLOCK_K), tl.cdiv(n, BLOCK_N)
    for task in range(tl.program_id(0), groups * across * down, tl.num_programs(0)):
        group = task // (across * down)
        col_n = (task // across % down) * BLOCK_N + tl.arange(0, BLOCK_N)
        col_k = (task % across) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside_n, inside_k = col_n < n, col_k < k
        end = tl.load(ends_ptr + group)
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        total = tl.zeros([BLOCK_N, BLOCK_K], ACC)
        for at in range(start, end, BLOCK_M):
            row = at + tl.arange(0, BLOCK_M)
            live = row < end
            dy_at = dy_ptr + row[None, :].to(tl.int64) * dy_m + col_n[:, None]
            x_at = x_ptr + row[:, None].to(tl.int64) * x_m + col_k[None, :]
            dy = tl.load(dy_at, mask=live[None, :] & inside_n[:, None], other=0.0)
            x = tl.load(x_at, mask=live[:, None] & inside_k[None, :], other=0.0)
            total = tl.dot(widen(dy, DOT), widen(x, DOT), total, input_precision=PRECISION, out_dtype=ACC)
        dw_at = dw_ptr + (group.to(tl.int64) * n + col_n[:, None]) * k + col_k[None, :]
        mask = inside_n[:, None] & inside_k[None, :]
        if BETA:
            total += widen(tl.load(dw_at, mask=mask, other=0.0), ACC)
        tl.store(dw_at, narrow(total, dw_ptr.dtype.element_ty), mask=mask)


def _types(dtype: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """(of sums, of operands); the interpreter's products are in fp32 at least."""
    native = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, accumulator(dtype))
    return accumulator(dtype), accumulator(dtype) if INTERPRETED else native


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, allow_tf32: bool,
    limits: Limits | None,
) -> torch.Tensor:  # fmt: skip
    """weight: [groups, n, k] of any strides."""
    limits, x = limits or limits_of(x.device), _adjacent(x)
    (rows, k), (groups, n, _) = x.shape, weight.shape
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    chosen = config("grouped_gemm", k, x.dtype, limits)
    block_m, block_n, block_k = (max(chosen[b], 16) for b in ("block_m", "block_n", "block_k"))
    if INTERPRETED and rows > MANY:  # which takes as long for a program of any size
        block_m = MANY
    tiles = cdiv(rows, block_m) + min(groups, rows)  # the worst case of groups that do not fill their last tile
    grid = min(tiles * cdiv(n, block_n), limits.max_grid)
    bias = None if bias is None else bias.contiguous()
    _grouped_rows[(grid,)](
        x, weight, bias, y, ends, tiles, groups, n, k, x.stride(0), *weight.stride(), n, bias is not None,
        *_types(x.dtype), "tf32" if allow_tf32 else "ieee", power_of_two(groups), block_m, block_n, block_k,
        num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
    )  # fmt: skip
    return y


def grouped_gemm_fwd(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None, *,
    allow_tf32: bool = False, limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [rows, k], weight [groups, n, k], ends [groups] int64 on the device -> [rows, n] in x's dtype."""
    return _rows(x, weight, bias, ends, allow_tf32, limits)


def grouped_gemm_dx(
    dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, allow_tf32: bool = False,
    limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """dy [rows, n], weight [groups, n, k] -> dx [rows, k]."""
    return _rows(dy, weight.transpose(1, 2), None, ends, allow_tf32, limits)


def grouped_gemm_dw(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, *, into: torch.Tensor | None = None, beta: float = 1.0,
    allow_tf32: bool = False, limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """dy [rows, n], x [rows, k] -> [groups, n, k] in x's dtype.

    Args:
        into: [groups, n, k], contiguous, at least fp32: the gradient is added to it (``beta`` 1) or overwrites it (0).
    """
    limits = limits or limits_of(x.device)
    dy, x, groups = _adjacent(dy), _adjacent(x), ends.shape[0]
    shape = (groups, dy.shape[1], x.shape[1])
    if into is None:
        into, beta = torch.empty(shape, dtype=x.dtype, device=x.device), 0.0
    assert into.shape == shape and into.is_contiguous(), f"into: {tuple(into.shape)}, not a contiguous {shape}"
    if not into.numel():
        return into
    chosen = config("grouped_gemm", shape[2], x.dtype, limits)
    block_n, block_k, block_m = (max(chosen[b], 16) for b in ("block_m", "block_n", "block_k"))
    grid = min(groups * cdiv(shape[1], block_n) * cdiv(shape[2], block_k), limits.max_grid)
    _grouped_weights[(grid,)](
        dy, x, into, ends, groups, *shape[1:], dy.stride(0), x.stride(0), beta != 0.0, *_types(x.dtype),
        "tf32" if allow_tf32 else "ieee", block_n, block_k, block_m,
        num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
    )  # fmt: skip
    return into
