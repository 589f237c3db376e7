"""NaN and Inf in weights."""

from __future__ import annotations

import torch


def is_finite(values: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether no value is NaN or infinite, here or as ``dtype``; one pass, no extra memory."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values.detach())  # NaN is the smallest and the largest
    dtype = dtype or values.dtype
    return bool(torch.isfinite(low.to(dtype)) & torch.isfinite(high.to(dtype)))
