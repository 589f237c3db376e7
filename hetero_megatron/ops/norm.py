"""Normalisation over the last axis: rms_norm, its fusion with the residual sum, layer_norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

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


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in at least fp32 (Zhang and Sennrich, 2019)."""
    values = x.to(wide(x.dtype))
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, computed in at least fp32 (Ba et al., 2016)."""
    values = x.to(wide(x.dtype))
    centred = values - values.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * weight + bias).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the inputs' dtype first."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


# aten: the same in few passes, saving one number per row.


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.to(wide(x.dtype))
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (values * rstd).to(x.dtype).mul_(weight), rstd.squeeze(-1)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kind, rstd = rstd.dtype, rstd[..., None]
    normed = x.to(kind) * rstd
    grad = grad.to(kind)
    grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    scaled = grad * weight.to(kind)
    dot = (scaled * normed).mean(-1, keepdim=True)
    grad_x = scaled.sub_(normed.mul_(dot)).mul_(rstd)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x + residual
    y, rstd = rms_norm_forward(total, weight, eps)
    return y, total, rstd


def add_rms_norm_backward(
    grad: torch.Tensor, grad_total: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grad_x, grad_weight = rms_norm_backward(grad, total, weight, rstd, eps)
    grad_x = grad_x.add_(grad_total)
    return grad_x, grad_x, grad_weight


def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """aten's kernels in at least fp32: in 16 bits they add up weight gradients in 16 bits (error 2e-2)."""
    kind = wide(x.dtype)
    y, mean, rstd = torch.ops.aten.native_layer_norm(x.to(kind), [x.shape[-1]], weight.to(kind), bias.to(kind), eps)
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    kind = mean.dtype
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad.to(kind), x.to(kind), [x.shape[-1]], mean[..., None], rstd[..., None], weight.to(kind), bias.to(kind),
        [True] * 3,
    )  # fmt: skip
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def _rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.to(wide(x.dtype))
    return torch.rsqrt(values.square().mean(-1) + eps)


def _layer_statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.to(wide(x.dtype))
    mean = values.mean(-1)
    return mean, torch.rsqrt((values - mean[..., None]).square().mean(-1) + eps)


