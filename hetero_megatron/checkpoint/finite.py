"""NaN and Inf in weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_finite(values: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether no value is NaN or infinite, here or as ``dtype``; one pass, no extra memory."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values.detach())  # NaN is the smallest and the largest
    dtype = dtype or values.dtype
    return bool(torch.isfinite(low.to(dtype)) & torch.isfinite(high.to(dtype)))


def listed(names: Iterable[str], most: int = 8) -> str:
    """Distinct names for a message, in order."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
