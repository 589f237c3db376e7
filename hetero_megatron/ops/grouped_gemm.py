"""Products of rows with the matrix of their group: the linear layers of a mixture of experts.

The rows of one expert lie side by side, in the order of the experts; ``ends`` says where each group of rows ends. A
group may be empty. As for ``gemm``, weight gradients are added up in fp32 sums where somebody takes them, and may be
put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from hetero_megatron.ops import gemm
from hetero_megatron.ops.gemm import WeightGradients
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

_NAME = "hetero_host_values"


def on_host(values: torch.Tensor) -> list[int]:
    """The elements of [n] integers, which nobody changes; waits for the device the first time only."""
    elements: list[int] | None = getattr(values, _NAME, None)
    if elements is None:
        elements = values.tolist()
        with_host_values(values, elements)
    return elements


def with_host_values(values: torch.Tensor, elements: list[int]) -> torch.Tensor:
    """``values`` [n], of which the host has read the elements already: :func:`on_host` waits for nothing."""
    setattr(values, _NAME, elements)
    return values


def groups(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(group, its rows) of all groups that have rows."""
    start = 0
    for group, end in enumerate(on_host(ends)):
        if end > start:
            yield group, slice(start, end)
        start = end


def definition(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor]:
    """y[i] = x[i] W[g]^T + b[g] for rows i of group g, in at least fp32.

    Args:
        x: [rows, k], sorted by group; weight: [groups, n, k]; bias: [groups, n] or None.
        ends: [groups] int64, ascending, the last one ``rows``: group g has rows ends[g - 1] to ends[g].
    """
    w = wide(x.dtype)
    parts = [
        F.linear(x[rows].to(w), weight[g].to(w), None if bias is None else bias[g].to(w)) for g, rows in groups(ends)
    ]
    # Of no rows, and still of all arguments, so that each has a gradient.
    parts.append(F.linear(x[:0].to(w), weight.to(w).sum(0), None if bias is None else bias.to(w).sum(0)))
    return (torch.cat(parts).to(x.dtype),)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for g, rows in groups(ends):
        if bias is None:
            torch.mm(x[rows], weight[g].t(), out=y[rows])
        else:
            torch.addmm(bias[g], x[rows], weight[g].t(), out=y[rows])
    return (y,)


def input_gradient(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[rows, n], [groups, n, k] -> [rows, k]."""
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for g, rows in groups(ends):
        torch.mm(dy[rows], weight[g], out=dx[rows])
    return dx


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0,
    product: Callable[..., object] = gemm.weight_gradient,
) -> torch.Tensor:  # fmt: skip
    """dy^T x of every group, [groups, n, k]; ``into`` and ``beta`` as for ``gemm``; ``product``: that of one group."""
    if into is None:
        into, beta = dy.new_empty(ends.shape[0], dy.shape[1], x.shape[1]), 0.0
    used_groups = set()
    for g, rows in groups(ends):
        product(dy[rows], x[rows], into[g], beta)
        used_groups.add(g)
    if not beta:
        for g in set(range(ends.shape[0])) - used_groups:
            into[g].zero_()
    return into


def bias_gradient(dy: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums of each group's rows, [groups, n], added up in at least fp32."""
    sums = dy.new_zeros(ends.shape[0], dy.shape[1])
    for g, rows in groups(ends):
        sums[g] = dy[rows].sum(0, dtype=wide(dy.dtype))
    return sums


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    dbias = None if bias is None else bias_gradient(dy, ends)
    return input_gradient(dy, weight, ends), weight_gradient(dy, x, ends), dbias


def bind_grouped_gemm(
    kernel: Kernel, gradients: WeightGradients, traced: bool = False
) -> Callable[..., torch.Tensor]:
    """The differentiable grouped product of one kernel plan; ``gradients`` and ``traced`` as for ``gemm``."""
    forward, for_input, for_weight = kernel.forward, kernel.parts["input"], kernel.parts["weight"]

    class GroupedGemm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
        ) -> torch.Tensor:
            ctx.save_for_backward(x, weight, ends)
            if not traced:
                ctx.leaf = weight  # recomputation saves another tensor of the same values
            return forward(x, weight, bias, ends)[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
            x, weight, ends = ctx.saved_tensors
            x_wanted, weight_wanted, bias_wanted, _ = ctx.needs_input_grad

            def product(
                dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
            ) -> torch.Tensor:
                return for_weight(dy, x, ends, into, beta)  # type: ignore[return-value]

            dx = for_input(dy, weight, ends) if x_wanted else None
            dw = None
            if weight_wanted:
                dw = product(dy, x) if traced else gradients.gradient((ctx.leaf,), dy, x, product)
            return dx, dw, bias_gradient(dy, ends) if bias_wanted else None, None

    return GroupedGemm.apply


def _ends(*counts: int) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0)


def _cases() -> Iterable[Case]:
    for name, counts, k, n in (
        ("plain", (5, 9, 2), 32, 24), ("empty groups", (0, 7, 0, 0, 6, 0), 17, 13), ("one row", (1,), 1, 1),
        ("no rows", (0, 0), 8, 4), ("one group of many", (0, 0, 40, 0), 16, 8), ("long k", (3, 2), 1031, 5),
        ("many groups", (1, 2, 0) * 43, 8, 5), ("many rows", (65_530, 7), 2, 3), ("no columns", (2, 3), 8, 0),
    ):  # fmt: skip
        weight, bias = normal(len(counts), n, k, seed=2), normal(len(counts), n, seed=3)
        yield Case(name, (normal(sum(counts), k, seed=1), weight, bias, _ends(*counts)))
    yield Case("no bias", (normal(9, 8, seed=1), normal(3, 5, 8, seed=2), None, _ends(4, 0, 5)))
    strided = normal(3, 8, 5, seed=2).transpose(1, 2)
    yield Case("strided", (normal(8, 9, seed=1).t(), strided, None, _ends(4, 0, 5)))


_reference_backward = autograd_backward(definition, lambda x, w, b, ends: (x, w, b, ends), 1, (0, 1, 2))

SPEC = OpSpec(
    name="grouped_gemm",
    tensors=("x", "weight", "bias", "ends"),
    options=(),
    results=("y",),
    parts=("input", "weight"),
    optional=("bias",),
    definition=definition,
    forward=reference_forward(definition),
    backward=_reference_backward,
    saves=("x", "weight", "bias", "ends"),
    gradients=("x", "weight", "bias"),
    fake=lambda x, weight, bias, ends: (x.new_empty(x.shape[0], weight.shape[1]),),
    flops=lambda x, weight, bias, ends: 2 * x.numel() * weight.shape[1],
    cases=_cases,
    speed=lambda: Case(
        "8x128x512x512", (normal(1024, 512, seed=1), normal(8, 512, 512, seed=2), None, _ends(*[128] * 8))
    ),
    bounds=Bounds((2e-6, 1e-5), (1e-3, 1e-3), (5e-3, 5e-3)),  # as of gemm
)


def _reference_input(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    w = wide(dy.dtype)
    return input_gradient(dy.to(w), weight.to(w), ends).to(dy.dtype)


def _reference_weight(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    w = wide(dy.dtype)
    return gemm.add_up(weight_gradient(dy.to(w), x.to(w), ends), x.dtype, into, beta)


REFERENCE_PARTS: dict[str, Callable[..., object]] = {"input": _reference_input, "weight": _reference_weight}
PARTS: dict[str, Callable[..., object]] = {"input": input_gradient, "weight": weight_gradient}
KERNELS = (Kernel("grouped_gemm", "aten", ATEN, forward, backward, parts=PARTS, traceable=True),)
