"""Attention on the CPU: of whole sequences by aten's flash kernel (fp64, fp32, 16-bit), one call per document; and as a
provider of the operator, scores in runs of rows where they are soft-capped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops.attention_op import (
    SPEC,
    AttentionOptions,
    Documents,
    Pair,
    add_sinks,
    attn_delta,
    definition,
    reference_backward,
    sink_gradient,
    visible_keys,
)
from hetero_megatron.ops.bind import make_function
from hetero_megatron.ops.block_attention import TileKernel
from hetero_megatron.ops.dropout import ScoreDropout
from hetero_megatron.ops.spec import ATEN, VENDOR, Capability, Kernel, Signature, wide
from hetero_megatron.ops.tile_kernels import FlashCpuKernel, ReferenceKernel

Tensor = torch.Tensor


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


def _tile(softcap: float | None) -> TileKernel:
    return FlashCpuKernel() if softcap is None else ReferenceKernel(softcap)


def _parts(documents: Documents, length: int) -> Iterator[tuple[slice, slice]]:
    """(rows, tokens) of one document, or of all rows where each is one."""
    if documents is None or all(len(starts) <= 1 for starts in documents):
        yield slice(None), slice(0, length)
        return
    for row, starts in enumerate(documents):
        for a, b in zip(starts, [*starts[1:], length], strict=True):
            if b > a:
                yield slice(row, row + 1), slice(a, b)


def _dropout(dropout: ScoreDropout | None, rows: slice, tokens: slice) -> ScoreDropout | None:
    return None if dropout is None else dropout.of(rows.start or 0, tokens.start, tokens.start)


def _square(q: Tensor, k: Tensor, options: AttentionOptions) -> bool:
    """Whether queries and keys are of the same tokens."""
    return not options.distance and q.shape[1] == k.shape[1]


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> Pair:
    opts = AttentionOptions(*options)
    if not _square(q, k, opts):
        return definition(q, k, v, sinks, *opts)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))
    if q.numel():
        kernel = _tile(opts.softcap)
        for rows, tokens in _parts(opts.documents, q.shape[1]):
            part = [x[rows, tokens] for x in (q, k, v)]
            drops = _dropout(opts.dropout, rows, tokens)
            out[rows, tokens], lse[rows, :, tokens] = kernel.forward(part[0], part[1], part[2], 0, opts.window, drops)
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor | None, ...]:
    opts = AttentionOptions(*options)
    if not _square(q, k, opts):
        return reference_backward(dout, q, k, v, sinks, out, lse, *opts)
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.numel():
        kernel = _tile(opts.softcap)
        for rows, tokens in _parts(opts.documents, q.shape[1]):
            g, a, b, c, o = (x[rows, tokens] for x in (dout, q, k, v, out))
            part_dropout = _dropout(opts.dropout, rows, tokens)
            part_grads = kernel.backward(g, a, b, c, o, lse[rows, :, tokens], 0, opts.window, None, part_dropout)
            for total, part in zip(grads, part_grads, strict=True):
                total[rows, tokens] = part.to(total.dtype)
    return *grads, None if sinks is None else sink_gradient(attn_delta(dout, out)[0], lse, sinks)


def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *options: Any) -> Pair:
    """Differentiable: through aten's own autograd where it is plain attention."""
    attn_options = AttentionOptions(*options)
    if sinks is not None or attn_options.softcap is not None or attn_options.dropout is not None:
        return _FUNCTION.apply(q, k, v, sinks, *attn_options)  # type: ignore[no-any-return]
    if not _square(q, k, attn_options):
        return definition(q, k, v, None, *attn_options)
    return attention(q, k, v, attn_options.documents, attn_options.window)


def _on_cpu(signature: Signature) -> list[str]:
    return [] if signature.device == "cpu" else [f"only on the CPU, not {signature.device}"]


KERNEL = Kernel(
    "attention", "aten", ATEN, _forward, _backward, Capability(features=SPEC.features), _on_cpu, version=3,
    apply=_apply, traceable=True,
)  # fmt: skip
_FUNCTION = make_function(SPEC, KERNEL)


Tensors = tuple[torch.Tensor, ...]
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
NO_DROPOUT = "it says that it has no dropout: every call would be the other provider's"


