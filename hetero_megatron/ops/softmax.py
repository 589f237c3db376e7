"""Scaled softmax over the last axis, optionally causal (as in Megatron's fused softmax)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward, wide


def definition(x: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor]:
    """softmax(scale x). x: [..., q, k]; ``causal``: row i sees columns 0 to i + k - q; rows that see nothing are 0."""
    values = x.to(wide(x.dtype)) * scale
    if not causal:
        return (values.softmax(-1).to(x.dtype),)
    visible = _seen(x)
    probs = values.masked_fill(~visible, -math.inf).softmax(-1)
    return (torch.where(visible.any(-1, keepdim=True), probs, 0.0).to(x.dtype),)


def _seen(x: torch.Tensor) -> torch.Tensor:
    """[q, k] bool."""
    q, k = x.shape[-2:]
    return torch.ones(q, k, dtype=torch.bool, device=x.device).tril(k - q)


def forward(x: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor]:
    values = x.to(wide(x.dtype)) * scale
    if causal:
        visible = _seen(x)
        probs = values.masked_fill_(~visible, -math.inf).softmax(-1).masked_fill_(~visible.any(-1, keepdim=True), 0.0)
    else:
        probs = values.softmax(-1)
    return (probs.to(x.dtype),)


def backward(grad: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor]:
    """Masked columns have y = 0, and so no gradient."""
    kind = wide(y.dtype)
    product = grad.to(kind).mul(y)
    return (product.sub_(y * product.sum(-1, keepdim=True)).mul_(scale).to(y.dtype),)


def _reference_backward(grad: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor]:
    kind = wide(y.dtype)
    g, p = grad.to(kind), y.to(kind)
    return ((p * (g - (g * p).sum(-1, keepdim=True)) * scale).to(y.dtype),)


def _cases() -> Iterable[Case]:
    for name, shape in {
        "plain": (2, 5, 16), "odd": (3, 7, 13), "one": (1, 1), "no rows": (2, 0, 8), "long": (3, 5003),
        "many rows": (65_537, 3),
    }.items():  # fmt: skip
        yield Case(name, (normal(*shape, seed=0, scale=2.0), 0.5, False))
    yield Case("causal", (normal(2, 9, 9, seed=0), 1.0, True))
    yield Case("causal, rows that see nothing", (normal(2, 9, 5, seed=0), 1.0, True))
    yield Case("offset view", (normal(5, 24, seed=0)[1:, 2:19], 1.0, False))
    yield Case("huge and equal", (torch.full((3, 24), 1e4, dtype=torch.float64), 1.0, False))


SPEC = OpSpec(
    name="softmax", tensors=("x",), options=("scale", "causal"), schema="float scale, bool causal", results=("y",),
    saves=("y",), gradients=("x",), definition=definition, forward=reference_forward(definition),
    backward=_reference_backward, fake=lambda x, scale, causal: (torch.empty_like(x),),
    flops=lambda x, scale, causal: 5 * x.numel(), cases=_cases,
    bounds=Bounds((1e-6, 2e-6), (1e-3, 2e-3), (5e-3, 6e-3)),
    speed=lambda: Case("1024x1024", (normal(1024, 1024, seed=0), 1.0, False)),
)  # fmt: skip
KERNELS = (Kernel("softmax", "aten", ATEN, forward, backward, traceable=True),)
