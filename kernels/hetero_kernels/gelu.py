# mypy: allow-untyped-defs, allow-incomplete-defs
"""GELU (Hendrycks and Gimpel, 2016), exact or by its tanh approximation."""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import load_tile, store_tile
from hetero_kernels.limits import Limits, accumulator, as_flat_rows, flat_tile, limits_of, wide


def gelu_reference(x: torch.Tensor, *, approximate: bool = False) -> torch.Tensor:
    """In at least fp32, rounded once."""
    return torch.nn.functional.gelu(x.to(wide(x.dtype)), approximate="tanh" if approximate else "none").to(x.dtype)


@triton.jit
def _gelu(
    dy_ptr, x_ptr, out_ptr, rows, width, dy_stride, x_stride,
    TANH: tl.constexpr, BACKWARD: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_C)
    for task in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        row = (task // across) * tl.full([], BLOCK_R, tl.int64) + tl.arange(0, BLOCK_R)
        col = (task % across) * tl.full([], BLOCK_C, tl.int64) + tl.arange(0, BLOCK_C)
        live, inside = row < rows, col < width
        x = load_tile(x_ptr, row, live, col, inside, x_stride, ACC)
        if TANH:
            # 0.5 (1 + tanh u) is the sigmoid of 2 u; exp2 of -2 u / ln 2, so that no multiplication is left over.
            square = x * x
            half = 1.0 / (1.0 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square)))
            slope = half + x * half * (1.0 - half) * (1.5957691216057308 + 0.21406444881780072 * square)
        else:
            half = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            slope = half + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        if BACKWARD:
            y = load_tile(dy_ptr, row, live, col, inside, dy_stride, ACC) * slope
        else:
            y = x * half
        store_tile(out_ptr, row, live, col, inside, width, y)


def gelu_fwd(x: torch.Tensor, *, approximate: bool = False, limits: Limits | None = None) -> torch.Tensor:
    """x [...] -> y of the same shape and dtype; ``approximate``: the tanh form."""
    return _run(None, x, approximate, limits)


def gelu_bwd(
    dy: torch.Tensor, x: torch.Tensor, *, approximate: bool = False, limits: Limits | None = None
) -> torch.Tensor:
    """-> dx."""
    return _run(dy, x, approximate, limits)


def _run(dy: torch.Tensor | None, x: torch.Tensor, approximate: bool, limits: Limits | None) -> torch.Tensor:
    limits = limits or limits_of(x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    flat = as_flat_rows(x) if dy is None else as_flat_rows(dy, x)
    rows, width = flat[0].shape
    tile = flat_tile("elementwise", rows, width, x.dtype, limits)
    _gelu[tile.grid](
        flat[0], flat[-1], out, rows, width, flat[0].stride(0), flat[-1].stride(0), approximate, dy is not None,
        accumulator(x.dtype), tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    return out
