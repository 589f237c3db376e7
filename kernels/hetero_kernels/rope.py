# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotary position embedding (Su et al., 2021) of queries and keys in one launch. Backward turns the other way."""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import narrow, widen
from hetero_kernels.limits import Limits, accumulator, cdiv, config, limits_of, power_of_two, wide


def rope_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, positions: torch.Tensor | None = None,
    interleaved: bool = False, inverse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [..., heads, d]; arguments as in :func:`rope_fwd`. In at least fp32, rounded once."""
    tokens = x.shape[:-2].numel()
    table = _table(cos).to(wide(x.dtype)), _table(sin).to(wide(x.dtype))
    rows = torch.arange(tokens, device=x.device) % len(table[0]) if positions is None else positions.flatten()
    c, s = (t[rows][:, None] for t in table)
    s = -s if inverse else s
    turned = x.reshape(tokens, *x.shape[-2:])[..., : 2 * c.shape[-1]].to(wide(x.dtype))
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = (a * c - b * s, b * c + a * s)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    rest = x.reshape(tokens, *x.shape[-2:])[..., 2 * c.shape[-1] :].to(turned.dtype)
    return torch.cat([turned, rest], -1).view(x.shape).to(x.dtype)


@triton.jit
def _turn(
    x_ptr, out_ptr, token, live, heads, stride_t, stride_h, out_t, out_h, cos, sin, half,
    HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, COPY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """A [tokens, heads, head_dim] tile; cos and sin [tokens, 1, BLOCK_D]."""
    head = tl.arange(0, BLOCK_H)[None, :, None]
    lane = tl.arange(0, BLOCK_D)[None, None, :]
    seen = live[:, None, None] & (head < heads)
    ok = seen & (lane < half)
    if INTERLEAVED:
        first, second = 2 * lane, 2 * lane + 1
    else:
        first, second = lane, half + lane
    source = x_ptr + token[:, None, None] * stride_t + head * stride_h
    target = out_ptr + token[:, None, None] * out_t + head * out_h
    a = widen(tl.load(source + first, mask=ok, other=0.0), ACC)
    b = widen(tl.load(source + second, mask=ok, other=0.0), ACC)
    tl.store(target + first, narrow(a * cos - b * sin, out_ptr.dtype.element_ty), mask=ok)
    tl.store(target + second, narrow(b * cos + a * sin, out_ptr.dtype.element_ty), mask=ok)
    if COPY:
        rest = 2 * half + tl.arange(0, BLOCK_REST)[None, None, :]
        ok = seen & (rest < HEAD_DIM)
        tl.store(target + rest, tl.load(source + rest, mask=ok), mask=ok)


@triton.jit
def _rope(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr, tokens, table_rows, half, q_heads, k_heads,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, q_out_t, q_out_h, k_out_t, k_out_h,
    HEAD_DIM: tl.constexpr, POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    COPY: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    for begin in range(tl.program_id(0) * BLOCK_T, tokens, tl.num_programs(0) * BLOCK_T):
        token = (begin + tl.arange(0, BLOCK_T)).to(tl.int64)
        live = token < tokens
        if POSITIONS:
            at = tl.load(position_ptr + token, mask=live, other=0).to(tl.int64)
        else:
            at = token % table_rows
        lane = tl.arange(0, BLOCK_D)[None, None, :]
        where = at[:, None, None] * half + lane
        ok = live[:, None, None] & (lane < half)
        cos = widen(tl.load(cos_ptr + where, mask=ok, other=0.0), ACC)
        sin = widen(tl.load(sin_ptr + where, mask=ok, other=0.0), ACC)
        if INVERSE:
            sin = -sin
        _turn(q_ptr, q_out_ptr, token, live, q_heads, q_stride_t, q_stride_h, q_out_t, q_out_h, cos, sin, half,
              HEAD_DIM, INTERLEAVED, COPY, ACC, BLOCK_Q, BLOCK_D, BLOCK_REST)  # fmt: skip
        if KEYS:
            _turn(k_ptr, k_out_ptr, token, live, k_heads, k_stride_t, k_stride_h, k_out_t, k_out_h, cos, sin, half,
                  HEAD_DIM, INTERLEAVED, COPY, ACC, BLOCK_K, BLOCK_D, BLOCK_REST)  # fmt: skip


def rope_fwd(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, *,
    positions: torch.Tensor | None = None, interleaved: bool = False, inplace: bool = False,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Turn q [..., q_heads, d] and k [..., k_heads, d] (or None) -> (q', k'); nothing but the tables is saved.

    Args:
        cos, sin: [..., r / 2] (axes of size 1 are ignored) with r <= d; features beyond r are left alone. Token t
            (over all leading axes of q) uses row positions[t], else row t modulo the number of rows.
        positions: int64, one per token.
        interleaved: feature 2i turns with 2i + 1 instead of i with i + r / 2.
        inplace: overwrite q and k, whose leading axes must then be viewable as one.
    """
    return _run(q, k, cos, sin, positions, interleaved, inplace, False, limits)


def rope_bwd(
    dq: torch.Tensor, dk: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, *,
    positions: torch.Tensor | None = None, interleaved: bool = False, inplace: bool = False,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Gradients of q' and k' -> those of q and k: the rotation by the opposite angle."""
    return _run(dq, dk, cos, sin, positions, interleaved, inplace, True, limits)


def _table(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _tokens(x: torch.Tensor, inplace: bool) -> torch.Tensor:
    """[..., heads, d] as [tokens, heads, d] with adjacent features."""
    tokens = x.shape[:-2].numel()
    if inplace:
        view = x.view(tokens, *x.shape[-2:])
        if view.stride(-1) != 1:
            raise ValueError("rope: inplace needs features that are adjacent in memory")
        return view
    flat = x.reshape(tokens, *x.shape[-2:])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _run(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    interleaved: bool, inplace: bool, inverse: bool, limits: Limits | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    limits = limits or limits_of(q.device)
    cos, sin = _table(cos), _table(sin)
    table_rows, half = cos.shape
    head_dim, tokens = q.shape[-1], q.shape[:-2].numel()
    assert 2 * half <= head_dim, f"tables turn {2 * half} features of a head of {head_dim}"
    q_out = q if inplace else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = k if inplace or k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens * head_dim == 0 or q.numel() + (0 if k is None else k.numel()) == 0:
        return q_out, k_out
    keys = k is not None and k.numel() > 0
    q_in, q_to = _tokens(q, inplace), _tokens(q_out, True)
    k_in, k_to = (_tokens(k, inplace), _tokens(k_out, True)) if keys else (q_in, q_to)  # type: ignore[arg-type]
    block_q, block_k = power_of_two(q_in.shape[1]), power_of_two(k_in.shape[1])
    block_d = power_of_two(half)
    chosen = config("rope", head_dim, q.dtype, limits)
    block_t = max(1, min(chosen["tile"] // (block_q * block_d), power_of_two(tokens)))
    rest = head_dim - 2 * half
    _rope[(min(cdiv(tokens, block_t), limits.max_grid),)](
        q_in, k_in, q_to, k_to, cos, sin, None if positions is None else positions.reshape(-1).contiguous(), tokens,
        table_rows, half, q_in.shape[1], k_in.shape[1], *q_in.stride()[:2], *k_in.stride()[:2], *q_to.stride()[:2],
        *k_to.stride()[:2], head_dim, positions is not None, interleaved, inverse, rest > 0 and not inplace, keys,
        accumulator(q.dtype), block_t, block_q, block_k, block_d, power_of_two(rest), num_warps=chosen["num_warps"],
    )  # fmt: skip
    return q_out, k_out
