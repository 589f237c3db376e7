"""The output head and its loss in one: logits exist for a chunk of tokens at a time, never for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.cross_entropy import cross_entropy_reference, labels_for
from hetero_megatron.ops.gemm import WeightGradients, add_product, product
from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Case,
    Kernel,
    OpSpec,
    autograd_backward,
    normal,
    reference_forward,
    seeded,
    wide,
)
from hetero_megatron.spec.flops import CHUNK_ELEMENTS, TILE

# (x, weight, labels, dloss=None, bias=None) -> losses: see with_known_gradient
KnownLoss = Callable[..., torch.Tensor]
CPU_CHUNK_ELEMENTS = 1 << 22  # logits at once on a CPU, whose caches are small


def definition(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    """Cross-entropy of x W^T per token, in at least fp32. x: [..., h]; weight: [V, h]; labels: [...] int64."""
    kind = wide(x.dtype)
    return (cross_entropy_reference(x.to(kind) @ weight.to(kind).t(), labels),)


def _chunks(tokens: int, vocabulary: int, device: torch.device, elements: int | None = None) -> Iterator[slice]:
    if elements is None:
        elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS
    rows = max(elements // max(vocabulary, 1) // TILE, 1) * TILE
    return (slice(i, min(i + rows, tokens)) for i in range(0, tokens, rows))


def forward(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, log-sum-exp), each [...]. Logits of 16-bit operands are in fp32."""
    kind = wide(x.dtype)
    flat, targets = x.flatten(0, -2), labels.flatten()
    loss, lse = (flat.new_empty(len(flat), dtype=kind) for _ in range(2))
    for part in _chunks(len(flat), len(weight), x.device):
        logits = product(flat[part], weight.t(), kind)
        lse[part] = logits.logsumexp(-1)
        loss[part] = lse[part] - logits.gather(-1, targets[part, None]).squeeze(-1)
    return loss.view(labels.shape), lse.view(labels.shape)


def _gradients(
    logits: torch.Tensor, lse: torch.Tensor, seeds: torch.Tensor, labels: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor, dw: torch.Tensor, beta: float,
) -> torch.Tensor:  # fmt: skip
    """dx of a chunk, from logits, which are used up; adds its weight gradient to ``dw`` times ``beta``."""
    dlogits = logits.sub_(lse[:, None]).exp_().mul_(seeds[:, None])
    dlogits.scatter_add_(-1, labels[:, None], -seeds[:, None].to(dlogits.dtype))
    dlogits = dlogits.to(x.dtype) if x.device.type != "cpu" else dlogits  # accelerators multiply 16 bits much faster
    add_product(dlogits.t(), x.to(dlogits.dtype), dw, beta)
    return dlogits @ weight.to(dlogits.dtype)


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the logits again; the weight gradient is summed over chunks in at least fp32."""
    kind = wide(x.dtype)
    flat, targets, total, seeds = x.flatten(0, -2), labels.flatten(), lse.flatten(), grad.flatten()
    dx, dw = torch.empty_like(flat), torch.zeros_like(weight, dtype=kind)
    for part in _chunks(len(flat), len(weight), x.device):
        logits = product(flat[part], weight.t(), kind)
        dx[part] = _gradients(logits, total[part], seeds[part], targets[part], flat[part], weight, dw, 1.0)
    return dx.view(x.shape), dw.to(weight.dtype)


def fwd_bwd(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
    into: torch.Tensor | None = None, beta: float = 1.0, elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss and gradients in one pass, where the gradient of each token's loss is known beforehand: three products
    instead of four.

    Args:
        x: [..., h]; weight: [V, h]; labels: [...] int64.
        dloss: [...], gradient of each token's loss.
        into: [V, h] in at least fp32: the weight gradient is added to it, after times ``beta``: 1, or 0 where nothing
            is there yet. None: to a new one.
        elements: most logits at once, of at least ``TILE`` tokens; None: as is best on this device.

    Returns:
        loss [...] in at least fp32; dx like x; ``into`` or its like.
    """
    kind = wide(x.dtype)
    flat, targets, seeds = x.flatten(0, -2), labels.flatten(), dloss.flatten()
    loss, dx = flat.new_empty(len(flat), dtype=kind), torch.empty_like(flat)
    if into is None:
        into, beta = torch.empty_like(weight, dtype=kind), 0.0
    for part in _chunks(len(flat), len(weight), x.device, elements):
        logits = product(flat[part], weight.t(), kind)
        lse = logits.logsumexp(-1)
        loss[part] = lse - logits.gather(-1, targets[part, None]).squeeze(-1)
        first = beta if part.start == 0 else 1.0
        dx[part] = _gradients(logits, lse, seeds[part], targets[part], flat[part], weight, into, first)
    if not len(flat) and not beta:
        into.zero_()
    return loss.view(labels.shape), dx.view(x.shape), into


