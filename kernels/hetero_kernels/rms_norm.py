"""RMSNorm over the last axis (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch

from hetero_kernels.limits import Limits, wide
from hetero_kernels.norm import norm_bwd, norm_fwd


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (1 + weight if ``zero_centered``), in at least fp32, rounded once."""
    dtype = wide(x.dtype)
    y = x.to(dtype) * torch.rsqrt(x.to(dtype).square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(dtype) + 1 if zero_centered else weight.to(dtype))
    return y.to(x.dtype)


def rms_norm_fwd(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, zero_centered: bool = False,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [..., h], weight [h] or None -> y [..., h] in x's dtype, rstd [...] in fp32 (saved)."""
    y, _, _, rstd = norm_fwd(x, None, weight, None, eps, False, zero_centered, limits)
    return y, rstd


def rms_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, *, zero_centered: bool = False,
    grad_dtype: torch.dtype | None = None, limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """-> dx in x's dtype, dw [h] in ``grad_dtype`` (default: the weight's), accumulated in fp32."""
    dx, dw, _ = norm_bwd(dy, None, x, weight, False, None, rstd, zero_centered, grad_dtype, limits)
    return dx, dw
