"""Frozen weights in 8 bits: an int8 per element and an fp32 scale per output channel, as in torchao's int8 weight-only.

Values do not depend on how a plan cuts a weight: a scale is that of a whole output channel. Before each product a
weight becomes one of the activations' dtype, which lives as long as the product; backward makes it again.
"""

from __future__ import annotations

import torch

LEVELS = 127.5  # half of the range of int8
SMALLEST = torch.finfo(torch.float32).eps  # of scales: a channel of zeros has one, too


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., outputs, inputs], finite and of whole output channels -> int8 of that shape, and fp32 scales
    [..., outputs, 1]: the largest magnitude of a channel, over 127.5."""
    weight = weight.float()
    scales = (weight.abs().amax(-1, keepdim=True) / LEVELS).clamp(min=SMALLEST)
    return (weight * (1 / scales)).round_().clamp_(-128, 127).to(torch.int8), scales


def dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in ``dtype``: int8 [..., outputs, inputs] times fp32 [..., outputs, 1], rounded once."""
    if dtype == torch.float64:
        return weight.to(dtype).mul_(scales)
    return torch.mul(weight, scales, out=weight.new_empty(weight.shape, dtype=dtype))
