# mypy: allow-untyped-defs, allow-incomplete-defs
"""Kernels of the gated delta rule where every feature of a key decays by itself (Kimi Delta Attention): pairs of tokens
and their gradients. Formulas and names are those of ``delta_chunks.py``, with g, lambda and kappa per feature, and

    A_ij = sum over features of q_i k_j exp(G_i - G_j)     M_ij = beta_i times the same of k_i and k_j

exp(G_i - G_j) is not lambda_i / lambda_j, which overflows: for rows of the second half of a block of tokens and columns
of its first half it is exp(G_i - G_m) exp(G_m - G_j), where m is the last token of the first half, and neither is above
1. Products of such halves, of blocks of 2, 4, 8 .. tokens, are all pairs of a chunk.
"""

import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, store_tile, widen
from hetero_kernels.gated_delta_backward import row_products
from hetero_kernels.gated_delta_forward import load_rows, unit_lower_inverse


@triton.jit
def _document_masks(number_ptr, start, tokens, DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr):
    """(number of each token's document, entered before this chunk, goes on after it, one goes through)."""
    lane = tl.arange(0, CHUNK)
    number, entered, leaves, through = lane, lane >= 0, lane >= 0, start >= 0
    if DOCUMENTS:
        number = tl.load(number_ptr + tl.minimum(start + lane, tokens - 1))
        before = tl.load(number_ptr + tl.maximum(start - 1, 0))
        last = tl.load(number_ptr + tl.minimum(start + CHUNK, tokens) - 1)
        entered, leaves, through = number == before, number == last, before == last
    return number, entered, leaves, through


@triton.jit
def _same_document(number, DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK]: a row's token sees a column's."""
    lane = tl.arange(0, CHUNK)
    seen = lane[:, None] >= lane[None, :]
    if DOCUMENTS:
        seen = seen & (number[:, None] == number[None, :])
    return seen


@triton.jit
def _one_over_norm(
    x_ptr, stride, lane, live, EPS: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, BLOCK_F: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(sum of x^2 + eps) of each row, a few features at a time; 0 of those that are not there."""
    total = tl.zeros([CHUNK], ACC)
    for at in range(0, DIM, BLOCK_F):
        f = at + tl.arange(0, BLOCK_F)
        x = load_rows(x_ptr, lane, live, f, f < DIM, stride, ACC)
        total += tl.sum(x * x, 1)
    return tl.where(live, 1.0 / tl.sqrt(total + EPS), 0.0)


@triton.jit
def _decays(g_ptr, g_s, lane, tokens_left, f, inside, ACC: tl.constexpr, CHUNK: tl.constexpr):
    """g [CHUNK, features], that of the token after each (of the chunk's last one 0), lambda, kappa, lambda_C."""
    g = load_rows(g_ptr, lane, lane < tokens_left, f, inside, g_s, ACC)
    later = load_rows(g_ptr, lane + 1, (lane < CHUNK - 1) & (lane + 1 < tokens_left), f, inside, g_s, ACC)
    reach, rest = tl.exp(tl.cumsum(g, 0)), tl.exp(tl.cumsum(later, 0, reverse=True))
    return g, later, reach, rest, tl.exp(tl.sum(g, 0))


