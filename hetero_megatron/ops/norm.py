"""Normalisation over the last axis."""

from __future__ import annotations

from typing import Any

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in at least fp32 (Zhang and Sennrich, 2019)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """Saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wide = rstd.dtype
        normed = x.to(wide) * rstd
        grad = grad.to(wide)
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        scaled = grad * weight.to(wide)
        dot = (scaled * normed).mean(-1, keepdim=True)
        grad_x = scaled.sub_(normed.mul_(dot)).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., h], [h] -> [..., h]; see :func:`rms_norm_reference`."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, computed in at least fp32 (Ba et al., 2016)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * weight + bias).to(x.dtype)


class _LayerNorm(torch.autograd.Function):
    """aten's kernels in at least fp32: in 16 bits they add up weight gradients in 16 bits (error 2e-2)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y, mean, rstd = torch.ops.aten.native_layer_norm(x.to(wide), [x.shape[-1]], weight.to(wide), bias.to(wide), eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y.to(x.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wide = mean.dtype
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad.to(wide), x.to(wide), [x.shape[-1]], mean, rstd, weight.to(wide), bias.to(wide), [True] * 3
        )
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., h], [h], [h] -> [..., h]; see :func:`layer_norm_reference`."""
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]