def _reference_fwd_bwd(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
    into: torch.Tensor | None = None, beta: float = 1.0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    kind = wide(x.dtype)
    leaves = [t.detach().to(kind).requires_grad_() for t in (x, weight)]
    with torch.enable_grad():
        (loss,) = definition(leaves[0], leaves[1], labels)
        dx, dw = torch.autograd.grad(seeded([loss], [dloss.to(kind)]), leaves)
    if into is not None:
        dw = into.add_(dw) if beta else into.copy_(dw)
    return loss.detach(), dx.to(x.dtype), dw


def bind_linear_cross_entropy(spec: OpSpec, kernel: Kernel, gradients: WeightGradients) -> KnownLoss:
    """The differentiable operator of one kernel plan; without ``dloss`` by its forward and backward, in four
    products."""
    return with_known_gradient(bind(spec, kernel), kernel.parts["fwd_bwd"], gradients)


def with_known_gradient(
    apart: Callable[..., torch.Tensor], together: Callable[..., Any], gradients: WeightGradients
) -> KnownLoss:
    """``call(x, weight, labels, dloss=None, bias=None)`` gives the losses [...] of a head with this weight, and bias.

    With ``dloss`` [...], which must be the gradient that the losses will get, forward computes the gradients too, in
    three products, and backward only hands them on. The weight's goes to its taker in ``gradients``, during forward,
    where it has one (``taker(dloss, x, kernel)``: see :class:`~hetero_megatron.ops.gemm.WeightGradients`).

    Args:
        apart: (x, weight, labels) -> losses, without ``dloss`` or gradients.
        together: as :func:`fwd_bwd`; the weight's gradient may be None where it has none. With a bias, both get it as
            ``bias``, and ``together`` gives its gradient too.
    """

    class LossAndGradients(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
            bias: torch.Tensor | None,
        ) -> torch.Tensor:  # fmt: skip
            with_bias = {} if bias is None else {"bias": bias}
            taker = gradients.taker((weight,)) if weight.requires_grad else None
            outputs: list[torch.Tensor] = []

            def head(
                dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
            ) -> torch.Tensor:
                outputs.extend(together(x, weight, labels, dy, into, beta, **with_bias))
                return outputs[2]

            ctx.dw = None
            if taker is not None:
                taker(dloss, x, head)
            else:
                dw = head(dloss, x)
                ctx.dw = dw.to(weight.dtype) if weight.requires_grad else None
            ctx.dx, ctx.db = outputs[1], None if bias is None else outputs[3]
            return outputs[0]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            assert ctx.dx is not None, "backward of head and loss in one runs once"
            dx, dw, db = ctx.dx, ctx.dw, ctx.db
            ctx.dx = ctx.dw = ctx.db = None
            return dx, dw, None, None, db

    def call(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if dloss is None or not torch.is_grad_enabled():
            return apart(x, weight, labels) if bias is None else apart(x, weight, labels, bias=bias)
        return LossAndGradients.apply(x, weight, labels, dloss, bias)  # type: ignore[no-any-return]

    return call


def _lse(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    kind = wide(x.dtype)
    return ((x.to(kind) @ weight.to(kind).t()).logsumexp(-1),)


def _cases() -> Iterable[Case]:
    for name, lead, h, v in (
        ("plain", (2, 5), 16, 64), ("odd", (7,), 13, 37), ("one word", (3,), 8, 1), ("no rows", (2, 0), 8, 9),
        ("one row", (1,), 4, 5000), ("several chunks", (300,), 4, 20_000),
        ("many rows", (65_537,), 2, 3),
    ):  # fmt: skip
        yield Case(name, (normal(*lead, h, seed=1), normal(v, h, seed=2), labels_for(lead, v)))


SPEC = OpSpec(
    name="linear_cross_entropy", version=2, parts=("fwd_bwd",),
    tensors=("x", "weight", "labels"), options=(), results=("loss",), extras=("lse",),
    saves=("x", "weight", "labels", "lse"), gradients=("x", "weight"), definition=definition,
    forward=reference_forward(definition, _lse),
    backward=autograd_backward(definition, lambda x, w, labels, lse: (x, w, labels), 1, (0, 1)),
    fake=lambda x, w, labels: tuple(x.new_empty(labels.shape, dtype=wide(x.dtype)) for _ in range(2)),
    flops=lambda x, w, labels: 2 * x.numel() * w.shape[0], cases=_cases, backward_flops=3.0,
    bounds=Bounds((1e-6, 1e-5), (1e-4, 2e-3), (1e-4, 6e-3)),
    speed=lambda: Case("256x256x8192", (normal(256, 256, seed=1), normal(8192, 256, seed=2), labels_for((256,), 8192))),
)  # fmt: skip
REFERENCE_PARTS: dict[str, Callable[..., object]] = {"fwd_bwd": _reference_fwd_bwd}
PARTS: dict[str, Callable[..., object]] = {"fwd_bwd": fwd_bwd}
KERNELS = (
    Kernel("linear_cross_entropy", "aten", ATEN, forward, backward, version=2, parts=PARTS, traceable=True),
)
