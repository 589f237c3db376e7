"""Rotary position embedding (Su et al., 2021) in Hugging Face's half layout: feature i turns with i + d/2."""

from __future__ import annotations

import math
from typing import Any

import torch

from hetero_megatron.spec import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position, [head_dim / 2] fp64 on the CPU."""
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    # Llama 3: long wavelengths are stretched, short ones kept, those between are blended.
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return freqs / scaling.factor * (1 - blend) + freqs * blend


def rope_tables(positions: torch.Tensor, freqs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [b, s, 1, d / 2] in at least fp32; angles in fp64, so that long positions stay exact."""
    angles = positions.to(torch.float64)[..., None, None] * freqs.to(positions.device)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[b, s, heads, d] turned by [b, s, 1, d / 2]."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class _Rope(torch.autograd.Function):
    """A rotation: backward is the rotation by the opposite angle, so x need not be saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """``rope_reference`` by the angle times ``sign``, written straight into the result."""
    half = x.shape[-1] // 2
    wide = x.to(cos.dtype)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    a, b = wide[..., :half], wide[..., half:]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin, value=sign)
    return out.to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See :func:`rope_reference`."""
    return _Rope.apply(x, cos, sin)  # type: ignore[no-any-return]
