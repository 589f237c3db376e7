# mypy: allow-untyped-defs, allow-incomplete-defs
"""AdamW (Loshchilov and Hutter, 2019) over many tensors in one launch, each element read and written once."""

import math
import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, widen
from hetero_kernels.limits import TRITON_DTYPES, Limits, accumulator, config, limits_of
from hetero_kernels.multi_tensor import CHUNK, TensorTable, chunk_begin, pointer, tensor_table


def adamw_reference(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor], *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: int, grad_scale: float = 1.0,
) -> None:  # fmt: skip
    """In place, as torch.optim.AdamW."""
    for p, g, m, v in zip(params, grads, exp_avg, exp_avg_sq, strict=True):
        g = g.to(p.dtype) * grad_scale
        p.mul_(1 - lr * weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
        p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))


@triton.jit
def _exact(high, low, ACC: tl.constexpr):
    """A host number: launches pass fp32, so what fp32 cannot hold comes in a second one."""
    return tl.full([], high, ACC) + low


@triton.jit
def _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, scale, begin, size, keep, step_size, b1, w1, b2, w2, root, eps,
            COPIES: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr, CHUNK_SIZE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    for start in range(0, CHUNK_SIZE, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        if MASKED:
            live = at < size
            g = tl.load(g_ptr + at, mask=live, other=0.0)
            p = tl.load(p_ptr + at, mask=live, other=0.0)
            m = tl.load(m_ptr + at, mask=live, other=0.0)
            v = tl.load(v_ptr + at, mask=live, other=0.0)
        else:
            live = None
            g = tl.load(g_ptr + at)
            p = tl.load(p_ptr + at)
            m = tl.load(m_ptr + at)
            v = tl.load(v_ptr + at)
        g = widen(g, ACC) * scale
        m = m * b1 + g * w1
        v = v * b2 + g * g * w2
        p = p * keep - step_size * m / (tl.sqrt(v) * root + eps)
        tl.store(p_ptr + at, p, mask=live)
        tl.store(m_ptr + at, m, mask=live)
        tl.store(v_ptr + at, v, mask=live)
        if COPIES:
            tl.store(copy_ptr + at, narrow(p, copy_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["first_chunk"])
def _adamw(
    addresses_ptr, sizes_ptr, owner_ptr, first_ptr, scale_ptr, skip_ptr, first_chunk, rows,
    keep, keep_low, step_size, step_size_low, beta1, beta1_low, weight1, weight1_low, beta2, beta2_low,
    weight2, weight2_low, root, root_low, eps, eps_low,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr, COPIES: tl.constexpr, SCALED: tl.constexpr,
    SKIP: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keep = 1 - lr * decay, step_size = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t); weights = 1 - betas, in
    which fp32 would lose digits."""
    chunk = tl.program_id(0) + first_chunk
    row = tl.load(owner_ptr + chunk)
    size = tl.load(sizes_ptr + row)
    begin = chunk_begin(first_ptr, chunk, ALIGNED)
    p_ptr = pointer(addresses_ptr, 0, rows, row, PARAM, ALIGNED)
    g_ptr = pointer(addresses_ptr, 1, rows, row, GRAD, ALIGNED)
    m_ptr = pointer(addresses_ptr, 2, rows, row, PARAM, ALIGNED)
    v_ptr = pointer(addresses_ptr, 3, rows, row, PARAM, ALIGNED)
    copy_ptr = pointer(addresses_ptr, 4 if COPIES else 0, rows, row, COPY if COPIES else PARAM, ALIGNED)
    scale = tl.full([], 1.0, ACC)
    if SCALED:
        scale = tl.load(scale_ptr).to(ACC)
    k = _exact(keep, keep_low, ACC)
    s = _exact(step_size, step_size_low, ACC)
    b1 = _exact(beta1, beta1_low, ACC)
    w1 = _exact(weight1, weight1_low, ACC)
    b2 = _exact(beta2, beta2_low, ACC)
    w2 = _exact(weight2, weight2_low, ACC)
    r = _exact(root, root_low, ACC)
    e = _exact(eps, eps_low, ACC)
    if SKIP:
        size = tl.where(tl.load(skip_ptr) != 0, 0, size)  # nothing is written
    if begin + CHUNK_SIZE <= size:
        _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, scale, begin, size, k, s, b1, w1, b2, w2, r, e,
                COPIES, False, ACC, CHUNK_SIZE, BLOCK)  # fmt: skip
    else:
        _update(p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, scale, begin, size, k, s, b1, w1, b2, w2, r, e,
                COPIES, True, ACC, CHUNK_SIZE, BLOCK)  # fmt: skip


def _split(x: float) -> tuple[float, float]:
    high = struct.unpack("f", struct.pack("f", x))[0]
    return high, x - high


def adamw_table(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor], copies: Sequence[torch.Tensor] | None = None,
) -> TensorTable:  # fmt: skip
    """The table that :func:`adamw_step` otherwise makes at each call (one upload): worth keeping if no tensor moves."""
    columns = [params, grads, exp_avg, exp_avg_sq, *([] if copies is None else [copies])]
    return tensor_table(columns, params[0].device)


def adamw_step(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor], *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: int, grad_scale: torch.Tensor | float = 1.0, found_inf: torch.Tensor | None = None,
    copies: Sequence[torch.Tensor] | None = None, table: TensorTable | None = None, limits: Limits | None = None,
) -> None:  # fmt: skip
    """One step in place, as torch.optim.AdamW.

    Args:
        params, exp_avg, exp_avg_sq: fp32 (or fp64), contiguous; ``params`` are the masters. All of one dtype.
        grads: any one dtype; multiplied by ``grad_scale`` (a number, or a scalar on the device) first.
        found_inf: a scalar on the device; where it is not 0, nothing changes.
        copies: 16-bit tensors that receive the new parameters, rounded to nearest even.
        step: counts from 1.
    """
    if not params:
        return
    dtypes = [{x.dtype for x in column} for column in (params, grads, exp_avg, exp_avg_sq, copies or params)]
    assert all(len(kinds) == 1 for kinds in dtypes) and dtypes[0] == dtypes[2] == dtypes[3], "adamw: one dtype per list"
    dtype, grad_dtype, copy_dtype = params[0].dtype, grads[0].dtype, (copies or params)[0].dtype
    assert dtype in (torch.float32, torch.float64), "adamw: parameters and state in fp32 or fp64"
    table = table or adamw_table(params, grads, exp_avg, exp_avg_sq, copies)
    if table.chunks == 0:
        return
    limits = limits or limits_of(params[0].device)
    scaled = isinstance(grad_scale, torch.Tensor) or grad_scale != 1.0
    if scaled and not isinstance(grad_scale, torch.Tensor):
        grad_scale = torch.full((), grad_scale, dtype=dtype, device=params[0].device)
    root = 1 / math.sqrt(1 - beta2**step)
    rates = (beta1, 1 - beta1, beta2, 1 - beta2)
    numbers = (1 - lr * weight_decay, lr / (1 - beta1**step), *rates, root, eps)
    chosen = config("adamw", CHUNK, dtype, limits)
    for first, chunks, aligned in table.launches(limits.max_grid):
        _adamw[(chunks,)](
            table.addresses, table.sizes, table.owner, table.first, grad_scale if scaled else table.sizes,
            table.sizes if found_inf is None else found_inf, first, table.rows,
            *(part for number in numbers for part in _split(number)),
            TRITON_DTYPES[dtype], TRITON_DTYPES[grad_dtype], TRITON_DTYPES[copy_dtype], copies is not None, scaled,
            found_inf is not None, accumulator(dtype), aligned, CHUNK, chosen["tile"],
            num_warps=chosen["num_warps"],
        )  # fmt: skip
