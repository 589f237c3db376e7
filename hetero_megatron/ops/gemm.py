"""Matrix product of activations and weights: the operator behind every linear layer of the model.

Its weight gradient can be accumulated into an fp32 buffer, and can be put off: for a pipeline schedule that splits
backward, :class:`WeightGradients` defers in ``B_INPUT`` and is flushed in ``W`` (the executor has neither).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

from hetero_megatron.ops.kernel import ATEN, Kernel
from hetero_megatron.ops.spec import Bounds, Case, OpSpec, autograd_backward, normal, reference_forward, wide


def definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    """x W^T + b in at least fp32. x: [..., k]; weight: [n, k]; bias: [n] or None -> [..., n]."""
    w = wide(x.dtype)
    return (F.linear(x.to(w), weight.to(w), None if bias is None else bias.to(w)).to(x.dtype),)


def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    return (F.linear(x, weight, bias),)


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., n], [n, k] -> [..., k]."""
    return dy @ weight


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """dy^T x, [n, k]; ``into``: fp32 (or wider) sum that it is added to, in that precision."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    if into is None:
        return dy.t() @ x
    return into.addmm_(dy.t().to(into.dtype), x.to(into.dtype))


def linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return (
        input_gradient(dy, weight),
        weight_gradient(dy, x),
        None if bias is None else dy.flatten(0, -2).sum(0),
    )


class WeightGradients:
    """Weight gradients that wait. While ``deferring``, backward of ``gemm`` leaves its operands here."""

    def __init__(self) -> None:
        self.deferring = False
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def defer(
        self, weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, kernel: Callable[..., torch.Tensor]
    ) -> None:
        self._waiting.append((weight, dy, x, kernel))

    @torch.no_grad()
    def flush(self, into: Callable[[torch.Tensor], torch.Tensor | None] | None = None) -> None:
        """Compute what waits, oldest first, as autograd would have: into ``.grad``, with the parameter's hooks.

        Args:
            into: gives the fp32 buffer of a weight that accumulates there instead (its hooks do not run), or None.
        """
        waiting, self._waiting = self._waiting, []
        for weight, dy, x, kernel in waiting:
            buffer = into(weight) if into is not None else None
            if buffer is not None:
                kernel(dy, x, buffer)
            else:
                torch.autograd.backward([weight], [kernel(dy, x)])


def bind_gemm(kernel: Kernel, waiting: WeightGradients) -> Callable[..., torch.Tensor]:
    """The differentiable product of one kernel plan."""
    forward, for_input, for_weight = kernel.forward, kernel.parts["input"], kernel.parts["weight"]

    class Gemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return forward(x, weight, bias)[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
            x, weight = ctx.saved_tensors
            x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad
            dx = for_input(dy, weight) if x_wanted else None
            dw = None
            if weight_wanted:
                if waiting.deferring and weight.is_leaf:
                    waiting.defer(weight, dy, x, for_weight)  # type: ignore[arg-type]
                else:
                    dw = for_weight(dy, x)
            return dx, dw, dy.flatten(0, -2).sum(0) if bias_wanted else None

    return Gemm.apply


def _flops(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    return 2 * x.numel() * weight.shape[0]


def _cases() -> Iterable[Case]:
    for name, lead, k, n in (
        ("plain", (4, 6), 32, 24), ("odd", (3, 5), 17, 13), ("one", (1, 1), 1, 1), ("no rows", (2, 0), 8, 4),
        ("no columns", (2, 3), 8, 0), ("long k", (2, 2), 1031, 5), ("many rows", (1, 65_537), 2, 3),
    ):  # fmt: skip
        yield Case(name, (normal(*lead, k, seed=1), normal(n, k, seed=2), normal(n, seed=3)))
    yield Case("no bias", (normal(4, 6, 8, seed=1), normal(5, 8, seed=2), None))
    yield Case("strided", (normal(6, 4, 8, seed=1).transpose(0, 1), normal(8, 5, seed=2).t(), None))


_reference_backward = autograd_backward(definition, lambda x, w, b: (x, w, b), 1, (0, 1, 2))

SPEC = OpSpec(
    name="gemm",
    tensors=("x", "weight", "bias"),
    options=(),
    results=("y",),
    optional=("bias",),
    definition=definition,
    forward=reference_forward(definition),
    backward=_reference_backward,
    saves=("x", "weight", "bias"),
    gradients=("x", "weight", "bias"),
    fake=lambda x, weight, bias: (x.new_empty(*x.shape[:-1], weight.shape[0]),),
    flops=_flops,
    cases=_cases,
    speed=lambda: Case("1024x512x512", (normal(1, 1024, 512, seed=1), normal(512, 512, seed=2), None)),
    bounds=Bounds((2e-6, 1e-5),  # 1e-6 x sqrt(K / 1024), and K is 65,537 in one case
                   (1e-3, 1e-3), (5e-3, 5e-3)),
)


def _reference_input(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    w = wide(dy.dtype)
    return (dy.to(w) @ weight.to(w)).to(dy.dtype)


def _reference_weight(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    w = wide(dy.dtype)
    product = dy.flatten(0, -2).to(w).t() @ x.flatten(0, -2).to(w)
    return product.to(x.dtype) if into is None else into.add_(product)


REFERENCE_PARTS: dict[str, Callable[..., object]] = {"input": _reference_input, "weight": _reference_weight}
PARTS: dict[str, Callable[..., object]] = {"input": input_gradient, "weight": weight_gradient}
KERNELS = (Kernel("gemm", "aten", ATEN, linear_forward, linear_backward, parts=PARTS, traceable=True),)
