"""Causal attention of whole sequences on the CPU, with the log-sum-exp of every row: aten's flash kernel (fp64, fp32,
16-bit), one call per document; and what sinks add to a result.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hetero_megatron.ops.attention_options import Documents, visible_keys


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents = None, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / sqrt(d)) v over the tokens before and including each one, inside its document.

    Args:
        q: [b, s, heads, d]; k, v: [b, s, kv_heads, d], heads a multiple of kv_heads.
        documents: start offsets per row; None: each row is one document.
        window: a token sees itself and ``window - 1`` tokens before it; None: all.

    Returns:
        out [b, s, heads, d] and lse [b, heads, s] in at least fp32.
    """
    if q.numel() == 0:  # aten's kernel divides by the number of heads: the process would die
        wide_dtype = torch.promote_types(q.dtype, torch.float32)
        return q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=wide_dtype)
    if documents is None or all(len(starts) <= 1 for starts in documents):
        return _attend(q, k, v, window)
    rows = []
    for row, starts in enumerate(documents):
        ends = [*starts[1:], q.shape[1]]
        parts = [
            _attend(q[row : row + 1, a:b], k[row : row + 1, a:b], v[row : row + 1, a:b], window)
            for a, b in zip(starts, ends, strict=True)
            if b > a
        ]
        rows.append((torch.cat([o for o, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2)))
    return torch.cat([o for o, _ in rows]), torch.cat([lse for _, lse in rows])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One document per row."""
    length, repeat = q.shape[1], q.shape[2] // k.shape[2]
    windowed = window is not None and window < length
    mask = visible_keys(0, length, length, 0, window, q.device) if windowed else None
    bias = None if mask is None else torch.zeros(length, length, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    if repeat > 1 and q.dtype in (torch.float16, torch.bfloat16) and torch.is_grad_enabled():
        return _SharedHeads.apply(q, k, v, bias)  # type: ignore[no-any-return]
    return _flash(q, k, v, bias)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal where there is no ``bias`` [length, length]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, bias is None, attn_mask=bias
    )
    return out.transpose(1, 2), lse


class _SharedHeads(torch.autograd.Function):
    """16-bit attention whose query heads share KV heads. aten shares them without a copy, but then adds their gradients
    in 16 bits (1.5 times the error), so backward, and only backward, works with copies, and adds in fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _flash(q, k, v, bias)
        ctx.save_for_backward(q, k, v, out, lse, bias)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, bias = ctx.saved_tensors
        kv_heads, repeat = k.shape[2], q.shape[2] // k.shape[2]
        repeated = (x.repeat_interleave(repeat, dim=2) for x in (k, v))
        transposed = (x.transpose(1, 2) for x in (grads[0], q, *repeated, out))
        dq, *dkv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *transposed, lse, 0.0, bias is None, attn_mask=bias
        )
        dk, dv = (
            x.unflatten(1, (kv_heads, repeat)).sum(2, dtype=torch.float32).to(k.dtype).transpose(1, 2) for x in dkv
        )
        return dq.transpose(1, 2), dk, dv, None


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the sinks among the keys, from those without.

    out: [b, s, heads, d]; lse: [b, heads, s] in at least fp32; sinks: [heads]. A row that saw no key has only its sink.
    """
    wide_sinks = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - wide_sinks)  # of all keys that are no sink
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), torch.logaddexp(lse, wide_sinks)


def sink_gradient(delta: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks.

    Args:
        delta: [b, heads, s], sum over features of the output's gradient and the output; lse: the merged one.
    """
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)
