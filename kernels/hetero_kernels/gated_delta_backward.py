# mypy: allow-untyped-defs, allow-incomplete-defs
"""Backward kernels of the gated delta rule: gradients of the states, last chunk first, then those of all else, chunk by
chunk. Formulas and names: ``gated_delta.py``."""

import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, widen
from hetero_kernels.gated_delta_forward import chunk_decay, load_rows, one_over_norm, pair_decay


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_state_gradients(
    q_ptr, k_ptr, g_ptr, beta_ptr, number_ptr, inverse_ptr, inside_ptr, do_ptr, last_ptr, dv_ptr, change_ptr,
    after_ptr, first_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h, g_b, g_s, g_h,
    w_b, w_s, w_h, do_b, do_s, do_h, DOCUMENTS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_V features of one head's values, from the gradients of out and of the last state: that of v, of what is
    to be written before tokens see each other (``change``), both [b, tokens, heads, DIM_V]; of the state after each
    chunk [b, heads, chunks, DIM, DIM_V], and of the first state [b, heads, DIM, DIM_V]. All contiguous but out's."""
    program = tl.program_id(0) + first_program
    across = tl.cdiv(DIM_V, BLOCK_V)
    head = (program // across % heads).to(tl.int64)
    batch = (program // across // heads).to(tl.int64)
    lane, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), program % across * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_d, inside_e = d < DIM, e < DIM_V
    q_ptr += batch * q_b + head // group * q_h
    k_ptr += batch * k_b + head // group * k_h
    do_ptr += batch * do_b + head * do_h
    g_ptr += batch * g_b + head * g_h
    beta_ptr += batch * w_b + head * w_h
    number_ptr += batch * tokens
    line = batch * heads + head
    of_state = d[:, None] * DIM_V + e[None, :]
    state_mask = inside_d[:, None] & inside_e[None, :]
    turned = lane[None, :] * CHUNK + lane[:, None]
    after = tl.load(last_ptr + line * DIM * DIM_V + of_state, mask=state_mask, other=0.0).to(ACC)
    for turn in range(chunks):
        chunk = chunks - 1 - turn
        start = chunk * CHUNK
        first, live = start.to(tl.int64), start + lane < tokens
        pair = (line * chunks + chunk) * CHUNK * CHUNK
        k = load_rows(k_ptr + first * k_s, lane, live, d, inside_d, k_s, DOT)
        q = load_rows(q_ptr + first * q_s, lane, live, d, inside_d, q_s, DOT)
        do = load_rows(do_ptr + first * do_s, lane, live, e, inside_e, do_s, DOT)
        beta = widen(tl.load(beta_ptr + (start + lane) * w_s, mask=live, other=0.0), ACC)
        inverse_turned = widen(tl.load(inverse_ptr + pair + turned), DOT)
        inside_turned = widen(tl.load(inside_ptr + pair + turned), DOT)
        _, reach, rest, carried, _ = chunk_decay(g_ptr, g_s, number_ptr, start, tokens, DOCUMENTS, CHUNK, ACC)
        k_unit, q_unit = one_over_norm(k, live, EPS, ACC), one_over_norm(q, live, EPS, ACC) * SCALE
        here = after_ptr + (line * chunks + chunk) * DIM * DIM_V + of_state
        tl.store(here, narrow(after, after_ptr.dtype.element_ty), mask=state_mask)
        written = tl.dot(k, after.to(DOT), input_precision=PRECISION, out_dtype=ACC) * (rest * k_unit)[:, None]
        written = tl.dot(inside_turned, do, written, input_precision=PRECISION, out_dtype=ACC)
        change = tl.dot(inverse_turned, written.to(DOT), input_precision=PRECISION, out_dtype=ACC)
        row = (batch * tokens + first + lane) * heads + head
        of_tokens, token_mask = row[:, None] * DIM_V + e[None, :], live[:, None] & inside_e[None, :]
        tl.store(change_ptr + of_tokens, narrow(change, change_ptr.dtype.element_ty), mask=token_mask)
        tl.store(dv_ptr + of_tokens, narrow(change * beta[:, None], dv_ptr.dtype.element_ty), mask=token_mask)
        asked = (do.to(ACC) * (reach * q_unit)[:, None]).to(DOT)
        after = tl.dot(tl.trans(q), asked, after * carried, input_precision=PRECISION, out_dtype=ACC)
        read = (change * -(beta * reach * k_unit)[:, None]).to(DOT)
        after = tl.dot(tl.trans(k), read, after, input_precision=PRECISION, out_dtype=ACC)
    tl.store(first_ptr + line * DIM * DIM_V + of_state, narrow(after, first_ptr.dtype.element_ty), mask=state_mask)


@triton.jit
def _by_states(
    dq, dk, q, k, do_ptr, v_ptr, written_ptr, change_ptr, states_ptr, after_ptr, lane, live, d, inside_d, do_s, v_s,
    row_s, reach, rest, beta, SCALE: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums over the features of one head's values, BLOCK_V at a time. dq and dk [CHUNK, BLOCK_D] of normalised queries
    and keys are added to; returned besides: gradients of A and of M (times -1, with what is above the diagonal), rows'
    sums with q S, k S, k after and v, and state times its gradient."""
    d_inside, d_lower = tl.zeros([CHUNK, CHUNK], ACC), tl.zeros([CHUNK, CHUNK], ACC)
    asked, read, left, fresh = (
        tl.zeros([CHUNK], ACC), tl.zeros([CHUNK], ACC), tl.zeros([CHUNK], ACC), tl.zeros([CHUNK], ACC)
    )  # fmt: skip
    through = tl.zeros([BLOCK_V], ACC)
    for at in range(0, DIM_V, BLOCK_V):
        e = at + tl.arange(0, BLOCK_V)
        inside_e = e < DIM_V
        of_state, state_mask = d[:, None] * DIM_V + e[None, :], inside_d[:, None] & inside_e[None, :]
        do = load_rows(do_ptr, lane, live, e, inside_e, do_s, DOT)
        written = load_rows(written_ptr, lane, live, e, inside_e, row_s, DOT)
        change = load_rows(change_ptr, lane, live, e, inside_e, row_s, DOT)
        state = widen(tl.load(states_ptr + of_state, mask=state_mask, other=0.0), DOT)
        d_inside = tl.dot(do, tl.trans(written), d_inside, input_precision=PRECISION, out_dtype=ACC)
        d_lower = tl.dot(change, tl.trans(written), d_lower, input_precision=PRECISION, out_dtype=ACC)
        part = tl.dot(do, tl.trans(state), input_precision=PRECISION, out_dtype=ACC)
        asked += tl.sum(part * q, 1)
        dq += part * (reach * SCALE)[:, None]
        part = tl.dot(change, tl.trans(state), input_precision=PRECISION, out_dtype=ACC)
        read += tl.sum(part * k, 1)
        dk -= part * (beta * reach)[:, None]
        after = widen(tl.load(after_ptr + of_state, mask=state_mask, other=0.0), DOT)
        through += tl.sum(state.to(ACC) * after.to(ACC), 0)
        part = tl.dot(written, tl.trans(after), input_precision=PRECISION, out_dtype=ACC)
        left += tl.sum(part * k, 1)
        dk += part * rest[:, None]
        v = load_rows(v_ptr, lane, live, e, inside_e, v_s, ACC)
        fresh += tl.sum(change.to(ACC) * v, 1)
    return dq, dk, d_inside, d_lower, asked, read, left, fresh, tl.sum(through, 0)


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, number_ptr, do_ptr, written_ptr, change_ptr, states_ptr, after_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h,
    g_b, g_s, g_h, w_b, w_s, w_h, v_b, v_s, v_h, do_b, do_s, do_h, DOCUMENTS: tl.constexpr, EPS: tl.constexpr,
    SCALE: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of one chunk of a key head and its ``group`` value heads: dq and dk [b, tokens, key heads, DIM], dg and dbeta
    [b, tokens, heads], contiguous."""
    program = tl.program_id(0) + first_program
    key_heads = heads // group
    chunk, key_head = program % chunks, (program // chunks % key_heads).to(tl.int64)
    batch = (program // chunks // key_heads).to(tl.int64)
    lane, d, start = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), chunk * CHUNK
    live, inside_d, first = start + lane < tokens, d < DIM, start.to(tl.int64)
    k = load_rows(k_ptr + batch * k_b + key_head * k_h + first * k_s, lane, live, d, inside_d, k_s, DOT)
    q = load_rows(q_ptr + batch * q_b + key_head * q_h + first * q_s, lane, live, d, inside_d, q_s, DOT)
    k_unit, q_unit = one_over_norm(k, live, EPS, ACC), one_over_norm(q, live, EPS, ACC)
    keys = tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * k_unit[:, None] * k_unit[None, :]
    pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
    pairs *= (q_unit * SCALE)[:, None] * k_unit[None, :]
    by_inside, by_lower = tl.zeros([CHUNK, CHUNK], ACC), tl.zeros([CHUNK, CHUNK], ACC)
    dq, dk = tl.zeros([CHUNK, BLOCK_D], ACC), tl.zeros([CHUNK, BLOCK_D], ACC)
    for member in range(group):
        head = key_head * group + member
        running, reach, rest, carried, number = chunk_decay(
            g_ptr + batch * g_b + head * g_h, g_s, number_ptr + batch * tokens, start, tokens, DOCUMENTS, CHUNK, ACC
        )
        beta_at = beta_ptr + batch * w_b + head * w_h + (start + lane) * w_s
        beta = widen(tl.load(beta_at, mask=live, other=0.0), ACC)
        rows = ((batch * tokens + first) * heads + head) * DIM_V
        ends = ((batch * heads + head) * chunks + chunk) * DIM * DIM_V
        dq, dk, d_inside, d_lower, asked, read, left, fresh, through = _by_states(
            dq, dk, q, k, do_ptr + batch * do_b + head * do_h + first * do_s,
            v_ptr + batch * v_b + head * v_h + first * v_s, written_ptr + rows, change_ptr + rows, states_ptr + ends,
            after_ptr + ends, lane, live, d, inside_d, do_s, v_s, heads * DIM_V, reach, rest, beta, SCALE, ACC,
            DOT, PRECISION, DIM_V, BLOCK_V, CHUNK,
        )  # fmt: skip
        read *= k_unit * reach
        left *= k_unit * rest
        decay = pair_decay(running, number, DOCUMENTS, CHUNK)
        d_inside *= decay
        d_lower = tl.where(lane[:, None] > lane[None, :], -d_lower * decay, 0.0)
        d_beta = fresh - read + tl.sum(d_lower * keys, 1)
        d_lower *= beta[:, None]
        turned = d_inside * pairs + d_lower * keys
        d_running = tl.sum(turned, 1) - tl.sum(turned, 0) + asked * (reach * q_unit * SCALE) - beta * read - left
        d_running += tl.where(lane == CHUNK - 1, tl.sum(left, 0) + through * carried, 0.0)
        d_g = tl.cumsum(d_running, 0, reverse=True)
        at = (batch * tokens + first + lane) * heads + head
        tl.store(dg_ptr + at, narrow(d_g, dg_ptr.dtype.element_ty), mask=live)
        tl.store(dbeta_ptr + at, narrow(d_beta, dbeta_ptr.dtype.element_ty), mask=live)
        by_inside += d_inside
        by_lower += d_lower
    by_inside *= SCALE
    weighted = (by_inside * k_unit[None, :]).to(DOT)
    dq = tl.dot(weighted, k, dq, input_precision=PRECISION, out_dtype=ACC)
    weighted = (by_inside * q_unit[:, None]).to(DOT)
    dk = tl.dot(tl.trans(weighted), q, dk, input_precision=PRECISION, out_dtype=ACC)
    weighted = ((by_lower + tl.trans(by_lower)) * k_unit[None, :]).to(DOT)
    dk = tl.dot(weighted, k, dk, input_precision=PRECISION, out_dtype=ACC)
    at = ((batch * tokens + first + lane) * key_heads + key_head)[:, None] * DIM + d[None, :]
    mask = live[:, None] & inside_d[None, :]
    unit = q.to(ACC) * q_unit[:, None]
    dq = (dq - unit * tl.sum(dq * unit, 1)[:, None]) * q_unit[:, None]
    tl.store(dq_ptr + at, narrow(dq, dq_ptr.dtype.element_ty), mask=mask)
    unit = k.to(ACC) * k_unit[:, None]
    dk = (dk - unit * tl.sum(dk * unit, 1)[:, None]) * k_unit[:, None]
    tl.store(dk_ptr + at, narrow(dk, dk_ptr.dtype.element_ty), mask=mask)