def _reference_add_backward(
    grad: torch.Tensor, grad_total: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    grad_x, grad_weight = _rms_backward(grad, total, weight, rstd, eps)
    return grad_x + grad_total, grad_x + grad_total, grad_weight


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    return (rms_norm_reference(x, weight, eps),)


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    return (layer_norm_reference(x, weight, bias, eps),)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


SHAPES = {
    "plain": (3, 5, 16), "odd": (7, 33), "one": (1, 1), "prime": (2, 3, 257), "no rows": (2, 0, 8),
    "wide": (2, 5000), "many rows": (65_537, 4),
}  # fmt: skip


# Of the cases by name, where it is another than 1e-5: no kernel can have one of these built in unseen.
_EPS = {"odd": 0.3, "prime": 1e-6, "transposed": 0.037, "offset view": 1e-12}


def _values(seed: int) -> Iterable[tuple[str, torch.Tensor, float]]:
    """(name, x, eps)"""

    def values() -> Iterable[tuple[str, torch.Tensor]]:
        for name, shape in SHAPES.items():
            yield name, normal(*shape, seed=seed)
        yield "offset view", normal(4, 40, seed=seed)[1:, 3:35]
        yield "transposed", normal(16, 6, seed=seed).t()
        yield "large", normal(4, 32, seed=seed, scale=100.0)
        yield "equal", torch.full((3, 24), 0.75 + seed, dtype=torch.float64)

    for name, x in values():
        yield name, x, _EPS.get(name, 1e-5)


def _rms_cases() -> Iterable[Case]:
    for name, x, eps in _values(0):
        yield Case(name, (x, uniform(x.shape[-1], seed=1, low=0.5, high=1.5), eps))


def _add_cases() -> Iterable[Case]:
    for (name, x, eps), (_, residual, _) in zip(_values(0), _values(5), strict=True):
        yield Case(name, (x, residual, uniform(x.shape[-1], seed=1, low=0.5, high=1.5), eps))


def _layer_cases() -> Iterable[Case]:
    for name, x, eps in _values(0):
        if name == "equal" or x.shape[-1] == 1:  # variance 0: the gradient is rounding noise over sqrt(eps)
            continue
        weight, bias = uniform(x.shape[-1], seed=1, low=0.5, high=1.5), normal(x.shape[-1], seed=2)
        yield Case(name, (x, weight, bias, eps))


def _speed(*more: Any) -> Case:
    return Case("2048x1024", (normal(2048, 1024, seed=0), *more, 1e-5))


BOUNDS = Bounds((1e-6, 1e-5), (1e-3, 1e-3), (5e-3, 6e-3))
_rms_backward = autograd_backward(_rms, lambda x, w, rstd, eps: (x, w, eps), 1, (0, 1))

SPECS = (
    OpSpec(
        name="rms_norm", tensors=("x", "weight"), options=("eps",), schema="float eps", results=("y",),
        extras=("rstd",), saves=("x", "weight", "rstd"), gradients=("x", "weight"), definition=_rms,
        forward=reference_forward(_rms, lambda x, w, eps: (_rstd(x, eps),)), backward=_rms_backward,
        fake=lambda x, w, eps: (torch.empty_like(x), _reduced(x)), flops=lambda x, w, eps: 4 * x.numel(),
        cases=_rms_cases, speed=lambda: _speed(uniform(1024, seed=1, low=0.5, high=1.5)), bounds=BOUNDS,
    ),
    OpSpec(
        name="add_rms_norm", tensors=("x", "residual", "weight"), options=("eps",), schema="float eps",
        results=("y", "total"), extras=("rstd",), saves=("total", "weight", "rstd"),
        gradients=("x", "residual", "weight"), definition=add_rms_norm_reference,
        forward=reference_forward(add_rms_norm_reference, lambda x, r, w, eps: (_rstd(x + r, eps),)),
        backward=_reference_add_backward,
        fake=lambda x, r, w, eps: (torch.empty_like(x), torch.empty_like(x), _reduced(x)),
        flops=lambda x, r, w, eps: 5 * x.numel(), cases=_add_cases,
        speed=lambda: _speed(normal(2048, 1024, seed=3), uniform(1024, seed=1, low=0.5, high=1.5)),
        # the sum is rounded before it is normalised, which the fp64 oracle does not see
        bounds=Bounds((2e-6, 1e-5), (2e-3, 2e-3), (1e-2, 1.2e-2)),
    ),
    OpSpec(
        name="layer_norm", tensors=("x", "weight", "bias"), options=("eps",), schema="float eps", results=("y",),
        extras=("mean", "rstd"), saves=("x", "weight", "bias", "mean", "rstd"), gradients=("x", "weight", "bias"),
        definition=_layer, forward=reference_forward(_layer, lambda x, w, b, eps: _layer_statistics(x, eps)),
        backward=autograd_backward(_layer, lambda x, w, b, mean, rstd, eps: (x, w, b, eps), 1, (0, 1, 2)),
        fake=lambda x, w, b, eps: (torch.empty_like(x), _reduced(x), _reduced(x)),
        flops=lambda x, w, b, eps: 7 * x.numel(), cases=_layer_cases,
        speed=lambda: _speed(uniform(1024, seed=1, low=0.5, high=1.5), normal(1024, seed=2)), bounds=BOUNDS,
    ),
)  # fmt: skip

KERNELS = (
    Kernel("rms_norm", "aten", ATEN, rms_norm_forward, rms_norm_backward, traceable=True),
    Kernel("add_rms_norm", "aten", ATEN, add_rms_norm_forward, add_rms_norm_backward, traceable=True),
    Kernel("layer_norm", "aten", ATEN, layer_norm_forward, layer_norm_backward, traceable=True),
)

_rms_apply, _layer_apply = bind(SPECS[0], KERNELS[0]), bind(SPECS[2], KERNELS[2])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., h], [h] -> [..., h]; see :func:`rms_norm_reference`."""
    return _rms_apply(x, weight, eps)  # type: ignore[no-any-return]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., h], [h], [h] -> [..., h]; see :func:`layer_norm_reference`."""
    return _layer_apply(x, weight, bias, eps)  # type: ignore[no-any-return]
