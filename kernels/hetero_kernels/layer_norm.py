"""LayerNorm over the last axis (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

import torch

from hetero_kernels.limits import Limits, wide
from hetero_kernels.norm import norm_bwd, norm_fwd


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, in at least fp32, rounded once."""
    dtype = wide(x.dtype)
    centred = x.to(dtype) - x.to(dtype).mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(dtype)
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def layer_norm_fwd(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [..., h], weight and bias [h] or None -> y in x's dtype, mean [...] and rstd [...] fp32 (saved)."""
    y, _, mean, rstd = norm_fwd(x, None, weight, bias, eps, True, False, limits)
    assert mean is not None
    return y, mean, rstd


def layer_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor, *,
    bias: bool = True, grad_dtype: torch.dtype | None = None, limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """-> dx, dw, db (both in ``grad_dtype``, default the weight's); None for those that do not exist.

    ``bias``: whether there is one; it needs a weight.
    """
    has_bias = bias and weight is not None
    return norm_bwd(dy, None, x, weight, has_bias, mean, rstd, False, grad_dtype, limits)
