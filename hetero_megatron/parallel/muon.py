"""Muon: momentum, made orthogonal by Newton-Schulz steps, for matrices (Jordan et al., 2024; Liu et al., 2025)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_megatron.parallel.optimizer import AdamW, ScalingOptimizer
from hetero_megatron.plans.matrices import MOMENTUM
from hetero_megatron.spec.muon import MuonRates

LEAST_NORM = 1e-7  # what a matrix is divided by at least, as torch.optim.Muon has it: zeros stay zeros


def newton_schulz(matrix: torch.Tensor, rates: MuonRates) -> torch.Tensor:
    """About U V' of a matrix [rows, columns] = U S V', with singular values near 1. Zeros stay zeros, and a value that
    is not finite makes all of them NaN: a step with such gradients is not taken (``Runtime.train_step``)."""
    is_wide = matrix.size(0) <= matrix.size(1)
    x = matrix if is_wide else matrix.T
    x = x / x.norm().clamp(min=LEAST_NORM)
    for a, b, c in rates.each_step():
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if is_wide else x.T


class Muon(ScalingOptimizer):
    """Groups with a key ``matrices`` (the dtype of the model's weights) are updated here, others by AdamW.

    A master is [rows, columns] or, of an expert, [1, rows, columns]. Newton-Schulz runs in bf16 where weights have 16
    bits, as in torch.optim.Muon, else in the masters' dtype.

    Args:
        others: AdamW of some groups.
    """

    def __init__(
        self, groups: list[dict[str, object]], rates: MuonRates, others: Callable[[list[dict[str, object]]], AdamW]
    ) -> None:
        super().__init__(groups)
        self.rates, self._others = rates, others([])
        self._others.state = self.state
        matrix_groups = [group["matrices"] for group in self.param_groups if "matrices" in group]
        self._dtype = torch.bfloat16 if matrix_groups and matrix_groups[0].itemsize == 2 else None

    def step_group(self, group: dict[str, Any], grad_scale: float) -> None:
        if "matrices" in group:
            super().step_group(group, grad_scale)
        else:
            self._others.step_group(group, grad_scale)

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        rates = self.rates
        if scale != 1.0:
            torch._foreach_mul_(grads, scale)
        for p, grad, state in zip(params, grads, states, strict=True):  # one at a time, to bound the memory
            if not state:
                state[MOMENTUM] = torch.zeros_like(p)
            momentum = state[MOMENTUM].lerp_(grad, 1 - rates.momentum)
            lookahead = grad.lerp(momentum, rates.momentum) if rates.nesterov else momentum
            rows, columns = p.shape[-2:]
            update = newton_schulz(lookahead.view(rows, columns).to(self._dtype or p.dtype), rates)
            p.mul_(1 - lr * decay).add_(update.view(p.shape), alpha=-lr * rates.scale(rows, columns))
        if copies:
            torch._foreach_copy_(copies, params)
