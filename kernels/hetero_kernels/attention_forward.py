# mypy: allow-untyped-defs, allow-incomplete-defs
"""Forward kernel of attention: online softmax in base 2 (Dao et al., 2022; Dao, 2023), by blocks of queries."""

import triton
import triton.language as tl

from hetero_kernels.attention_mask import intervals, key_stretches
from hetero_kernels.device_math import LN2, LOG2E, finite_or_zero, narrow, tanh, widen
from hetero_kernels.dropout import DROP_ARGUMENTS, keep_tile, number


@triton.jit
def _stretch(
    out, total, top, q, k_ptr, v_ptr, begin, end, k_stride, v_stride, keys, low, high,
    drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Keys begin .. end - 1, from block border ``begin`` on."""
    lane, d, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    start = begin + tl.full([], 0, tl.int64)
    k_ptr += start * k_stride
    v_ptr += start * v_stride
    k_at = lane[None, :] * k_stride + d[:, None]  # [BLOCK_D, BLOCK_K], in 32 bits: fewer registers than pointers
    v_at = lane[:, None] * v_stride + dv[None, :]  # [BLOCK_K, BLOCK_V]
    for here in range(begin, end, BLOCK_K):
        key = here + lane
        if MASKED:
            k = tl.load(k_ptr + k_at, mask=(key < keys)[None, :] & (d < DIM)[:, None], other=0.0)
        elif DIM == BLOCK_D:
            k = tl.load(k_ptr + k_at)
        else:
            k = tl.load(k_ptr + k_at, mask=(d < DIM)[:, None], other=0.0)
        scores = tl.dot(q, widen(k, DOT), input_precision=PRECISION, out_dtype=ACC)
        if SOFTCAP > 0:
            scores = tanh(scores * (SCALE / SOFTCAP)) * (SOFTCAP / SCALE)
        if MASKED:
            seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * (SCALE * LOG2E))  # a row's maximum is scaled, not its scores
        if MASKED:
            safe = finite_or_zero(higher)
        else:
            safe = higher
        p = tl.exp2(scores * (SCALE * LOG2E) - safe[:, None])  # one multiply-add
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        if DROPPED > 0:  # after the sum: the probabilities are those of all keys
            keep = keep_tile(
                drop_key, drop_k + here, drop_row, drop_head, drop_sample, DROPPED, ALIGNED, BLOCK_K
            )
            p = tl.where(keep, p, 0.0)
        out = out * shrink[:, None]
        if MASKED:
            v = tl.load(v_ptr + v_at, mask=(key < keys)[:, None] & (dv < DIM_V)[None, :], other=0.0)
        elif DIM_V == BLOCK_V:
            v = tl.load(v_ptr + v_at)
        else:
            v = tl.load(v_ptr + v_at, mask=(dv < DIM_V)[None, :], other=0.0)
        out = tl.dot(p.to(DOT), widen(v, DOT), out, input_precision=PRECISION, out_dtype=ACC)
        top = higher
        k_ptr += BLOCK_K * k_stride
        v_ptr += BLOCK_K * v_stride
    return out, total, top


@triton.jit(do_not_specialize=["first_program", "offset", "q_blocks", *DROP_ARGUMENTS])
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bounds_ptr, first_program, heads, group, queries, keys, offset, q_blocks,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h,
    drop_key, drop_sample, drop_head, drop_q, drop_k, DROPPED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BOUNDS: tl.constexpr, EVEN_K: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Strides of batch, sequence and head; features are adjacent. Longest blocks of queries first, a head at a time."""
    program = tl.program_id(0) + first_program
    block = q_blocks - 1 - program % q_blocks
    head = (program // q_blocks) % heads
    batch = (program // q_blocks // heads).to(tl.int64)
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    live = row < queries
    at = row.to(tl.int64)
    q = tl.load(
        q_ptr + batch * q_b + head.to(tl.int64) * q_h + at[:, None] * q_s + d[None, :],
        mask=live[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    q = widen(q, DOT)
    kv_head = (head // group).to(tl.int64)
    k_ptr += batch * k_b + kv_head * k_h
    v_ptr += batch * v_b + kv_head * v_h
    low, high = intervals(bounds_ptr + batch * 2 * queries, row, queries, keys, offset, CAUSAL, WINDOW, BOUNDS)
    drop_key, drop_row, drop_head = number(drop_key), drop_q + row, drop_head + head
    drop_sample = number(drop_sample).to(tl.int32) + batch.to(tl.int32)
    begin, full_begin, full_end, end = key_stretches(low, high, BLOCK_K)
    out = tl.zeros([BLOCK_Q, BLOCK_V], ACC)
    total = tl.zeros([BLOCK_Q], ACC)
    top = tl.full([BLOCK_Q], float("-inf"), ACC)
    if BOUNDS or WINDOW > 0:
        out, total, top = _stretch(
            out, total, top, q, k_ptr, v_ptr, begin, full_begin, k_s, v_s, keys, low, high,
            drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED, ALIGNED,
            SCALE, SOFTCAP, ACC, DOT, PRECISION, True, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_K,
        )  # fmt: skip
    out, total, top = _stretch(
        out, total, top, q, k_ptr, v_ptr, full_begin, full_end, k_s, v_s, keys, low, high,
        drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED, ALIGNED,
        SCALE, SOFTCAP, ACC, DOT, PRECISION, False, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_K,
    )  # fmt: skip
    if BOUNDS or CAUSAL or WINDOW > 0 or not EVEN_K:
        out, total, top = _stretch(
            out, total, top, q, k_ptr, v_ptr, full_end, end, k_s, v_s, keys, low, high,
            drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED, ALIGNED,
            SCALE, SOFTCAP, ACC, DOT, PRECISION, True, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_K,
        )  # fmt: skip
    nothing = total == 0.0  # and not "no total above 0": a NaN must show
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + (batch * heads + head) * queries + at, lse, mask=live)
    target = out_ptr + batch * o_b + head.to(tl.int64) * o_h + at[:, None] * o_s + dv[None, :]
    if DROPPED > 0:
        total = total * ((65536.0 - DROPPED) / 65536.0)
    out = narrow(out / total[:, None], out_ptr.dtype.element_ty)
    tl.store(target, out, mask=live[:, None] & (dv < DIM_V)[None, :])
