"""A causal convolution of every feature by itself, and SiLU: what queries, keys and values of linear attention go
through. A token takes nothing from documents before its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.nn import functional as F

from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Case,
    Kernel,
    OpSpec,
    autograd_backward,
    normal,
    reference_forward,
    wide,
)

Tensor = torch.Tensor
Documents = Sequence[Sequence[int]] | None


def definition(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Documents) -> tuple[Tensor]:
    """silu(bias + sum over j of weight[:, taps - 1 - j] x[t - j]), in at least fp32.

    Args:
        x: [b, s, features]; weight: [features, taps], the last of which is of the token itself; bias: [features].
        documents: starts of each row's documents, the first 0; None: one per row.
    """
    kind, taps = wide(x.dtype), weight.shape[1]
    values, filters, added = x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    rows = []
    for row in range(x.shape[0]):
        bounds = [*(documents[row] if documents is not None else [0]), x.shape[1]]
        documents_values = [values[row, a:b].T for a, b in zip(bounds, bounds[1:], strict=False)]
        ended = [
            F.conv1d(F.pad(document, (taps - 1, 0))[None], filters[:, None], added, groups=len(filters))
            for document in documents_values
        ]
        rows.append(torch.cat(ended, -1)[0].T)
    return (F.silu(torch.stack(rows)).to(x.dtype) if rows else torch.zeros_like(x),)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Documents) -> tuple[Tensor]:
    with torch.no_grad():
        return (F.silu(_sums(x, weight, bias, documents)).to(x.dtype),)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Documents
) -> tuple[Tensor | None, ...]:
    with torch.no_grad():
        total = _sums(x, weight, bias, documents)
        inner = torch.ops.aten.silu_backward(grad.to(total.dtype), total)
        d_x, d_weight = torch.zeros_like(inner), torch.zeros(weight.shape, dtype=inner.dtype, device=x.device)
        for tap, targets, sources, same_document in _taps(x, weight, documents):
            gradient = inner[:, targets] if same_document is None else inner[:, targets] * same_document
            d_x[:, sources].addcmul_(gradient, weight[:, tap].to(gradient.dtype))
            d_weight[:, tap] = (gradient * x[:, sources]).sum((0, 1))
        d_bias = None if bias is None else inner.sum((0, 1)).to(bias.dtype)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Documents) -> Tensor:
    """What SiLU is of, in at least fp32."""
    out = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
    if bias is not None:
        out += bias.to(out.dtype)
    for tap, targets, sources, same_document in _taps(x, weight, documents):
        values = x[:, sources].to(out.dtype)
        out[:, targets].addcmul_(
            values if same_document is None else values * same_document, weight[:, tap].to(out.dtype)
        )
    return out


def _taps(x: Tensor, weight: Tensor, documents: Documents) -> Iterator[tuple[int, slice, slice, Tensor | None]]:
    """(tap, tokens, those that it brings to them, of which tokens they are in the document [b, .., 1]; None: all)."""
    taps, length = weight.shape[1], x.shape[1]
    packed = documents is not None and any(len(row) > 1 for row in documents)
    place = _places(documents, length).to(x.device) if packed and documents is not None else None
    for back in range(min(taps, length)):
        targets, sources = slice(back, length), slice(0, length - back)
        same_document = None if place is None or not back else (place[:, targets, None] >= back).to(wide(x.dtype))
        yield taps - 1 - back, targets, sources, same_document


def _places(documents: Sequence[Sequence[int]], length: int) -> Tensor:
    """[b, s], of every token in its document."""
    places = torch.arange(length).repeat(len(documents), 1)
    for row, starts in enumerate(documents):
        for start in starts:
            places[row, start:] = torch.arange(length - start)
    return places


def _cases() -> Iterable[Case]:
    yield Case("plain", (normal(2, 9, 16, seed=0), normal(16, 4, seed=1), None, None))
    yield Case("odd", (normal(3, 7, 5, seed=0), normal(5, 3, seed=1), None, None))
    yield Case("fewer tokens than taps", (normal(2, 2, 6, seed=0), normal(6, 4, seed=1), None, None))
    yield Case("one tap", (normal(2, 5, 6, seed=0), normal(6, 1, seed=1), None, None))
    yield Case("many tokens", (normal(1, 65_537, 1, seed=0), normal(1, 2, seed=1), None, None))
    yield Case("bias", (normal(2, 7, 5, seed=0), normal(5, 3, seed=1), normal(5, seed=2), [[0, 2], [0]]))
    yield Case("documents", (normal(2, 12, 6, seed=0), normal(6, 4, seed=1), None, [[0, 1, 3, 10], [0]]))


def _speed() -> Case:
    return Case("1x2048x1024", (normal(1, 2048, 1024, seed=0), normal(1024, 4, seed=1), None, None))


_TENSORS = ("x", "weight", "bias")
SPEC = OpSpec(
    name="causal_conv", version=2, tensors=_TENSORS, options=("documents",), results=("y",), saves=_TENSORS,
    gradients=_TENSORS, optional=("bias",), definition=definition, forward=reference_forward(definition),
    backward=autograd_backward(definition, lambda x, w, bias, documents: (x, w, bias, documents), 1, (0, 1, 2)),
    fake=lambda x, weight, bias, documents: (torch.empty_like(x),),
    flops=lambda x, weight, bias, documents: 2 * x.numel() * weight.shape[1], cases=_cases, speed=_speed, schema=None,
    bounds=Bounds((1e-6, 2e-6), (1e-3, 1e-3), (5e-3, 6e-3)),
)  # fmt: skip
KERNELS = (Kernel("causal_conv", "aten", ATEN, forward, backward, version=2),)
