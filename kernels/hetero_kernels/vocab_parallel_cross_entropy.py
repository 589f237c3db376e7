"""The local parts of cross-entropy over a vocabulary that is cut between ranks, unevenly if need be.

A rank makes three numbers per token of its columns; the caller merges those of all ranks (one MAX and one SUM of
the packed rest, or one all-gather and :func:`merge_stats`) and hands the result back for the gradient.
"""

from __future__ import annotations

import torch

from hetero_kernels.cross_entropy import _backward, _forward, _output
from hetero_kernels.limits import Limits, limits_of, wide


def vocab_stats_reference(
    logits: torch.Tensor, target: torch.Tensor, vocab_start: int, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`vocab_stats`."""
    x = logits.to(wide(logits.dtype))
    width = x.shape[-1]
    top = x.amax(-1) if width else x.new_full(target.shape, float("-inf"))
    total = (x - top[..., None]).exp().sum(-1)
    local = target - vocab_start
    found = (local >= 0) & (local < width) & (target != ignore_index)
    picked = x.gather(-1, local.where(found, 0)[..., None]).squeeze(-1) if width else x.new_zeros(target.shape)
    return top, total, picked.where(found, 0.0)


def vocab_stats(
    logits: torch.Tensor, target: torch.Tensor, vocab_start: int, *, ignore_index: int = -100,
    limits: Limits | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """logits [..., v_local], target [...] in the whole vocabulary -> maximum, sum of exp(x - maximum), target's logit.

    All [...] in at least fp32. The third is 0 where the target is not here or ignored, so a sum over ranks gives it.
    Without columns (v_local = 0): -inf, 0, 0.
    """
    limits = limits or limits_of(logits.device)
    top, total, picked = (torch.empty(target.shape, dtype=wide(logits.dtype), device=logits.device) for _ in range(3))
    if logits.shape[-1] == 0:
        return top.fill_(float("-inf")), total.zero_(), picked.zero_()
    _forward(logits, target, top, total, picked, vocab_start, ignore_index, (0.0, 0.0, 0.0, True), limits)
    return top, total, picked


def merge_stats(
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of all ranks -> (loss before ignored tokens are zeroed, log-sum-exp), each [...]."""
    top, total, picked = (torch.stack(column) for column in zip(*parts, strict=True))
    highest = top.amax(0)
    shift = (total * (top - highest).exp()).sum(0).log()
    return shift + (highest - picked.sum(0)), highest + shift


def vocab_stats_bwd(
    dloss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, vocab_start: int, lse: torch.Tensor, *,
    ignore_index: int = -100, inplace: bool = False, limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """lse [...] of the whole vocabulary -> gradient of the local logits; ``inplace``: in their memory."""
    limits = limits or limits_of(logits.device)
    return _backward(
        dloss, logits, target, lse, vocab_start, ignore_index, 1, (0.0, 0.0, 0.0), _output(logits, inplace), limits
    )
