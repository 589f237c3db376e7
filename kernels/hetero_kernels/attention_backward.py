# mypy: allow-untyped-defs, allow-incomplete-defs
"""Backward kernels of attention (Dao et al., 2022): dK and dV by blocks of keys, dQ by blocks of queries.

No atomics, so the result is the same in every run; the gradients of a shared KV head are summed in registers.
"""

import triton
import triton.language as tl

from hetero_kernels.attention_mask import intervals, key_stretches, query_stretches
from hetero_kernels.device_math import LOG2E, narrow, tanh, widen
from hetero_kernels.dropout import DROP_ARGUMENTS, keep_tile, number


@triton.jit
def _kv_stretch(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, bounds_ptr, begin, end, key, queries, keys, offset, q_s, do_s,
    drop_key, drop_q, drop_k, drop_head, drop_sample, DROPPED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Queries begin .. end - 1, from block border ``begin`` on. Scores are held transposed, [keys, queries].

    lse and delta come in after the products. As what accumulators start from they would save registers, but the
    compiler then does not load them ahead: each block's first product would wait for memory.
    """
    lane, d, e = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    start = begin + tl.full([], 0, tl.int64)
    q_ptr += start * q_s
    do_ptr += start * do_s
    q_at = lane[:, None] * q_s + d[None, :]  # [BLOCK_Q, BLOCK_D], in 32 bits: fewer registers than pointers
    do_at = lane[:, None] * do_s + e[None, :]
    for here in range(begin, end, BLOCK_Q):
        row = here + lane
        live = row < queries
        if MASKED:
            q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
            do = tl.load(do_ptr + do_at, mask=live[:, None] & (e < DIM_V)[None, :], other=0.0)
            lse = tl.load(lse_ptr + row, mask=live, other=float("inf"))
            delta = tl.load(delta_ptr + row, mask=live, other=0.0)
        else:
            q = tl.load(q_ptr + q_at, mask=(d < DIM)[None, :], other=0.0) if DIM != BLOCK_D else tl.load(q_ptr + q_at)
            do = (
                tl.load(do_ptr + do_at, mask=(e < DIM_V)[None, :], other=0.0)
                if DIM_V != BLOCK_V
                else tl.load(do_ptr + do_at)
            )
            lse = tl.load(lse_ptr + row)
            delta = tl.load(delta_ptr + row)
        lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E  # a row that saw nothing gives nothing
        q = widen(q, DOT)
        do = widen(do, DOT)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC)
        if SOFTCAP > 0:
            turned = tanh(scores * (SCALE / SOFTCAP))
            scores = turned * (SOFTCAP / SCALE)
        p = tl.exp2(scores * (SCALE * LOG2E) - lse[None, :])
        if MASKED:
            low, high = intervals(bounds_ptr, row, queries, keys, offset, CAUSAL, WINDOW, BOUNDS)
            p = tl.where((key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]), p, 0.0)
        used = p
        if DROPPED > 0:
            keep = tl.trans(
                keep_tile(drop_key, drop_k, drop_q + row, drop_head, drop_sample, DROPPED, ALIGNED, BLOCK_K)
            )
            used = tl.where(keep, p * (65536.0 / (65536.0 - DROPPED)), 0.0)
        dv = tl.dot(used.to(DOT), do, dv, input_precision=PRECISION, out_dtype=ACC)  # before dp: fewer registers
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION, out_dtype=ACC)
        if DROPPED > 0:
            dp = tl.where(keep, dp * (65536.0 / (65536.0 - DROPPED)), 0.0)
        ds = p * (dp - delta[None, :])
        if SOFTCAP > 0:
            ds = ds * (1.0 - turned * turned)
        dk = tl.dot(ds.to(DOT), q, dk, input_precision=PRECISION, out_dtype=ACC)
        q_ptr += BLOCK_Q * q_s
        do_ptr += BLOCK_Q * do_s
    return dk, dv


@triton.jit(do_not_specialize=["first_program", "offset", "k_blocks", *DROP_ARGUMENTS])
def attention_backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, bounds_ptr, stretch_ptr, first_program, heads,
    group, queries, keys, offset, k_blocks, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_s, do_h,
    drop_key, drop_sample, drop_head, drop_q, drop_k, DROPPED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BOUNDS: tl.constexpr, EVEN_Q: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dk and dv are contiguous [b, keys, kv_heads, d]; a program sums over the ``group`` query heads of its KV head."""
    program = tl.program_id(0) + first_program
    block = program % k_blocks  # causal: early keys are seen by most queries, so the longest come first
    kv_heads = heads // group
    kv_head = (program // k_blocks) % kv_heads
    batch = (program // k_blocks // kv_heads).to(tl.int64)
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside = key < keys
    at = key.to(tl.int64)
    k_mask = inside[:, None] & (d < DIM)[None, :]
    v_mask = inside[:, None] & (e < DIM_V)[None, :]
    k_at = k_ptr + batch * k_b + kv_head.to(tl.int64) * k_h + at[:, None] * k_s + d[None, :]
    v_at = v_ptr + batch * v_b + kv_head.to(tl.int64) * v_h + at[:, None] * v_s + e[None, :]
    k = widen(tl.load(k_at, mask=k_mask, other=0.0), DOT)
    v = widen(tl.load(v_at, mask=v_mask, other=0.0), DOT)
    begin, full_begin, full_end, end = query_stretches(
        stretch_ptr + (batch * k_blocks + block) * 4, block * BLOCK_K, tl.minimum(block * BLOCK_K + BLOCK_K, keys),
        queries, offset, CAUSAL, WINDOW, BOUNDS, BLOCK_Q,
    )  # fmt: skip
    if BOUNDS:  # documents leave few blocks that need no mask, and loops of their own for them cost registers
        full_begin = end
    bounds_ptr += batch * 2 * queries
    drop_key, drop_sample = number(drop_key), number(drop_sample).to(tl.int32) + batch.to(tl.int32)
    dk = tl.zeros([BLOCK_K, BLOCK_D], ACC)
    dv = tl.zeros([BLOCK_K, BLOCK_V], ACC)
    for member in range(group):
        head = kv_head * group + member + tl.full([], 0, tl.int64)
        q_head = q_ptr + batch * q_b + head * q_h
        do_head = do_ptr + batch * do_b + head * do_h
        lse_head = lse_ptr + (batch * heads + head) * queries
        delta_head = delta_ptr + (batch * heads + head) * queries
        if CAUSAL or BOUNDS:
            dk, dv = _kv_stretch(
                dk, dv, k, v, q_head, do_head, lse_head, delta_head, bounds_ptr, begin, full_begin, key, queries, keys,
                offset, q_s, do_s, drop_key, drop_q, drop_k + block * BLOCK_K, drop_head + head.to(tl.int32),
                drop_sample, DROPPED, ALIGNED, SCALE, SOFTCAP, ACC, DOT, PRECISION, True, CAUSAL, WINDOW, BOUNDS,
                DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
        if not BOUNDS:
            dk, dv = _kv_stretch(
                dk, dv, k, v, q_head, do_head, lse_head, delta_head, bounds_ptr, full_begin, full_end, key, queries,
                keys, offset, q_s, do_s, drop_key, drop_q, drop_k + block * BLOCK_K, drop_head + head.to(tl.int32),
                drop_sample, DROPPED, ALIGNED, SCALE, SOFTCAP, ACC, DOT, PRECISION, False, CAUSAL, WINDOW, BOUNDS,
                DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
        if not BOUNDS and (WINDOW > 0 or not EVEN_Q):
            dk, dv = _kv_stretch(
                dk, dv, k, v, q_head, do_head, lse_head, delta_head, bounds_ptr, full_end, end, key, queries, keys,
                offset, q_s, do_s, drop_key, drop_q, drop_k + block * BLOCK_K, drop_head + head.to(tl.int32),
                drop_sample, DROPPED, ALIGNED, SCALE, SOFTCAP, ACC, DOT, PRECISION, True, CAUSAL, WINDOW, BOUNDS,
                DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
    row = (batch * keys + at) * kv_heads + kv_head
    tl.store(dk_ptr + row[:, None] * DIM + d[None, :], narrow(dk * SCALE, dk_ptr.dtype.element_ty), mask=k_mask)
    tl.store(dv_ptr + row[:, None] * DIM_V + e[None, :], narrow(dv, dv_ptr.dtype.element_ty), mask=v_mask)


@triton.jit
def _q_stretch(
    dq, q, do, lse, delta, k_ptr, v_ptr, begin, end, k_s, v_s, keys, low, high,
    drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    lane, d, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    start = begin + tl.full([], 0, tl.int64)
    k_ptr += start * k_s
    v_ptr += start * v_s
    k_at = lane[:, None] * k_s + d[None, :]
    v_at = lane[:, None] * v_s + e[None, :]
    for here in range(begin, end, BLOCK_K):
        key = here + lane
        if MASKED:
            k = tl.load(k_ptr + k_at, mask=(key < keys)[:, None] & (d < DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + v_at, mask=(key < keys)[:, None] & (e < DIM_V)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + k_at, mask=(d < DIM)[None, :], other=0.0) if DIM != BLOCK_D else tl.load(k_ptr + k_at)
            v = (
                tl.load(v_ptr + v_at, mask=(e < DIM_V)[None, :], other=0.0)
                if DIM_V != BLOCK_V
                else tl.load(v_ptr + v_at)
            )
        k = widen(k, DOT)
        v = widen(v, DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
        if SOFTCAP > 0:
            turned = tanh(scores * (SCALE / SOFTCAP))
            scores = turned * (SOFTCAP / SCALE)
        p = tl.exp2(scores * (SCALE * LOG2E) - lse[:, None])
        if MASKED:
            p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        if DROPPED > 0:
            keep = keep_tile(
                drop_key, drop_k + here, drop_row, drop_head, drop_sample, DROPPED, ALIGNED, BLOCK_K
            )
            dp = tl.where(keep, dp * (65536.0 / (65536.0 - DROPPED)), 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP > 0:
            ds = ds * (1.0 - turned * turned)
        dq = tl.dot(ds.to(DOT), k, dq, input_precision=PRECISION, out_dtype=ACC)
        k_ptr += BLOCK_K * k_s
        v_ptr += BLOCK_K * v_s
    return dq


@triton.jit(do_not_specialize=["first_program", "offset", "q_blocks", *DROP_ARGUMENTS])
def attention_backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, bounds_ptr, first_program, heads, group, queries, keys,
    offset, q_blocks, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_s, do_h,
    drop_key, drop_sample, drop_head, drop_q, drop_k, DROPPED: tl.constexpr, ALIGNED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BOUNDS: tl.constexpr, EVEN_K: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dq is contiguous [b, queries, heads, d]."""
    program = tl.program_id(0) + first_program
    block = q_blocks - 1 - program % q_blocks
    head = (program // q_blocks) % heads
    batch = (program // q_blocks // heads).to(tl.int64)
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    live = row < queries
    at = row.to(tl.int64)
    wide_head = head.to(tl.int64)
    q_mask = live[:, None] & (d < DIM)[None, :]
    do_mask = live[:, None] & (e < DIM_V)[None, :]
    q = tl.load(q_ptr + batch * q_b + wide_head * q_h + at[:, None] * q_s + d[None, :], mask=q_mask, other=0.0)
    do = tl.load(do_ptr + batch * do_b + wide_head * do_h + at[:, None] * do_s + e[None, :], mask=do_mask, other=0.0)
    q = widen(q, DOT)
    do = widen(do, DOT)
    stats = (batch * heads + head) * queries + at
    lse = tl.load(lse_ptr + stats, mask=live, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    delta = tl.load(delta_ptr + stats, mask=live, other=0.0)
    kv_head = (head // group).to(tl.int64)
    k_ptr += batch * k_b + kv_head * k_h
    v_ptr += batch * v_b + kv_head * v_h
    low, high = intervals(bounds_ptr + batch * 2 * queries, row, queries, keys, offset, CAUSAL, WINDOW, BOUNDS)
    drop_key, drop_row, drop_head = number(drop_key), drop_q + row, drop_head + head
    drop_sample = number(drop_sample).to(tl.int32) + batch.to(tl.int32)
    begin, full_begin, full_end, end = key_stretches(low, high, BLOCK_K)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], ACC)
    if BOUNDS or WINDOW > 0:
        dq = _q_stretch(
            dq, q, do, lse, delta, k_ptr, v_ptr, begin, full_begin, k_s, v_s, keys, low, high,
            drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED, ALIGNED,
            SCALE, SOFTCAP, ACC, DOT, PRECISION, True, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_K,
        )  # fmt: skip
    dq = _q_stretch(
        dq, q, do, lse, delta, k_ptr, v_ptr, full_begin, full_end, k_s, v_s, keys, low, high,
        drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED, ALIGNED,
        SCALE, SOFTCAP, ACC, DOT, PRECISION, False, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_K,
    )  # fmt: skip
    if BOUNDS or CAUSAL or WINDOW > 0 or not EVEN_K:
        dq = _q_stretch(
            dq, q, do, lse, delta, k_ptr, v_ptr, full_end, end, k_s, v_s, keys, low, high,
            drop_key, drop_k, drop_row, drop_head, drop_sample, DROPPED, ALIGNED,
            SCALE, SOFTCAP, ACC, DOT, PRECISION, True, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK_K,
        )  # fmt: skip
    target = dq_ptr + ((batch * queries + at) * heads + head)[:, None] * DIM + d[None, :]
    tl.store(target, narrow(dq * SCALE, dq_ptr.dtype.element_ty), mask=q_mask)
