"""silu(gate) * up: a kernel with its backward."""

from __future__ import annotations

import torch

from hetero_megatron.ops import Capability, Kernel
from hetero_megatron.ops.spec import VENDOR


def forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
    """gate, up: [..., f] -> ([..., f],). Backward gets what the spec saves: gate and up."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(wide)
    return ((g * torch.sigmoid(g) * up.to(wide)).to(gate.dtype),)


def backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> gradients of gate and up, computed in at least fp32."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), dy.to(wide)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)


KERNEL = Kernel(
    "swiglu",
    "example_vendor",
    VENDOR,
    forward,
    backward,
    capability=Capability(platforms=("example_vendor",), dtypes=(torch.float32, torch.bfloat16, torch.float16)),
)
