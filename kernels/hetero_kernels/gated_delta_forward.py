# mypy: allow-untyped-defs, allow-incomplete-defs
"""Forward kernels of the gated delta rule, and of the state-space rule, which is the same without DELTA: what the
tokens of a chunk are to each other, then the states one after the other. Formulas and names: ``delta_chunks.py``."""

import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, widen


@triton.jit
def load_rows(ptr, lane, live, col, inside, stride, TYPE: tl.constexpr):
    """[tokens, features] as operands of products; zeros outside."""
    at = lane[:, None] * stride + col[None, :]
    return widen(tl.load(ptr + at, mask=live[:, None] & inside[None, :], other=0.0), TYPE)


@triton.jit
def one_over_norm(x, live, DELTA: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr):
    """1 / sqrt(sum of x^2 + eps) of each row, without DELTA 1; 0 of those that are not there."""
    one_over = tl.full(live.shape, 1.0, ACC)
    if DELTA:
        wide = x.to(ACC)
        one_over = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + EPS)
    return tl.where(live, one_over, 0.0)


@triton.jit
def chunk_decay(
    g_ptr, g_s, number_ptr, start, tokens, DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, ACC: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """(running sum of g, what it lacks, lambda, kappa, lambda of the whole chunk, number of each token's document).

    With FINE, where products are exact to fp32, the sum is exact in multiples of 2^-10, and what it lacks, below 2^-4,
    is summed by itself: where a token forgets nearly all, differences of rounded sums are off by up to 5e-4 among the
    tokens after it. What is below the exponential of LEAST is 0.
    """
    LEAST: tl.constexpr = -1024.0 if ACC == tl.float64 else -128.0  # noqa: SIM300
    lane = tl.arange(0, CHUNK)
    g = tl.load(g_ptr + (start + lane) * g_s, mask=start + lane < tokens, other=0.0).to(ACC)
    g = tl.where(g < LEAST, LEAST, g)
    coarse = tl.floor(g * 1024.0) * 0.0009765625 if FINE else g
    running = tl.cumsum(coarse, 0)
    total = tl.sum(tl.where(lane == CHUNK - 1, running, 0.0), 0)  # of the same roundings
    reach, rest, carried, fine, number = tl.exp(running), tl.exp(total - running), tl.exp(total), running, lane
    if FINE:
        fine = tl.cumsum(g - coarse, 0)
        total_fine = tl.sum(tl.where(lane == CHUNK - 1, fine, 0.0), 0)
        reach, carried = tl.exp(running + fine), tl.exp(total + total_fine)
        rest = tl.exp((total - running) + (total_fine - fine))
    if DOCUMENTS:
        number = tl.load(number_ptr + tl.minimum(start + lane, tokens - 1))
        before = tl.load(number_ptr + tl.maximum(start - 1, 0))
        last = tl.load(number_ptr + tl.minimum(start + CHUNK, tokens) - 1)
        reach = tl.where(number == before, reach, 0.0)
        rest = tl.where(number == last, rest, 0.0)
        carried = tl.where(before == last, carried, 0.0)
    return running, fine, reach, rest, carried, number


@triton.jit
def pair_decay(running, fine, number, DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, FINE: tl.constexpr):
    """D [CHUNK, CHUNK]."""
    lane = tl.arange(0, CHUNK)
    seen = lane[:, None] >= lane[None, :]
    if DOCUMENTS:
        seen = seen & (number[:, None] == number[None, :])
    between = running[:, None] - running[None, :]
    if FINE:
        between += fine[:, None] - fine[None, :]
    return tl.exp(tl.where(seen, between, float("-inf")))


@triton.jit
def unit_lower_inverse(lower, CHUNK: tl.constexpr, LEVELS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)^-1, of blocks that are twice as large each time: that of [A 0; N B] is [A' 0; -B' N A' B'].

    A series of powers of ``lower`` would need as many products, but cancels where keys are alike.
    """
    lane = tl.arange(0, CHUNK)
    row, col = lane[:, None], lane[None, :]
    inverse = (row == col).to(ACC) - tl.where((row // 2 == col // 2) & (row > col), lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        joined = (row // (2 << level) == col // (2 << level)) & (row // (1 << level) > col // (1 << level))
        part = tl.dot(inverse, tl.where(joined, lower, 0.0), input_precision=PRECISION, out_dtype=ACC)
        inverse -= tl.dot(part, inverse, input_precision=PRECISION, out_dtype=ACC)
    return inverse


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_pairs(
    q_ptr, k_ptr, beta_ptr, g_ptr, number_ptr, inverse_ptr, inside_ptr, rates_ptr, first_program, heads, group, tokens,
    chunks, q_b, q_s, q_h, k_b, k_s, k_h, w_b, w_s, w_h, g_b, g_s, g_h,
    DELTA: tl.constexpr, DOCUMENTS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """(1 + M)^-1, with DELTA, and A of each chunk, [b, heads, chunks, CHUNK, CHUNK], and what rows of products with
    states are multiplied with, [b, heads, chunks, 4, CHUNK]: lambda / |k|, kappa / |k|, lambda scale / |q|, and
    lambda_C."""
    program = tl.program_id(0) + first_program
    chunk, head = program % chunks, (program // chunks % heads).to(tl.int64)
    batch = (program // chunks // heads).to(tl.int64)
    lane, d, start = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), chunk * CHUNK
    live, inside_d, first = start + lane < tokens, d < DIM, start.to(tl.int64)
    FINE: tl.constexpr = DOT == ACC and PRECISION == "ieee"
    k_ptr += batch * k_b + head // group * k_h + first * k_s
    q_ptr += batch * q_b + head // group * q_h + first * q_s
    k = load_rows(k_ptr, lane, live, d, inside_d, k_s, DOT)
    q = load_rows(q_ptr, lane, live, d, inside_d, q_s, DOT)
    k_unit, q_unit = one_over_norm(k, live, DELTA, EPS, ACC), one_over_norm(q, live, DELTA, EPS, ACC) * SCALE
    running, fine, reach, rest, carried, number = chunk_decay(
        g_ptr + batch * g_b + head * g_h, g_s, number_ptr + batch * tokens, start, tokens, DOCUMENTS, CHUNK, ACC, FINE
    )
    decay = pair_decay(running, fine, number, DOCUMENTS, CHUNK, FINE) * k_unit[None, :]
    block = (batch * heads + head) * chunks + chunk
    rates_at = rates_ptr + block * 4 * CHUNK + lane
    tl.store(rates_at, reach * k_unit)
    tl.store(rates_at + CHUNK, rest * k_unit)
    tl.store(rates_at + 2 * CHUNK, reach * q_unit)
    tl.store(rates_at + 3 * CHUNK, tl.zeros([CHUNK], ACC) + carried)
    at = block * CHUNK * CHUNK + lane[:, None] * CHUNK + lane[None, :]
    pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
    tl.store(inside_ptr + at, narrow(pairs * decay * q_unit[:, None], inside_ptr.dtype.element_ty))
    if DELTA:
        beta = widen(
            tl.load(beta_ptr + batch * w_b + head * w_h + (start + lane) * w_s, mask=live, other=0.0), ACC
        )
        keys = tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
        lower = tl.where(lane[:, None] > lane[None, :], keys * decay * (beta * k_unit)[:, None], 0.0)
        inverse = unit_lower_inverse(lower, CHUNK, LEVELS, ACC, EXACT)
        tl.store(inverse_ptr + at, narrow(inverse, inverse_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_states(
    q_ptr, k_ptr, left_ptr, v_ptr, beta_ptr, inverse_ptr, inside_ptr, rates_ptr, state_ptr, out_ptr, last_ptr,
    states_ptr, written_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h, w_b, w_s, w_h,
    v_b, v_s, v_h, OUT: tl.constexpr, STATE: tl.constexpr, DELTA: tl.constexpr, FEATURES: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk after the other, BLOCK_V features of one head's values.

    OUT: out [b, tokens, heads, DIM_V] and the last state [b, heads, DIM, DIM_V]; else, for backward, the state before
    each chunk [b, heads, chunks, DIM, DIM_V] and what is written [b, tokens, heads, DIM_V]. All contiguous.

    FEATURES: q, k and ``left`` are lambda q, lambda k and kappa k, and the rates lambda_C [b, heads, chunks, DIM].
    """
    program = tl.program_id(0) + first_program
    across = tl.cdiv(DIM_V, BLOCK_V)
    head = (program // across % heads).to(tl.int64)
    batch = (program // across // heads).to(tl.int64)
    lane, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), program % across * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_d, inside_e = d < DIM, e < DIM_V
    q_ptr += batch * q_b + head // group * q_h
    k_ptr += batch * k_b + head // group * k_h
    left_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head * v_h
    beta_ptr += batch * w_b + head * w_h
    line = batch * heads + head
    of_state = d[:, None] * DIM_V + e[None, :]
    state_mask = inside_d[:, None] & inside_e[None, :]
    of_chunk = lane[:, None] * CHUNK + lane[None, :]
    state = tl.zeros([BLOCK_D, BLOCK_V], ACC)
    if STATE:
        state += tl.load(state_ptr + line * DIM * DIM_V + of_state, mask=state_mask, other=0.0).to(ACC)
    for chunk in range(chunks):
        start, block = chunk * CHUNK, line * chunks + chunk
        first, live = tl.full([], 0, tl.int64) + start, start + lane < tokens
        k = load_rows(k_ptr + first * k_s, lane, live, d, inside_d, k_s, DOT)
        v = load_rows(v_ptr + first * v_s, lane, live, e, inside_e, v_s, ACC)
        beta = widen(tl.load(beta_ptr + (start + lane) * w_s, mask=live, other=0.0), ACC)
        rates = rates_ptr + block * 4 * CHUNK + lane
        rounded = state.to(DOT)
        if DELTA:
            inverse = widen(tl.load(inverse_ptr + block * CHUNK * CHUNK + of_chunk), DOT)
            read = tl.dot(k, rounded, input_precision=PRECISION, out_dtype=ACC)
            read = read if FEATURES else read * tl.load(rates)[:, None]
            change = (v - read) * beta[:, None]
            written = tl.dot(inverse, change.to(DOT), input_precision=PRECISION, out_dtype=ACC)
        else:
            written = v * beta[:, None]
        row = (batch * tokens + first + lane) * heads + head
        of_tokens, token_mask = row[:, None] * DIM_V + e[None, :], live[:, None] & inside_e[None, :]
        if OUT:
            q = load_rows(q_ptr + first * q_s, lane, live, d, inside_d, q_s, DOT)
            inside = widen(tl.load(inside_ptr + block * CHUNK * CHUNK + of_chunk), DOT)
            out = tl.dot(q, rounded, input_precision=PRECISION, out_dtype=ACC)
            out = out if FEATURES else out * tl.load(rates + 2 * CHUNK)[:, None]
            out = tl.dot(inside, written.to(DOT), out, input_precision=PRECISION, out_dtype=ACC)
            tl.store(out_ptr + of_tokens, narrow(out, out_ptr.dtype.element_ty), mask=token_mask)
        else:
            here = states_ptr + block * DIM * DIM_V + of_state
            tl.store(here, narrow(state, states_ptr.dtype.element_ty), mask=state_mask)
            tl.store(written_ptr + of_tokens, narrow(written, written_ptr.dtype.element_ty), mask=token_mask)
        if FEATURES:
            k = load_rows(left_ptr + first * k_s, lane, live, d, inside_d, k_s, DOT)
            state *= tl.load(rates_ptr + block * DIM + d, mask=inside_d, other=0.0)[:, None]
        else:
            written *= tl.load(rates + CHUNK)[:, None]
            state *= tl.load(rates_ptr + block * 4 * CHUNK + 3 * CHUNK)
        state = tl.dot(tl.trans(k), written.to(DOT), state, input_precision=PRECISION, out_dtype=ACC)
    if OUT:
        tl.store(last_ptr + line * DIM * DIM_V + of_state, narrow(state, last_ptr.dtype.element_ty), mask=state_mask)