@triton.jit
def _half_decays(g, later, HALF: tl.constexpr, CHUNK: tl.constexpr, BLOCK_F: tl.constexpr):
    """Of blocks of 2 HALF tokens: how rows of second halves, and columns of first ones, decay to the last token of the
    first half; 0 of other rows and columns. [CHUNK, BLOCK_F] both."""
    lane = tl.arange(0, CHUNK)
    second = ((lane // HALF) % 2 == 1)[:, None]
    up_to, after = g, tl.zeros_like(g)
    if HALF > 1:
        up_to = tl.cumsum(tl.reshape(g, [CHUNK // HALF, HALF, BLOCK_F]), 1)
        within = tl.where((lane % HALF == HALF - 1)[:, None], 0.0, later)
        after = tl.cumsum(tl.reshape(within, [CHUNK // HALF, HALF, BLOCK_F]), 1, reverse=True)
        up_to, after = tl.reshape(up_to, [CHUNK, BLOCK_F]), tl.reshape(after, [CHUNK, BLOCK_F])
    return tl.where(second, tl.exp(up_to), 0.0), tl.where(second, 0.0, tl.exp(after))


@triton.jit
def _of_halves(x, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK], 0 but for rows of second halves with columns of the first halves of the same blocks."""
    lane = tl.arange(0, CHUNK)
    row, col = lane[:, None], lane[None, :]
    return tl.where((row // (2 * HALF) == col // (2 * HALF)) & (row // HALF > col // HALF), x, 0.0)


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_feature_pairs(
    q_ptr, k_ptr, beta_ptr, g_ptr, number_ptr, inverse_ptr, inside_ptr, carried_ptr, reach_q_ptr, reach_k_ptr,
    rest_k_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h, w_b, w_s, w_h, g_b, g_s, g_h,
    DOCUMENTS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, DIM: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """(1 + M)^-1 and A of each chunk, [b, heads, chunks, CHUNK, CHUNK]; lambda_C [b, heads, chunks, DIM]; and lambda q,
    lambda k and kappa k of normalised q and k, [b, tokens, heads, DIM]. Contiguous."""
    program = tl.program_id(0) + first_program
    chunk, head = program % chunks, (program // chunks % heads).to(tl.int64)
    batch = (program // chunks // heads).to(tl.int64)
    lane, start = tl.arange(0, CHUNK), chunk * CHUNK
    live, first = start + lane < tokens, start.to(tl.int64)
    k_ptr += batch * k_b + head // group * k_h + first * k_s
    q_ptr += batch * q_b + head // group * q_h + first * q_s
    g_ptr += batch * g_b + head * g_h + first * g_s
    block, rows_at = (batch * heads + head) * chunks + chunk, ((batch * tokens + first) * heads + head) * DIM
    number, entered, leaves, through = _document_masks(number_ptr + batch * tokens, start, tokens, DOCUMENTS, CHUNK)
    k_unit = _one_over_norm(k_ptr, k_s, lane, live, EPS, ACC, DIM, BLOCK_F, CHUNK)
    q_unit = _one_over_norm(q_ptr, q_s, lane, live, EPS, ACC, DIM, BLOCK_F, CHUNK) * SCALE
    inside, keys, itself = tl.zeros([CHUNK, CHUNK], ACC), tl.zeros([CHUNK, CHUNK], ACC), tl.zeros([CHUNK], ACC)
    for at in range(0, DIM, BLOCK_F):
        f = at + tl.arange(0, BLOCK_F)
        inside_f = f < DIM
        g, later, reach, rest, carried = _decays(g_ptr, g_s, lane, tokens - start, f, inside_f, ACC, CHUNK)
        q = load_rows(q_ptr, lane, live, f, inside_f, q_s, ACC) * q_unit[:, None]
        k = load_rows(k_ptr, lane, live, f, inside_f, k_s, ACC) * k_unit[:, None]
        reach, rest = tl.where(entered[:, None], reach, 0.0), tl.where(leaves[:, None], rest, 0.0)
        carried = tl.where(through, carried, 0.0)
        store_tile(reach_q_ptr + rows_at, lane, live, f, inside_f, heads * DIM, q * reach)
        store_tile(reach_k_ptr + rows_at, lane, live, f, inside_f, heads * DIM, k * reach)
        store_tile(rest_k_ptr + rows_at, lane, live, f, inside_f, heads * DIM, k * rest)
        tl.store(carried_ptr + block * DIM + f, carried, mask=inside_f)
        itself += tl.sum(q * k, 1)
        for level in tl.static_range(0, LEVELS):
            rows, cols = _half_decays(g, later, 1 << level, CHUNK, BLOCK_F)
            left = tl.trans((k * cols).to(DOT))
            part = tl.dot((q * rows).to(DOT), left, input_precision=PRECISION, out_dtype=ACC)
            inside += _of_halves(part, 1 << level, CHUNK)
            part = tl.dot((k * rows).to(DOT), left, input_precision=PRECISION, out_dtype=ACC)
            keys += _of_halves(part, 1 << level, CHUNK)
    seen = _same_document(number, DOCUMENTS, CHUNK)
    at = block * CHUNK * CHUNK + lane[:, None] * CHUNK + lane[None, :]
    inside = tl.where(seen, inside + tl.where(lane[:, None] == lane[None, :], itself[:, None], 0.0), 0.0)
    tl.store(inside_ptr + at, narrow(inside, inside_ptr.dtype.element_ty))
    beta = widen(tl.load(beta_ptr + batch * w_b + head * w_h + (start + lane) * w_s, mask=live, other=0.0), ACC)
    inverse = unit_lower_inverse(tl.where(seen, keys * beta[:, None], 0.0), CHUNK, LEVELS, ACC, EXACT)
    tl.store(inverse_ptr + at, narrow(inverse, inverse_ptr.dtype.element_ty))


@triton.jit
def _pair_gradients(
    grad, x, y, g, later, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_F: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Of x and y [CHUNK, BLOCK_F], but for what a token is to itself, from that of the sums of x_i y_j exp(G_i - G_j),
    [CHUNK, CHUNK]."""
    d_x, d_y = tl.zeros([CHUNK, BLOCK_F], ACC), tl.zeros([CHUNK, BLOCK_F], ACC)
    for level in tl.static_range(0, LEVELS):
        rows, cols = _half_decays(g, later, 1 << level, CHUNK, BLOCK_F)
        part = _of_halves(grad, 1 << level, CHUNK).to(DOT)
        d_x += tl.dot(part, (y * cols).to(DOT), input_precision=PRECISION, out_dtype=ACC) * rows
        d_y += tl.dot(tl.trans(part), (x * rows).to(DOT), input_precision=PRECISION, out_dtype=ACC) * cols
    return d_x, d_y


@triton.jit
def _with_state(
    x_ptr, x_s, state_ptr, lane, live, f, inside_f, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """x [CHUNK, DIM_V] with some rows of a state [DIM, DIM_V] over the features of values: [CHUNK, BLOCK_F]."""
    total = tl.zeros([CHUNK, BLOCK_F], ACC)
    for at in range(0, DIM_V, BLOCK_V):
        e = at + tl.arange(0, BLOCK_V)
        x = load_rows(x_ptr, lane, live, e, e < DIM_V, x_s, DOT)
        state = load_rows(state_ptr, f, inside_f, e, e < DIM_V, DIM_V, DOT)
        total = tl.dot(x, tl.trans(state), total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def _with_states(
    do_ptr, do_s, change_ptr, written_ptr, row_s, states_ptr, after_ptr, lane, live, f, inside_f, ACC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DIM_V: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The gradient of out and ``change`` with the state before the chunk; what is written with the gradient after."""
    asked = _with_state(
        do_ptr, do_s, states_ptr, lane, live, f, inside_f, ACC, DOT, PRECISION, DIM_V, BLOCK_F, BLOCK_V, CHUNK
    )
    read = _with_state(
        change_ptr, row_s, states_ptr, lane, live, f, inside_f, ACC, DOT, PRECISION, DIM_V, BLOCK_F, BLOCK_V, CHUNK
    )
    left = _with_state(
        written_ptr, row_s, after_ptr, lane, live, f, inside_f, ACC, DOT, PRECISION, DIM_V, BLOCK_F, BLOCK_V, CHUNK
    )
    return asked, read, left


@triton.jit
def _with_tokens(
    x_ptr, x_s, y_ptr, y_s, lane, live, seen, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """x with y, [CHUNK, DIM_V] both, over the features of values, where ``seen``: [CHUNK, CHUNK]."""
    total = tl.zeros([CHUNK, CHUNK], ACC)
    for at in range(0, DIM_V, BLOCK_V):
        e = at + tl.arange(0, BLOCK_V)
        x = load_rows(x_ptr, lane, live, e, e < DIM_V, x_s, DOT)
        y = load_rows(y_ptr, lane, live, e, e < DIM_V, y_s, DOT)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION, out_dtype=ACC)
    return tl.where(seen, total, 0.0)


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_feature_gradients(
    q_ptr, k_ptr, beta_ptr, g_ptr, number_ptr, v_ptr, do_ptr, written_ptr, change_ptr, states_ptr, after_ptr, dq_ptr,
    dk_ptr, dg_ptr, dbeta_ptr, first_program, heads, group, tokens, chunks, q_b, q_s, q_h, k_b, k_s, k_h, w_b, w_s, w_h,
    g_b, g_s, g_h, v_b, v_s, v_h, do_b, do_s, do_h, DOCUMENTS: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """For one chunk of one value head: gradients of normalised q and k, for this head alone, and of g, each
    [b, tokens, heads, DIM]; of beta [b, tokens, heads]. Contiguous."""
    program = tl.program_id(0) + first_program
    chunk, head = program % chunks, (program // chunks % heads).to(tl.int64)
    batch = (program // chunks // heads).to(tl.int64)
    lane, start = tl.arange(0, CHUNK), chunk * CHUNK
    live, first = start + lane < tokens, start.to(tl.int64)
    k_ptr += batch * k_b + head // group * k_h + first * k_s
    q_ptr += batch * q_b + head // group * q_h + first * q_s
    g_ptr += batch * g_b + head * g_h + first * g_s
    do_ptr += batch * do_b + head * do_h + first * do_s
    row, row_s = (batch * tokens + first) * heads + head, heads * DIM_V
    written_ptr += row * DIM_V
    change_ptr += row * DIM_V
    state = ((batch * heads + head) * chunks + chunk) * DIM * DIM_V
    number, entered, leaves, through = _document_masks(number_ptr + batch * tokens, start, tokens, DOCUMENTS, CHUNK)
    seen = _same_document(number, DOCUMENTS, CHUNK)
    d_inside = _with_tokens(
        do_ptr, do_s, written_ptr, row_s, lane, live, seen, ACC, DOT, PRECISION, DIM_V, BLOCK_V, CHUNK
    )
    d_lower = -_with_tokens(  # of M without beta; its diagonal is not read
        change_ptr, row_s, written_ptr, row_s, lane, live, seen, ACC, DOT, PRECISION, DIM_V, BLOCK_V, CHUNK
    )
    itself = tl.sum(tl.where(lane[:, None] == lane[None, :], d_inside, 0.0), 1)
    beta = widen(tl.load(beta_ptr + batch * w_b + head * w_h + (start + lane) * w_s, mask=live, other=0.0), ACC)
    v_at = v_ptr + batch * v_b + head * v_h + first * v_s
    d_beta = row_products(change_ptr, row_s, v_at, v_s, lane, live, ACC, DIM_V, CHUNK)
    k_unit = _one_over_norm(k_ptr, k_s, lane, live, EPS, ACC, DIM, BLOCK_F, CHUNK)
    q_unit = _one_over_norm(q_ptr, q_s, lane, live, EPS, ACC, DIM, BLOCK_F, CHUNK) * SCALE
    for at in range(0, DIM, BLOCK_F):
        f = at + tl.arange(0, BLOCK_F)
        inside_f = f < DIM
        g, later, reach, rest, carried = _decays(g_ptr, g_s, lane, tokens - start, f, inside_f, ACC, CHUNK)
        q = load_rows(q_ptr, lane, live, f, inside_f, q_s, ACC) * q_unit[:, None]
        k = load_rows(k_ptr, lane, live, f, inside_f, k_s, ACC) * k_unit[:, None]
        # A and M; running: of G
        d_q, d_k = _pair_gradients(d_inside, q, k, g, later, ACC, DOT, PRECISION, CHUNK, BLOCK_F, LEVELS)
        running = d_q * q - d_k * k
        d_q += itself[:, None] * k
        d_k += itself[:, None] * q
        d_x, d_y = _pair_gradients(
            d_lower, k * beta[:, None], k, g, later, ACC, DOT, PRECISION, CHUNK, BLOCK_F, LEVELS
        )
        d_beta += tl.sum(d_x * k, 1)
        d_x *= beta[:, None]
        running += (d_x - d_y) * k
        d_k += d_x + d_y
        asked, part, left = _with_states(
            do_ptr, do_s, change_ptr, written_ptr, row_s, states_ptr + state, after_ptr + state, lane, live, f,
            inside_f, ACC, DOT, PRECISION, DIM_V, BLOCK_F, BLOCK_V, CHUNK,
        )  # fmt: skip
        # out = (lambda q) S + A V
        reach = tl.where(entered[:, None], reach, 0.0)
        asked *= reach
        d_q += asked
        running += asked * q
        # (1 + M) V = beta (v - (lambda k) S)
        part *= reach
        d_beta -= tl.sum(part * k, 1)
        part *= -beta[:, None]
        d_k += part
        running += part * k
        # S <- lambda_C S + (kappa k)' V
        left *= tl.where(leaves[:, None], rest, 0.0)
        d_k += left
        left *= k
        ends = row_products(
            states_ptr + state, DIM_V, after_ptr + state, DIM_V, f, inside_f, ACC, DIM_V, BLOCK_F
        ) * tl.where(through, carried, 0.0) + tl.sum(left, 0)
        running += tl.where((lane == CHUNK - 1)[:, None], ends[None, :], 0.0) - left
        at_row = row * DIM
        store_tile(dg_ptr + at_row, lane, live, f, inside_f, heads * DIM, tl.cumsum(running, 0, reverse=True))
        store_tile(dq_ptr + at_row, lane, live, f, inside_f, heads * DIM, d_q * SCALE)
        store_tile(dk_ptr + at_row, lane, live, f, inside_f, heads * DIM, d_k)
    tl.store(dbeta_ptr + row + lane * heads, narrow(d_beta, dbeta_ptr.dtype.element_ty), mask=live)


@triton.jit
def _unit_gradient(
    d_ptr, x_ptr, x_s, out_ptr, group, heads, lane, live, EPS: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of x, from those of its normalised values for each of the value heads that share it."""
    d = tl.arange(0, BLOCK_D)
    inside_d = d < DIM
    total = tl.zeros([CHUNK, BLOCK_D], ACC)
    for member in range(group):
        total += load_rows(d_ptr + member * DIM, lane, live, d, inside_d, heads * DIM, ACC)
    unit = load_rows(x_ptr, lane, live, d, inside_d, x_s, ACC)
    one_over = tl.where(live, 1.0 / tl.sqrt(tl.sum(unit * unit, 1) + EPS), 0.0)
    unit *= one_over[:, None]
    total = (total - unit * tl.sum(total * unit, 1)[:, None]) * one_over[:, None]
    store_tile(out_ptr, lane, live, d, inside_d, heads // group * DIM, total)


@triton.jit(do_not_specialize=["first_program", "chunks"])
def delta_unit_gradients(
    q_ptr, k_ptr, d_unit_q_ptr, d_unit_k_ptr, dq_ptr, dk_ptr, first_program, heads, group, tokens, chunks, q_b, q_s,
    q_h, k_b, k_s, k_h, w_b, w_s, w_h, EPS: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dq and dk [b, tokens, key heads, DIM], contiguous, from gradients of normalised ones [b, tokens, heads, DIM]."""
    program = tl.program_id(0) + first_program
    key_heads = heads // group
    chunk, key_head = program % chunks, (program // chunks % key_heads).to(tl.int64)
    batch = (program // chunks // key_heads).to(tl.int64)
    lane, start = tl.arange(0, CHUNK), chunk * CHUNK
    live, first = start + lane < tokens, start.to(tl.int64)
    given = ((batch * tokens + first) * heads + key_head * group) * DIM
    made = ((batch * tokens + first) * key_heads + key_head) * DIM
    _unit_gradient(
        d_unit_q_ptr + given, q_ptr + batch * q_b + key_head * q_h + first * q_s, q_s, dq_ptr + made, group, heads,
        lane, live, EPS, ACC, DIM, BLOCK_D, CHUNK,
    )  # fmt: skip
    _unit_gradient(
        d_unit_k_ptr + given, k_ptr + batch * k_b + key_head * k_h + first * k_s, k_s, dk_ptr + made, group, heads,
        lane, live, EPS, ACC, DIM, BLOCK_D, CHUNK,
    )  # fmt: skip
