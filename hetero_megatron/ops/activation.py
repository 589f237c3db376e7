"""Activations of the MLP."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Case,
    Kernel,
    OpSpec,
    autograd_backward,
    normal,
    reference_forward,
    uniform,
    wide,
)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap): values beyond ``cap`` are squeezed (Gemma 2); in at least fp32, returned in x's dtype."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    return (cap * torch.tanh(x.to(wide_dtype) / cap)).to(x.dtype)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    kind = wide(gate.dtype)
    return (F.silu(gate.to(kind)) * up.to(kind)).to(gate.dtype)


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.silu(gate).mul_(up),)


def swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Saves the two inputs only; plain autograd would also keep silu(gate). The gradients are the halves of one tensor:
    whoever multiplies both with one matrix need not join them first."""
    if torch.compiler.is_compiling():
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
    dgate, dup = gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1]).chunk(2, -1)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
    torch.ops.aten.silu.out(gate, out=dup).mul_(grad)
    return dgate, dup


def clamped_swiglu_reference(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    kind = wide(gate.dtype)
    g, u = gate.to(kind).clamp(max=limit), up.to(kind).clamp(-limit, limit)
    return ((u + 1) * (g * torch.sigmoid(alpha * g))).to(gate.dtype)


def clamped_swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Saves the two inputs only."""
    kind = wide(gate.dtype)
    raw_gate, raw_up, dy = gate.to(kind), up.to(kind), grad.to(kind)
    g, u = raw_gate.clamp(max=limit), raw_up.clamp(-limit, limit)
    share = torch.sigmoid(alpha * g)
    dgate = dy * (u + 1) * share * (1 + alpha * g * (1 - share))
    dup = dy * g * share
    gradients = dgate.masked_fill_(raw_gate > limit, 0.0), dup.masked_fill_(raw_up.abs() > limit, 0.0)
    return gradients[0].to(gate.dtype), gradients[1].to(up.dtype)


def gelu_forward(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor]:
    return (F.gelu(x, approximate="tanh" if tanh else "none"),)


def gelu_backward(grad: torch.Tensor, x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor]:
    return (torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if tanh else "none"),)


def squared_relu_forward(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.relu(x).square_(),)


def squared_relu_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.relu(x).mul_(grad).mul_(2),)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
    return (swiglu_reference(gate, up),)


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> tuple[torch.Tensor]:
    return (clamped_swiglu_reference(gate, up, alpha, limit),)


def _gelu(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor]:
    return (F.gelu(x.to(wide(x.dtype)), approximate="tanh" if tanh else "none").to(x.dtype),)


def _squared_relu(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.relu(x.to(wide(x.dtype))).square().to(x.dtype),)


def _values(seed: int) -> Iterable[tuple[str, torch.Tensor]]:
    for name, shape in {
        "plain": (4, 9, 16), "odd": (3, 7, 13), "one": (1, 1), "nothing": (4, 0), "no rows": (0, 8),
        "long": (2, 5003), "many rows": (65_537, 2),
    }.items():  # fmt: skip
        yield name, normal(*shape, seed=seed, scale=3.0)
    yield "offset view", normal(5, 24, seed=seed, scale=3.0)[1:, 2:19]
    yield "transposed", normal(16, 6, seed=seed, scale=3.0).t()
    yield "saturated", normal(4, 16, seed=seed, scale=40.0)


def _swiglu_cases() -> Iterable[Case]:
    for (name, gate), (_, up) in zip(_values(0), _values(1), strict=True):
        yield Case(name, (gate, up))


def _clamped_swiglu_cases() -> Iterable[Case]:
    for case in _swiglu_cases():
        yield Case(case.name, (*case.args, 1.702, 7.0))
    yield Case("narrow", (*next(iter(_swiglu_cases())).args, 0.6, 0.5))


def _gelu_cases() -> Iterable[Case]:
    for name, x in _values(0):
        yield Case(f"{name}, exact", (x, False))
        yield Case(f"{name}, tanh", (x, True))
    tail = uniform(6, 32, seed=1, low=-4.0, high=-2.0)  # where the two differ by more than 16 bits round
    yield Case("tail, exact", (tail, False))
    yield Case("tail, tanh", (tail, True))


BOUNDS = Bounds((1e-6, 1e-6), (1e-3, 1.5e-3), (6e-3, 8e-3))

SPECS = (
    OpSpec(
        name="swiglu", tensors=("gate", "up"), options=(), results=("y",), saves=("gate", "up"),
        gradients=("gate", "up"), definition=_swiglu, forward=reference_forward(_swiglu),
        backward=autograd_backward(_swiglu, lambda gate, up: (gate, up), 1, (0, 1)),
        fake=lambda gate, up: (torch.empty_like(gate),), flops=lambda gate, up: 5 * gate.numel(),
        cases=_swiglu_cases, bounds=BOUNDS,
        speed=lambda: Case("1024x2048", (normal(1024, 2048, seed=0), normal(1024, 2048, seed=1))),
    ),
    OpSpec(
        name="clamped_swiglu", tensors=("gate", "up"), options=("alpha", "limit"), schema="float alpha, float limit",
        results=("y",), saves=("gate", "up"), gradients=("gate", "up"), definition=_clamped_swiglu,
        forward=reference_forward(_clamped_swiglu),
        backward=autograd_backward(
            _clamped_swiglu, lambda gate, up, alpha, limit: (gate, up, alpha, limit), 1, (0, 1)
        ),
        fake=lambda gate, up, alpha, limit: (torch.empty_like(gate),),
        flops=lambda gate, up, alpha, limit: 9 * gate.numel(), cases=_clamped_swiglu_cases, bounds=BOUNDS,
        speed=lambda: Case("1024x2048", (normal(1024, 2048, seed=0), normal(1024, 2048, seed=1), 1.702, 7.0)),
    ),
    OpSpec(
        name="gelu", tensors=("x",), options=("tanh",), schema="bool tanh", results=("y",), saves=("x",),
        gradients=("x",), definition=_gelu, forward=reference_forward(_gelu),
        backward=autograd_backward(_gelu, lambda x, tanh: (x, tanh), 1, (0,)),
        fake=lambda x, tanh: (torch.empty_like(x),), flops=lambda x, tanh: 8 * x.numel(), cases=_gelu_cases,
        bounds=BOUNDS, speed=lambda: Case("1024x2048", (normal(1024, 2048, seed=0), True)),
    ),
    OpSpec(
        name="squared_relu", tensors=("x",), options=(), results=("y",), saves=("x",), gradients=("x",),
        definition=_squared_relu, forward=reference_forward(_squared_relu),
        backward=autograd_backward(_squared_relu, lambda x: (x,), 1, (0,)), fake=lambda x: (torch.empty_like(x),),
        flops=lambda x: 2 * x.numel(), cases=lambda: (Case(name, (x,)) for name, x in _values(0)), bounds=BOUNDS,
        speed=lambda: Case("1024x2048", (normal(1024, 2048, seed=0),)),
    ),
)  # fmt: skip

KERNELS = (
    Kernel("swiglu", "aten", ATEN, swiglu_forward, swiglu_backward, traceable=True),
    Kernel("clamped_swiglu", "aten", ATEN, _clamped_swiglu, clamped_swiglu_backward, traceable=True),
    Kernel("gelu", "aten", ATEN, gelu_forward, gelu_backward, traceable=True),
    Kernel("squared_relu", "aten", ATEN, squared_relu_forward, squared_relu_backward, traceable=True),
)

_swiglu_apply, _, _gelu_apply, _squared_relu_apply = (bind(s, k) for s, k in zip(SPECS, KERNELS, strict=True))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise (Shazeer, 2020)."""
    return _swiglu_apply(gate, up)  # type: ignore[no-any-return]


def gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """GELU, exact or by the tanh approximation (GPT-2)."""
    return _gelu_apply(x, tanh)  # type: ignore[no-any-return]


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2 (So et al., 2021)."""
    return _squared_relu_apply(x)  # type: ignore[no-any-return]
