"""Activations of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Saves its two inputs only; plain autograd would also keep silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise (Shazeer, 2020)."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


def gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """GELU, exact or by the tanh approximation (GPT-2)."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()
