"""Cross-entropy per token."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def cross_entropy_reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """Turns the logits into probabilities in place: one [tokens, vocabulary] buffer instead of three."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        probs = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        probs.sub_(probs.amax(-1, keepdim=True))
        target = probs.gather(-1, labels[..., None])  # after the shift, so that large logits lose no digits
        total = probs.exp_().sum(-1, keepdim=True)
        loss = total.log() - target
        ctx.save_for_backward(probs, labels, total)
        ctx.dtype = logits.dtype
        return loss.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs, labels, total = ctx.saved_tensors
        grad = grad[..., None]
        out = probs.mul_(grad / total)
        out.scatter_add_(-1, labels[..., None], -grad.to(out.dtype))
        return out.to(ctx.dtype), None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[label] per token, in at least fp32.

    Args:
        logits: [..., V]; fp32 and fp64 logits are overwritten (nothing else needs them). labels: [...] int64.
            Backward may run once.
    """
    return _CrossEntropy.apply(logits, labels)  # type: ignore[no-any-return]