class FusedKernel(NamedTuple):
    """Attention of a square, scaled by 1 / sqrt(d); the log-sum-exp is in natural logarithms.

    Attributes:
        forward: (q [b, s, heads, d], k, v [b, t, kv_heads, d], causal) -> out like q, lse [b, heads, s] in fp32.
            ``causal``: s equals t, and query i sees keys 0 .. i; else every query sees every key.
        backward: (dout, q, k, v, out, lse, causal) -> dq, dk, dv; out and lse may be those of more keys.
        smallest: keys that it takes at least.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    smallest: int = 1


def visible_square(queries: int, keys: int, options: AttentionOptions) -> bool | None:
    """True: a causal square; False: every query sees every key; None: neither."""
    if options.documents is not None and any(len(starts) > 1 for starts in options.documents):
        return None
    if options.window is not None and options.distance + queries - 1 >= options.window:
        return None
    if options.distance >= keys - 1:
        return False
    return True if not options.distance and queries == keys else None


def fused_attention(
    provider: str,
    kernel: FusedKernel,
    rest: Kernel,
    capability: Capability,
    supports: Callable[[Signature], list[str]],
    priority: int = 0,
    kind: str = VENDOR,
    alone: bool = False,
) -> Kernel:
    """``kernel`` as a provider of ``attention``, with ``rest`` for what is no square.

    Args:
        rest: of the operator ``attention``, with portable state and the parts ``share`` and ``delta``.
        supports: reasons against; those of ``rest`` are added.
        alone: squares are served where ``rest`` cannot serve, and the first call that is none is refused there.
    """
    assert not rest.private and rest.backward is not None, f"{rest}: its state is not portable"
    rest_backward = rest.backward

    def square(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> bool | None:
        assert options.dropout is None, NO_DROPOUT
        if options.softcap is not None or not q.numel() or not k.numel() or k.shape[1] < kernel.smallest:
            return None
        return visible_square(q.shape[1], k.shape[1], options)

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *options: Any
    ) -> Tensors:
        attn_options = AttentionOptions(*options)
        causal = square(q, k, attn_options)
        if causal is None:
            if alone:
                _require(rest, provider, q)
            return rest.forward(q, k, v, sinks, *attn_options)
        out, lse = kernel.forward(*map(_adjacent, (q, k, v)), causal)
        return (out, lse) if sinks is None else add_sinks(out, lse, sinks)

    def gradients(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        causal: bool,
    ) -> Tensors:  # fmt: skip
        tensors = (dout.to(q.dtype), q, k, v, out.to(q.dtype))
        return kernel.backward(*map(_adjacent, tensors), lse.contiguous(), causal)

    def backward(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        out: torch.Tensor, lse: torch.Tensor, *options: Any,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        attn_options = AttentionOptions(*options)
        causal = square(q, k, attn_options)
        if causal is None:
            return rest_backward(dout, q, k, v, sinks, out, lse, *attn_options)
        part_grads = gradients(dout, q, k, v, out, lse, causal)
        return *part_grads, None if sinks is None else sink_gradient(attn_delta(dout, out)[0], lse, sinks)

    def share(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        delta: torch.Tensor | None, *options: Any,
    ) -> Tensors:  # fmt: skip
        attn_options = AttentionOptions(None, *options)  # a tile is of one document
        causal = square(q, k, attn_options)
        if causal is None:
            shares = rest.parts["share"](dout, q, k, v, out, lse, delta, *attn_options[1:])
            return shares  # type: ignore[return-value]
        return tuple(x.to(lse.dtype) for x in gradients(dout, q, k, v, out, lse, causal))

    def reasons(signature: Signature) -> list[str]:
        refusals = rest.reasons(signature)
        without = [f"{rest.provider}, which it leaves windows and documents to, cannot serve: {'; '.join(refusals)}"]
        return supports(signature) + (without if refusals and not alone else [])

    parts = {"share": share, "delta": attn_delta if alone else rest.parts["delta"]}
    square_capability = replace(capability, features=tuple(f for f in rest.capability.features if f != "dropout"))
    return Kernel(
        "attention", provider, kind, forward, backward, square_capability, reasons, parts=parts, priority=priority,
        interpreted=rest.interpreted, version=3,
    )  # fmt: skip


def _require(rest: Kernel, provider: str, q: torch.Tensor) -> None:
    """UserError where ``rest`` cannot serve what ``provider`` leaves to it."""
    if rest_reasons := rest.reasons(Signature("attention", q.device.type, q.dtype)):
        raise UserError(
            f"windows, documents and parts of sequences are {rest.provider}'s, which cannot serve: "
            f"{'; '.join(rest_reasons)}", field="attention", value=provider,
            accepted="whole causal sequences (no --reset-attention-mask, no sliding window), or what it needs",
        )  # fmt: skip


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    """With features next to each other in memory, as fused kernels want them."""
    return x if x.stride(-1) == 1 else x.contiguous()
