# mypy: allow-untyped-defs, allow-incomplete-defs
"""Quantisation to fp8, with one scale per matrix or by blocks, and products of operands whose blocks of 128 elements
have scales of their own (DeepSeek-V3, 2024).

Scales are powers of two. Each block's product is scaled as it is added to the sum, in fp32.
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, widen
from hetero_kernels.limits import INTERPRETED, Limits, cdiv, config, limits_of, power_of_two

BLOCK = 128  # elements that share a scale
MANY = 4096  # rows in a tile under the interpreter, if there are more
SHAPES = ("1x128", "128x128", "128x1")
WHOLE, WHOLE_TURNED = 3, 4  # one scale for each matrix, whose largest magnitude is given
SCALE_STRIDE = tl.constexpr(4)  # from one matrix's scale to the next: cuBLAS takes them at multiples of 16 bytes
# Of the largest number of a format, 1.75 x 2^n: n.
TOPS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def quantise_fp8_blocks_reference(x: torch.Tensor, kind: torch.dtype, blocks: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`quantise_fp8_blocks`."""
    if blocks == "128x1":
        return quantise_fp8_blocks_reference(x.t(), kind, "1x128")
    height, (rows, cols) = (1 if blocks == "1x128" else BLOCK), x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -cols % BLOCK, 0, -rows % height))
    tiles = padded.unflatten(0, (-1, height)).unflatten(2, (-1, BLOCK))
    largest = tiles.abs().amax((1, 3))
    exponent = torch.floor(torch.log2(torch.finfo(kind).max / largest.double())).clamp(-126, 126)
    exponent = torch.where(largest > 0, exponent, 0.0)
    data = (tiles * torch.exp2(exponent).float()[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols].to(kind)
    return data.contiguous(), torch.where(largest.isfinite(), torch.exp2(-exponent).float(), torch.nan)


@triton.jit
def _quantise(
    x_ptr, out_ptr, scale_ptr, largest_ptr, matrices, rows, cols, matrix_stride, row_stride, col_stride, scale_stride,
    TOP: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """SHAPE: 0 for 1 x 128, 1 for 128 x 128, 2 for 128 x 1, whose out is [cols, rows]; of these there is one matrix. 3
    for whole matrices, 4 for such whose out is [cols, rows]. ROWS and COLS are 128, or less where x has no more; rows
    that have scales of their own may be more."""
    across = tl.cdiv(cols, COLS)
    tiles = tl.cdiv(rows, ROWS) * across
    for every in range(tl.program_id(0), matrices * tiles, tl.num_programs(0)):
        if SHAPE >= 3:
            matrix, tile = every // tiles, every % tiles
            x_at = x_ptr + matrix.to(tl.int64) * matrix_stride
            out_at = out_ptr + matrix.to(tl.int64) * rows * cols
        else:
            tile, x_at = every, x_ptr
        top, left = tile // across, tile % across
        row = (top * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        col = (left * COLS + tl.arange(0, COLS)).to(tl.int64)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        x = widen(
            tl.load(x_at + row[:, None] * row_stride + col[None, :] * col_stride, mask=inside, other=0.0), tl.float32
        )
        size = tl.where(x == x, tl.abs(x), float("inf"))
        if SHAPE >= 3:
            largest = tl.full([1, 1], 0, tl.float32) + tl.load(largest_ptr + matrix)
        elif SHAPE == 0:
            largest = tl.max(size, 1, keep_dims=True)
        elif SHAPE == 1:
            largest = tl.max(tl.max(size, 1, keep_dims=True), 0, keep_dims=True)
        else:
            largest = tl.max(size, 0, keep_dims=True)
        bits = largest.to(tl.int32, bitcast=True)
        exponent = TOP - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # over 1.75 x 2^n
        exponent = tl.where(largest > 0, tl.minimum(tl.maximum(exponent, -126), 126), 0)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        inverse = tl.where(largest < float("inf"), inverse, float("nan"))
        data = narrow(x * scale, out_ptr.dtype.element_ty)
        if SHAPE >= 3:
            if SHAPE == 3:
                tl.store(out_at + row[:, None] * cols + col[None, :], data, mask=inside)
            else:
                tl.store(out_at + col[None, :] * rows + row[:, None], data, mask=inside)
            tl.store(scale_ptr + matrix * SCALE_STRIDE + tl.zeros([1, 1], tl.int32), inverse, mask=tile == 0)
        elif SHAPE == 0:
            tl.store(out_ptr + row[:, None] * cols + col[None, :], data, mask=inside)
            tl.store(scale_ptr + row[:, None] * scale_stride + left, inverse, mask=(row < rows)[:, None])
        elif SHAPE == 1:
            tl.store(out_ptr + row[:, None] * cols + col[None, :], data, mask=inside)
            at = tl.full([1, 1], 0, tl.int64) + top * scale_stride + left
            tl.store(scale_ptr + at, inverse)
        else:
            tl.store(out_ptr + col[None, :] * rows + row[:, None], data, mask=inside)
            tl.store(scale_ptr + col[None, :] * scale_stride + top, inverse, mask=(col < cols)[None, :])


def quantise_fp8_blocks(
    x: torch.Tensor, kind: torch.dtype, blocks: str, *, limits: Limits | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, n] -> (fp8 ``kind``, what gives the values back, fp32), one scale for each ``1x128``, ``128x128`` or
    ``128x1`` elements: [rows, n] with [rows, blocks of n] or [blocks of rows, blocks of n], and of ``128x1`` [n, rows]
    with [n, blocks of rows]. A block with what is not finite has a scale of NaN."""
    limits = limits or limits_of(x.device)
    rows, cols = x.shape
    shape = SHAPES.index(blocks)
    turned = (cols, rows) if shape == 2 else (rows, cols)
    out = torch.empty(turned, dtype=kind, device=x.device)
    heights = cdiv(turned[0], BLOCK) if shape == 1 else turned[0]
    scale = torch.empty(heights, cdiv(turned[1], BLOCK), dtype=torch.float32, device=x.device)
    if out.numel():
        chosen = config("quantise_fp8", cols, x.dtype, limits)
        tall = MANY if INTERPRETED and shape == 0 and rows > MANY else min(BLOCK, power_of_two(rows))
        wide = min(BLOCK, power_of_two(cols))
        programs = min(cdiv(rows, tall) * cdiv(cols, wide), limits.max_grid)
        _quantise[(programs,)](
            x, out, scale, scale, 1, rows, cols, 0, *x.stride(), scale.stride(0), TOPS[kind], shape, tall, wide,
            num_warps=min(chosen["num_warps"], limits.max_warps),
        )  # fmt: skip
    return out, scale


def quantise_fp8_reference(
    x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor, turned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`quantise_fp8`."""
    exponent = torch.floor(torch.log2(torch.finfo(kind).max / largest.double())).clamp(-126, 126)
    exponent = torch.where(largest > 0, exponent, 0.0)
    data = (x.float() * torch.exp2(exponent).float()[:, None, None]).to(kind)
    inverse = torch.where(largest.isfinite(), torch.exp2(-exponent).float(), torch.nan)
    return (data.transpose(1, 2) if turned else data).contiguous(), inverse


def quantise_fp8(
    x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor, turned: bool = False, *, limits: Limits | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [b, rows, n] -> (fp8 ``kind`` [b, rows, n], or ``turned`` [b, n, rows]; what gives the values back, fp32 [b]),
    in one pass: scaled to the range of ``kind``, rounded, and turned.

    Args:
        largest: fp32 [b], magnitudes that each matrix is scaled for; what is not finite gives a scale of NaN.
    """
    limits = limits or limits_of(x.device)
    b, rows, cols = x.shape
    assert largest.shape == (b,) and largest.dtype == torch.float32, "one magnitude for each matrix"
    out = torch.empty((b, cols, rows) if turned else (b, rows, cols), dtype=kind, device=x.device)
    scale = torch.empty(b, SCALE_STRIDE.value, dtype=torch.float32, device=x.device)[:, 0]
    assert out.numel(), "there is nothing to round"
    chosen = config("quantise_fp8", cols, x.dtype, limits)
    most = MANY if INTERPRETED else BLOCK
    tall, wide = (min(most if side == 0 else BLOCK, power_of_two(n)) for side, n in enumerate((rows, cols)))
    programs = min(b * cdiv(rows, tall) * cdiv(cols, wide), limits.max_grid)
    _quantise[(programs,)](
        x, out, scale, largest.contiguous(), b, rows, cols, *x.stride(), 0, TOPS[kind],
        WHOLE_TURNED if turned else WHOLE, tall, wide, num_warps=min(chosen["num_warps"], limits.max_warps),
    )  # fmt: skip
    return out, scale


def gemm_fp8_blocks_reference(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See :func:`gemm_fp8_blocks`; in fp32."""

    def values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = scale if scale.shape[0] == x.shape[0] else scale.repeat_interleave(BLOCK, 0)[: x.shape[0]]
        return x.float() * rows.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]

    return (values(a, a_scale) @ values(b, b_scale).t()).to(dtype)


@triton.jit
def _product(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, m, n, k, a_scale_row, b_scale_row,
    B_SQUARE: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """a [m, k], b [n, k], rows one after another; B_SQUARE: b's scales are of BLOCK_K rows, and BLOCK_N rows of it lie
    in one of their blocks. Programs of GROUP rows of tiles run together, so that their b stays in the cache."""
    program = tl.program_id(0)
    across = tl.cdiv(n, BLOCK_N)
    group = program // (GROUP * across)
    rows = tl.minimum(tl.cdiv(m, BLOCK_M) - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * across)) % rows
    tile_n = (program % (GROUP * across)) // rows
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    a_at = a_ptr + row[:, None] * k + lane[None, :]
    b_at = b_ptr + col[None, :] * k + lane[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(tl.cdiv(k, BLOCK_K)):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            inside = block * BLOCK_K + lane < k
            a = tl.load(a_at, mask=(row < m)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_at, mask=(col < n)[None, :] & inside[:, None], other=0.0)
        a_scale = tl.load(a_scale_ptr + row * a_scale_row + block, mask=row < m, other=0.0)
        part = tl.dot(a, b)
        if B_SQUARE:
            b_scale = tl.load(b_scale_ptr + tile_n * BLOCK_N // BLOCK_K * b_scale_row + block)
            total += part * (a_scale * b_scale)[:, None]
        else:
            b_scale = tl.load(b_scale_ptr + col * b_scale_row + block, mask=col < n, other=0.0)
            total += part * a_scale[:, None] * b_scale[None, :]
        a_at += BLOCK_K
        b_at += BLOCK_K
    out = narrow(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * n + col[None, :], out, mask=(row < m)[:, None] & (col < n)[None, :])


def gemm_fp8_blocks(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, *,
    limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """a b^T in ``dtype``, summed in fp32.

    Args:
        a: fp8 [m, k]; a_scale: fp32 [m, blocks of k], what 128 elements of a row are multiplied with.
        b: fp8 [n, k]; b_scale: as a's [n, blocks of k], or [blocks of n, blocks of k], each for 128 x 128 elements.
    """
    limits = limits or limits_of(a.device)
    (m, k), n = a.shape, b.shape[0]
    assert b.shape[1] == k and a_scale.shape == (m, cdiv(k, BLOCK)), "a, its scales and b do not fit together"
    square = b_scale.shape[0] != n or (n == 1 and b_scale.shape[0] == cdiv(n, BLOCK))
    assert b_scale.shape == ((cdiv(n, BLOCK) if square else n), cdiv(k, BLOCK)), "b and its scales do not fit together"
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if out.numel() == 0 or k == 0:
        return out.zero_()
    a, b, a_scale, b_scale = (x.contiguous() for x in (a, b, a_scale, b_scale))
    chosen = config("gemm_fp8", k, torch.float32, limits)
    block_m, block_n = chosen["block_m"], min(chosen["block_n"], BLOCK)
    if INTERPRETED:  # which takes as long for a program of any size
        block_m = min(block_m, max(power_of_two(m), 16)) if m <= MANY else MANY
        block_n = min(block_n, max(power_of_two(n), 16))
    programs = cdiv(m, block_m) * cdiv(n, block_n)
    assert programs <= limits.max_grid, f"{m} x {n} is too large for one launch"
    even = m % block_m == 0 and n % block_n == 0 and k % BLOCK == 0
    _product[(programs,)](
        a, b, a_scale, b_scale, out, m, n, k, a_scale.stride(0), b_scale.stride(0), square, even, 8, block_m, block_n,
        BLOCK, num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
    )  # fmt: skip
    return out
