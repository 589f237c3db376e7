# mypy: allow-untyped-defs, allow-incomplete-defs
"""SwiGLU: silu(gate) * up (Shazeer, 2020). Backward recomputes silu, so that only the two inputs are kept.

The clamped form, (up + shift) gate sigmoid(alpha gate) with gate at most and up within ``limit`` (gpt-oss: alpha 1.702,
shift 1, limit 7), is the same kernels with other constants. What is not a number stays so.
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import load_tile, store_tile
from hetero_kernels.limits import Limits, accumulator, as_flat_rows, as_rows, flat_tile, limits_of, wide


def swiglu_reference(
    gate: torch.Tensor, up: torch.Tensor, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0
) -> torch.Tensor:
    """(up + shift) gate sigmoid(alpha gate) in at least fp32; ``limit`` clamps gate from above and up on both sides
    first."""
    g, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + shift)).to(gate.dtype)


@triton.jit
def _sigmoid(x, ALPHA: tl.constexpr):
    if ALPHA != 1.0:
        x = x * ALPHA
    return tl.sigmoid(x)


@triton.jit
def _swiglu_fwd(
    gate_ptr, up_ptr, y_ptr, rows, width, gate_stride, up_stride,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_C)
    for task in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        row = (task // across) * tl.full([], BLOCK_R, tl.int64) + tl.arange(0, BLOCK_R)
        col = (task % across) * tl.full([], BLOCK_C, tl.int64) + tl.arange(0, BLOCK_C)
        live, inside = row < rows, col < width
        gate = load_tile(gate_ptr, row, live, col, inside, gate_stride, ACC)
        up = load_tile(up_ptr, row, live, col, inside, up_stride, ACC)
        if LIMIT is not None:
            bound = tl.full([], LIMIT, ACC)
            gate = tl.minimum(gate, bound, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, bound, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -bound, propagate_nan=tl.PropagateNan.ALL)
        if SHIFT != 0.0:
            up += SHIFT
        store_tile(y_ptr, row, live, col, inside, width, gate * _sigmoid(gate, ALPHA) * up)


@triton.jit
def _swiglu_bwd(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, rows, width, dy_stride, gate_stride, up_stride, out_stride,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_C)
    for task in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        row = (task // across) * tl.full([], BLOCK_R, tl.int64) + tl.arange(0, BLOCK_R)
        col = (task % across) * tl.full([], BLOCK_C, tl.int64) + tl.arange(0, BLOCK_C)
        live, inside = row < rows, col < width
        dy = load_tile(dy_ptr, row, live, col, inside, dy_stride, ACC)
        raw_gate = load_tile(gate_ptr, row, live, col, inside, gate_stride, ACC)
        raw_up = load_tile(up_ptr, row, live, col, inside, up_stride, ACC)
        gate, up = raw_gate, raw_up
        bound = tl.full([], 0.0, ACC)
        if LIMIT is not None:
            bound = tl.full([], LIMIT, ACC)
            gate = tl.minimum(gate, bound, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, bound, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -bound, propagate_nan=tl.PropagateNan.ALL)
        if SHIFT != 0.0:
            up += SHIFT
        sigmoid = _sigmoid(gate, ALPHA)
        silu = gate * sigmoid
        inner = silu * (1.0 - sigmoid)
        if ALPHA != 1.0:
            inner *= ALPHA
        dgate = dy * up * (sigmoid + inner)
        dup = dy * silu
        if LIMIT is not None:
            dgate = tl.where(raw_gate > bound, 0.0, dgate)
            dup = tl.where((raw_up > bound) | (raw_up < -bound), 0.0, dup)
        store_tile(dgate_ptr, row, live, col, inside, out_stride, dgate)
        store_tile(dup_ptr, row, live, col, inside, out_stride, dup)


def swiglu_fwd(
    gate: torch.Tensor, up: torch.Tensor, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
    limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """gate, up [..., f] (rows may be strided: two halves of one tensor) -> y [..., f]."""
    limits = limits or limits_of(gate.device)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() == 0:
        return y
    g, u = as_flat_rows(gate, up)
    rows, width = g.shape
    tile = flat_tile("elementwise", rows, width, gate.dtype, limits)
    _swiglu_fwd[tile.grid](
        g, u, y, rows, width, g.stride(0), u.stride(0), limit, alpha, shift, accumulator(gate.dtype),
        tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    return y


def swiglu_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, limit: float | None = None, alpha: float = 1.0,
    shift: float = 0.0, packed: bool = False, limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dgate, dup [..., f]; ``packed``: the two halves of one [..., 2f], so that joining them costs nothing."""
    limits = limits or limits_of(gate.device)
    if packed:
        both = torch.empty((*gate.shape[:-1], 2 * gate.shape[-1]), dtype=gate.dtype, device=gate.device)
        dgate, dup = both.chunk(2, -1)
        flat, stride = [as_rows(t) for t in (dy, gate, up)], 2 * gate.shape[-1]
    else:
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        flat = as_flat_rows(dy, gate, up)
        stride = flat[0].shape[-1]
    if gate.numel() == 0:
        return dgate, dup
    rows, width = flat[0].shape
    tile = flat_tile("elementwise", rows, width, gate.dtype, limits)
    _swiglu_bwd[tile.grid](
        *flat, dgate, dup, rows, width, *(t.stride(0) for t in flat), stride, limit, alpha, shift,
        accumulator(gate.dtype), tile.block_rows, tile.block_cols, num_warps=tile.num_warps,
    )  # fmt: skip
    return dgate, dup
