"""Attention on the CPU as a provider: aten's flash kernel; scores in runs of rows where they are soft-capped."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetero_megatron.ops.attention import attention
from hetero_megatron.ops.attention_op import SPEC, Documents, Pair, attn_delta, definition, reference_backward
from hetero_megatron.ops.attention_sinks import add_sinks, sink_gradient
from hetero_megatron.ops.bind import make_function
from hetero_megatron.ops.block_attention import TileKernel
from hetero_megatron.ops.dropout import ScoreDropout
from hetero_megatron.ops.spec import ATEN, Capability, Kernel, Signature, wide
from hetero_megatron.ops.tile_kernels import FlashCpuKernel, ReferenceKernel

Tensor = torch.Tensor


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


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Documents = None, window: int | None = None,
    q_start: int = 0, k_start: int = 0, softcap: float | None = None, dropout: ScoreDropout | None = None,
) -> Pair:  # fmt: skip
    if q_start != k_start or q.shape[1] != k.shape[1]:
        return definition(q, k, v, sinks, documents, window, q_start, k_start, softcap, dropout)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))
    if q.numel():
        kernel = _tile(softcap)
        for rows, tokens in _parts(documents, q.shape[1]):
            part = [x[rows, tokens] for x in (q, k, v)]
            here = _dropout(dropout, rows, tokens)
            out[rows, tokens], lse[rows, :, tokens] = kernel.forward(part[0], part[1], part[2], 0, window, here)
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    documents: Documents = None, window: int | None = None, q_start: int = 0, k_start: int = 0,
    softcap: float | None = None, dropout: ScoreDropout | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if q_start != k_start or q.shape[1] != k.shape[1]:
        options = (documents, window, q_start, k_start, softcap, dropout)
        return reference_backward(dout, q, k, v, sinks, out, lse, *options)
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.numel():
        kernel = _tile(softcap)
        for rows, tokens in _parts(documents, q.shape[1]):
            g, a, b, c, o = (x[rows, tokens] for x in (dout, q, k, v, out))
            here = _dropout(dropout, rows, tokens)
            found = kernel.backward(g, a, b, c, o, lse[rows, :, tokens], 0, window, None, here)
            for total, part in zip(grads, found, strict=True):
                total[rows, tokens] = part.to(total.dtype)
    return *grads, None if sinks is None else sink_gradient(attn_delta(dout, out)[0], lse, sinks)


def _apply(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, documents: Documents = None,
    window: int | None = None, q_start: int = 0, k_start: int = 0, softcap: float | None = None,
    dropout: ScoreDropout | None = None,
) -> Pair:  # fmt: skip
    """Differentiable: through aten's own autograd where it is plain attention."""
    if sinks is not None or softcap is not None or dropout is not None:
        options = (documents, window, q_start, k_start, softcap, dropout)
        return _FUNCTION.apply(q, k, v, sinks, *options)  # type: ignore[no-any-return]
    if q_start != k_start or q.shape[1] != k.shape[1]:
        return definition(q, k, v, None, documents, window, q_start, k_start)
    return attention(q, k, v, documents, window)


def _on_cpu(signature: Signature) -> list[str]:
    return [] if signature.device == "cpu" else [f"only on the CPU, not {signature.device}"]


KERNEL = Kernel(
    "attention", "aten", ATEN, _forward, _backward, Capability(features=SPEC.features), _on_cpu, version=3,
    apply=_apply, traceable=True,
)  # fmt: skip
_FUNCTION = make_function(SPEC, KERNEL)
