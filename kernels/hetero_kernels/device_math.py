# mypy: allow-untyped-defs, allow-incomplete-defs
"""Helpers that kernels call. Triton inlines them; its interpreter needs them at module level."""

import triton
import triton.language as tl

from hetero_kernels.limits import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Cast to DTYPE, to nearest even. Triton's interpreter truncates casts to bf16 and fp8: there bits are rounded."""
    if _INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        wide = x.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        bits = tl.where(wide == wide, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if _INTERPRETED and DTYPE == tl.float8e4nv:  # noqa: SIM300
        x = _to_steps(x, 3, -6)
    if _INTERPRETED and DTYPE == tl.float8e5:  # noqa: SIM300
        x = _to_steps(x, 2, -14)
    return x.to(DTYPE)


@triton.jit
def _to_steps(x, BITS: tl.constexpr, LEAST: tl.constexpr):
    """fp32 to nearest even of BITS bits of mantissa, of normal numbers from 2^LEAST."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST) - BITS
    step = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x == x, ((x / step + 12582912.0) - 12582912.0) * step, x)  # 1.5 x 2^23 leaves no fraction


@triton.jit
def widen(x, ACC: tl.constexpr):
    """Cast what was loaded to ACC. Triton's interpreter turns a bf16 zero into 2^-126, so there the bits are moved."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        x = bits.to(tl.float32, bitcast=True)
    return x.to(ACC)


@triton.jit
def load_tile(ptr, row, live, col, inside, stride, ACC: tl.constexpr):
    """[rows, cols] of a matrix with row stride ``stride``; zeros outside."""
    at = row[:, None] * stride + col[None, :]
    return widen(tl.load(ptr + at, mask=live[:, None] & inside[None, :], other=0.0), ACC)


@triton.jit
def store_tile(ptr, row, live, col, inside, stride, x):
    at = row[:, None] * stride + col[None, :]
    tl.store(ptr + at, narrow(x, ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def tanh(x):
    """From the sigmoid, which is safe at both ends; libdevice's is missing in forks and in the interpreter."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def finite_or_zero(x):
    """-inf becomes 0: a row that has seen nothing yet must not turn into NaN by -inf - -inf."""
    return tl.where(x == float("-inf"), 0.0, x)
