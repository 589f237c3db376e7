"""The optimizers: AdamW through its operator, and SGD. States are named as torch names them.

torch's own optimizers would do, but the first one that is made imports the compiler: half a CPU-second per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Optimizer(Protocol):
    """What is needed of an optimizer; torch's have it.

    Attributes:
        param_groups: dicts with ``params``, ``lr``, ``weight_decay``; state: by parameter, made at its first step.
    """

    param_groups: list[dict[str, Any]]
    state: Any  # a mapping, invariant in what it holds

    def step(self) -> object: ...


OptimizerFactory = Callable[[list[dict[str, object]]], Optimizer]  # groups: dicts with ``params`` and ``decay``


class ScalingOptimizer:
    """An optimizer whose step also scales the gradients, and writes new values to ``copies`` of a group's parameters
    where it has some: in one pass, where its kernel can."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0, "weight_decay": 0.0, **group} for group in groups]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> None:
        """Update every parameter that has a gradient, which counts times ``grad_scale`` (and may be overwritten)."""
        for group in self.param_groups:
            at = [i for i, p in enumerate(group["params"]) if p.grad is not None]
            params, copies = ([group[key][i] for i in at] if key in group else [] for key in ("params", "copies"))
            if params:
                states = [self.state[p] if p in self.state else self.state.setdefault(p, {}) for p in params]
                rates = group["lr"], group["weight_decay"], grad_scale
                self._update(params, [p.grad for p in params], states, copies, *rates)

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        raise NotImplementedError


class AdamW(ScalingOptimizer):
    """Loshchilov and Hutter, 2019.

    Args:
        kernel: the operator ``adamw``.
    """

    def __init__(
        self, groups: list[dict[str, object]], kernel: Callable[..., Any], betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups)
        self.kernel, self.betas, self.eps = kernel, betas, eps

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
        first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        self.kernel(params, grads, first, second, copies, states[0]["step"], lr, *self.betas, self.eps, decay, scale)


class SGD(ScalingOptimizer):
    """With weight decay added to the gradient and momentum of the sum, as torch has it."""

    def __init__(self, groups: list[dict[str, object]], momentum: float) -> None:
        super().__init__(groups)
        self.momentum = momentum

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        if scale != 1.0:
            torch._foreach_mul_(grads, scale)
        if decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        if self.momentum:
            for p, state in zip(params, states, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
            grads = buffers
        torch._foreach_add_(params, grads, alpha=-lr)
        if copies:
            torch._foreach_copy_(copies, params)
