"""The residual addition and the RMSNorm after it, in one pass over memory."""

from __future__ import annotations

import torch

from hetero_kernels.limits import Limits
from hetero_kernels.norm import norm_bwd, norm_fwd
from hetero_kernels.rms_norm import rms_norm_reference


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, *, zero_centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to x's dtype."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, zero_centered=zero_centered), total


def add_rms_norm_fwd(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, *, zero_centered: bool = False,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x, residual [..., h] of one dtype -> y, residual_out = x + residual (saved), rstd [...] fp32 (saved)."""
    assert x.shape == residual.shape and x.dtype == residual.dtype, "x and residual have one shape and dtype"
    y, total, _, rstd = norm_fwd(x, residual, weight, None, eps, False, zero_centered, limits)
    assert total is not None
    return y, total, rstd


def add_rms_norm_bwd(
    dy: torch.Tensor, dresidual: torch.Tensor | None, residual_out: torch.Tensor, weight: torch.Tensor | None,
    rstd: torch.Tensor, *, zero_centered: bool = False, grad_dtype: torch.dtype | None = None,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Gradients of y and of residual_out (None: zero) -> dx, which is also the gradient of residual, and dw."""
    dx, dw, _ = norm_bwd(dy, dresidual, residual_out, weight, False, None, rstd, zero_centered, grad_dtype, limits)
    return dx, dw
