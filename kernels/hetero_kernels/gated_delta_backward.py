# mypy: allow-untyped-defs, allow-incomplete-defs
"""Backward kernels of the gated delta rule and the state-space rule: gradients of the states, last chunk first, then
those of all else, chunk by chunk. Formulas and names: ``delta_chunks.py``."""

import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, store_tile, widen
from hetero_kernels.gated_delta_forward import chunk_decay, load_rows, one_over_norm, pair_decay


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_state_gradients(
    q_ptr, k_ptr, left_ptr, beta_ptr, inverse_ptr, inside_ptr, rates_ptr, do_ptr, last_ptr, dv_ptr, change_ptr,
    after_ptr, first_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h, w_b, w_s, w_h,
    do_b, do_s, do_h, DELTA: tl.constexpr, FEATURES: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_V features of one head's values, from the gradients of out and of the last state: that of v, of what is
    to be written before tokens see each other (``change``), both [b, tokens, heads, DIM_V]; of the state after each
    chunk [b, heads, chunks, DIM, DIM_V], and of the first state [b, heads, DIM, DIM_V]. All contiguous but out's.
    FEATURES: as of ``delta_states``."""
    program = tl.program_id(0) + first_program
    across = tl.cdiv(DIM_V, BLOCK_V)
    head = (program // across % heads).to(tl.int64)
    batch = (program // across // heads).to(tl.int64)
    lane, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), program % across * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_d, inside_e = d < DIM, e < DIM_V
    q_ptr += batch * q_b + head // group * q_h
    k_ptr += batch * k_b + head // group * k_h
    left_ptr += batch * k_b + head // group * k_h
    do_ptr += batch * do_b + head * do_h
    beta_ptr += batch * w_b + head * w_h
    line = batch * heads + head
    of_state = d[:, None] * DIM_V + e[None, :]
    state_mask = inside_d[:, None] & inside_e[None, :]
    of_chunk = lane[:, None] * CHUNK + lane[None, :]
    after = tl.load(last_ptr + line * DIM * DIM_V + of_state, mask=state_mask, other=0.0).to(ACC)
    for turn in range(chunks):
        chunk = chunks - 1 - turn
        start, block = chunk * CHUNK, line * chunks + chunk
        first, live = tl.full([], 0, tl.int64) + start, start + lane < tokens
        k = load_rows(k_ptr + first * k_s, lane, live, d, inside_d, k_s, DOT)
        q = load_rows(q_ptr + first * q_s, lane, live, d, inside_d, q_s, DOT)
        do = load_rows(do_ptr + first * do_s, lane, live, e, inside_e, do_s, DOT)
        beta = widen(tl.load(beta_ptr + (start + lane) * w_s, mask=live, other=0.0), ACC)
        inside = widen(tl.load(inside_ptr + block * CHUNK * CHUNK + of_chunk), DOT)
        rates = rates_ptr + block * 4 * CHUNK + lane
        here = after_ptr + block * DIM * DIM_V + of_state
        tl.store(here, narrow(after, after_ptr.dtype.element_ty), mask=state_mask)
        if FEATURES:
            left = load_rows(left_ptr + first * k_s, lane, live, d, inside_d, k_s, DOT)
            change = tl.dot(left, after.to(DOT), input_precision=PRECISION, out_dtype=ACC)
        else:
            change = tl.dot(k, after.to(DOT), input_precision=PRECISION, out_dtype=ACC)
            change *= tl.load(rates + CHUNK)[:, None]
        change = tl.dot(tl.trans(inside), do, change, input_precision=PRECISION, out_dtype=ACC)
        if DELTA:
            inverse = widen(tl.load(inverse_ptr + block * CHUNK * CHUNK + of_chunk), DOT)
            change = tl.dot(tl.trans(inverse), change.to(DOT), input_precision=PRECISION, out_dtype=ACC)
        row = (batch * tokens + first + lane) * heads + head
        of_tokens, token_mask = row[:, None] * DIM_V + e[None, :], live[:, None] & inside_e[None, :]
        tl.store(change_ptr + of_tokens, narrow(change, change_ptr.dtype.element_ty), mask=token_mask)
        tl.store(dv_ptr + of_tokens, narrow(change * beta[:, None], dv_ptr.dtype.element_ty), mask=token_mask)
        if FEATURES:
            after *= tl.load(rates_ptr + block * DIM + d, mask=inside_d, other=0.0)[:, None]
        else:
            after *= tl.load(rates_ptr + block * 4 * CHUNK + 3 * CHUNK)
            do = (do.to(ACC) * tl.load(rates + 2 * CHUNK)[:, None]).to(DOT)
            beta = beta * tl.load(rates)
        after = tl.dot(tl.trans(q), do, after, input_precision=PRECISION, out_dtype=ACC)
        if DELTA:
            read = (change * -beta[:, None]).to(DOT)
            after = tl.dot(tl.trans(k), read, after, input_precision=PRECISION, out_dtype=ACC)
    tl.store(first_ptr + line * DIM * DIM_V + of_state, narrow(after, first_ptr.dtype.element_ty), mask=state_mask)


@triton.jit
def over_values(
    x_ptr, x_s, state_ptr, written_ptr, written_s, lane, live, d, inside_d, PAIRS: tl.constexpr, ACC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """x [CHUNK, DIM_V] with a state [DIM, DIM_V] and, where PAIRS, with what was written [CHUNK, DIM_V]: products over
    the features of values, [CHUNK, BLOCK_D] and [CHUNK, CHUNK]."""
    by_state, by_token = tl.zeros([CHUNK, BLOCK_D], ACC), tl.zeros([CHUNK, CHUNK], ACC)
    for at in range(0, DIM_V, BLOCK_V):
        e = at + tl.arange(0, BLOCK_V)
        inside_e = e < DIM_V
        x = load_rows(x_ptr, lane, live, e, inside_e, x_s, DOT)
        state = load_rows(state_ptr, d, inside_d, e, inside_e, DIM_V, DOT)
        by_state = tl.dot(x, tl.trans(state), by_state, input_precision=PRECISION, out_dtype=ACC)
        if PAIRS:
            written = load_rows(written_ptr, lane, live, e, inside_e, written_s, DOT)
            by_token = tl.dot(x, tl.trans(written), by_token, input_precision=PRECISION, out_dtype=ACC)
    return by_state, by_token


@triton.jit
def row_products(
    x_ptr, x_s, y_ptr, y_s, row, live, ACC: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each row, the sum of x y over the features of values: a few at a time, which take few registers."""
    total = tl.zeros([ROWS], ACC)
    for at in range(0, DIM_V, 16):
        e = at + tl.arange(0, 16)
        x = load_rows(x_ptr, row, live, e, e < DIM_V, x_s, ACC)
        y = load_rows(y_ptr, row, live, e, e < DIM_V, y_s, ACC)
        total += tl.sum(x * y, 1)
    return total


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_query_gradients(
    q_ptr, k_ptr, beta_ptr, g_ptr, number_ptr, do_ptr, written_ptr, states_ptr, dq_ptr, pairs_ptr, running_ptr,
    first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h, w_b, w_s, w_h, g_b, g_s, g_h,
    do_b, do_s, do_h, DELTA: tl.constexpr, DOCUMENTS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of out = (lambda q) S + A V, for one chunk of a key head and its ``group`` value heads: dq [b, tokens, key heads,
    DIM]; what dk has from A, as rows and columns [b, key heads, chunks, CHUNK, CHUNK] for queries as they are; and the
    gradient of the running sum of g [b, tokens, heads]. Contiguous."""
    program = tl.program_id(0) + first_program
    key_heads = heads // group
    chunk, key_head = program % chunks, (program // chunks % key_heads).to(tl.int64)
    batch = (program // chunks // key_heads).to(tl.int64)
    lane, d, start = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), chunk * CHUNK
    live, inside_d, first = start + lane < tokens, d < DIM, start.to(tl.int64)
    FINE: tl.constexpr = DOT == ACC and PRECISION == "ieee"
    k_ptr += batch * k_b + key_head * k_h + first * k_s
    q_ptr += batch * q_b + key_head * q_h + first * q_s
    k = load_rows(k_ptr, lane, live, d, inside_d, k_s, DOT)
    q = load_rows(q_ptr, lane, live, d, inside_d, q_s, DOT)
    k_unit, q_unit = one_over_norm(k, live, DELTA, EPS, ACC), one_over_norm(q, live, DELTA, EPS, ACC)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * q_unit[:, None] * k_unit[None, :]
    d_pairs, dq = tl.zeros([CHUNK, CHUNK], ACC), tl.zeros([CHUNK, BLOCK_D], ACC)
    for member in range(group):
        head = key_head * group + member
        running, fine, reach, _, _, number = chunk_decay(
            g_ptr + batch * g_b + head * g_h, g_s, number_ptr + batch * tokens, start, tokens, DOCUMENTS, CHUNK, ACC,
            FINE,
        )
        row = (batch * tokens + first) * heads + head
        by_state, by_token = over_values(
            do_ptr + batch * do_b + head * do_h + first * do_s, do_s,
            states_ptr + ((batch * heads + head) * chunks + chunk) * DIM * DIM_V, written_ptr + row * DIM_V,
            heads * DIM_V, lane, live, d, inside_d, True, ACC, DOT, PRECISION, DIM_V, BLOCK_D, BLOCK_V, CHUNK,
        )  # fmt: skip
        by_state *= (reach * SCALE)[:, None]
        dq += by_state
        by_token *= pair_decay(running, fine, number, DOCUMENTS, CHUNK, FINE) * SCALE
        d_pairs += by_token
        by_token *= products
        again = load_rows(q_ptr, lane, live, d, inside_d, q_s, ACC)  # kept, it would fill registers all along
        d_running = tl.sum(by_state * again, 1) * q_unit + tl.sum(by_token, 1) - tl.sum(by_token, 0)
        tl.store(running_ptr + row + lane * heads, d_running, mask=live)
    k = load_rows(k_ptr, lane, live, d, inside_d, k_s, DOT)
    dq = tl.dot((d_pairs * k_unit[None, :]).to(DOT), k, dq, input_precision=PRECISION, out_dtype=ACC)
    block = (batch * key_heads + key_head) * chunks + chunk
    pairs_at = pairs_ptr + block * CHUNK * CHUNK + lane[:, None] * CHUNK + lane[None, :]
    tl.store(pairs_at, narrow(d_pairs * q_unit[:, None], pairs_ptr.dtype.element_ty))
    if DELTA:
        unit = load_rows(q_ptr, lane, live, d, inside_d, q_s, ACC) * q_unit[:, None]
        dq = (dq - unit * tl.sum(dq * unit, 1)[:, None]) * q_unit[:, None]
    row = (batch * tokens + first) * key_heads + key_head
    store_tile(dq_ptr + row * DIM, lane, live, d, inside_d, key_heads * DIM, dq)


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_key_gradients(
    q_ptr, k_ptr, beta_ptr, g_ptr, number_ptr, v_ptr, written_ptr, change_ptr, states_ptr, after_ptr, pairs_ptr,
    running_ptr, dk_ptr, dg_ptr, dbeta_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h,
    w_b, w_s, w_h, g_b, g_s, g_h, v_b, v_s, v_h, DELTA: tl.constexpr, DOCUMENTS: tl.constexpr, EPS: tl.constexpr,
    SCALE: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rest: dk [b, tokens, key heads, DIM], dg and dbeta [b, tokens, heads], contiguous."""
    program = tl.program_id(0) + first_program
    key_heads = heads // group
    chunk, key_head = program % chunks, (program // chunks % key_heads).to(tl.int64)
    batch = (program // chunks // key_heads).to(tl.int64)
    lane, d, start = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), chunk * CHUNK
    live, inside_d, first = start + lane < tokens, d < DIM, start.to(tl.int64)
    FINE: tl.constexpr = DOT == ACC and PRECISION == "ieee"
    k_ptr += batch * k_b + key_head * k_h + first * k_s
    q_ptr += batch * q_b + key_head * q_h + first * q_s
    k = load_rows(k_ptr, lane, live, d, inside_d, k_s, DOT)
    k_unit = one_over_norm(k, live, DELTA, EPS, ACC)
    dk = tl.zeros([CHUNK, BLOCK_D], ACC)
    for member in range(group):
        head = key_head * group + member
        running, fine, reach, rest, carried, number = chunk_decay(
            g_ptr + batch * g_b + head * g_h, g_s, number_ptr + batch * tokens, start, tokens, DOCUMENTS, CHUNK, ACC,
            FINE,
        )
        beta = widen(
            tl.load(beta_ptr + batch * w_b + head * w_h + (start + lane) * w_s, mask=live, other=0.0), ACC
        )
        row, row_s = (batch * tokens + first) * heads + head, heads * DIM_V
        state = ((batch * heads + head) * chunks + chunk) * DIM * DIM_V
        d_beta = tl.zeros([CHUNK], ACC)
        d_running = tl.load(running_ptr + row + lane * heads, mask=live, other=0.0)
        if DELTA:  # (1 + M) V = beta (v - (lambda k) S)
            by_state, by_token = over_values(
                change_ptr + row * DIM_V, row_s, states_ptr + state, written_ptr + row * DIM_V, row_s, lane, live, d,
                inside_d, True, ACC, DOT, PRECISION, DIM_V, BLOCK_D, BLOCK_V, CHUNK,
            )  # fmt: skip
            by_state *= reach[:, None]
            dk -= by_state * beta[:, None]
            again = load_rows(k_ptr, lane, live, d, inside_d, k_s, ACC)
            d_beta -= tl.sum(by_state * again, 1) * k_unit
            d_running += beta * d_beta
            decay = pair_decay(running, fine, number, DOCUMENTS, CHUNK, FINE)
            by_token *= tl.where(lane[:, None] > lane[None, :], -decay, 0.0)
            k = load_rows(k_ptr, lane, live, d, inside_d, k_s, DOT)  # again: kept, it would fill registers
            d_pairs = by_token * beta[:, None]
            d_pairs = ((d_pairs + tl.trans(d_pairs)) * k_unit[None, :]).to(DOT)
            dk = tl.dot(d_pairs, k, dk, input_precision=PRECISION, out_dtype=ACC)
            keys = tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
            by_token *= keys * k_unit[:, None] * k_unit[None, :]
            d_beta += tl.sum(by_token, 1)
            by_token *= beta[:, None]
            d_running += tl.sum(by_token, 1) - tl.sum(by_token, 0)
        v_at = v_ptr + batch * v_b + head * v_h + first * v_s
        d_beta += row_products(change_ptr + row * DIM_V, row_s, v_at, v_s, lane, live, ACC, DIM_V, CHUNK)
        tl.store(dbeta_ptr + row + lane * heads, narrow(d_beta, dbeta_ptr.dtype.element_ty), mask=live)
        # S <- lambda_C S + (kappa k)' V
        by_state, _ = over_values(
            written_ptr + row * DIM_V, row_s, after_ptr + state, written_ptr, row_s, lane, live, d, inside_d, False,
            ACC, DOT, PRECISION, DIM_V, BLOCK_D, BLOCK_V, CHUNK,
        )  # fmt: skip
        by_state *= rest[:, None]
        dk += by_state
        again = load_rows(k_ptr, lane, live, d, inside_d, k_s, ACC)
        d_rest = tl.sum(by_state * again, 1) * k_unit
        through = row_products(
            states_ptr + state, DIM_V, after_ptr + state, DIM_V, d, inside_d, ACC, DIM_V, BLOCK_D
        )
        d_running += tl.where(lane == CHUNK - 1, tl.sum(d_rest, 0) + tl.sum(through, 0) * carried, 0.0) - d_rest
        d_g = tl.cumsum(d_running, 0, reverse=True)
        tl.store(dg_ptr + row + lane * heads, narrow(d_g, dg_ptr.dtype.element_ty), mask=live)
    block = (batch * key_heads + key_head) * chunks + chunk
    pairs_at = pairs_ptr + block * CHUNK * CHUNK + lane[:, None] * CHUNK + lane[None, :]
    q = load_rows(q_ptr, lane, live, d, inside_d, q_s, DOT)
    dk = tl.dot(tl.trans(widen(tl.load(pairs_at), DOT)), q, dk, input_precision=PRECISION, out_dtype=ACC)
    if DELTA:
        unit = load_rows(k_ptr, lane, live, d, inside_d, k_s, ACC) * k_unit[:, None]
        dk = (dk - unit * tl.sum(dk * unit, 1)[:, None]) * k_unit[:, None]
    row = (batch * tokens + first) * key_heads + key_head
    store_tile(dk_ptr + row * DIM, lane, live, d, inside_d, key_heads * DIM, dk)
