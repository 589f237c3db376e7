"""Differentiable exchanges inside one tensor-parallel group, over uneven token shards.

Activations are [batch, tokens, hidden]; with sequence parallelism each rank holds an interval of the token axis.
``gather_tokens`` and ``scatter_tokens`` are adjoint: the backward of one is the forward of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero_megatron.comm import Group


def _gather(x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
    """[b, shards[index], h] -> [b, sum(shards), h]."""
    b, _, h = x.shape
    send = x.reshape(-1).repeat(group.size)
    counts = [b * n * h for n in shards]
    flat = group.all_to_all(send, [x.numel()] * group.size, counts).wait()
    assert flat is not None
    parts = [part.view(b, n, h) for part, n in zip(flat.split(counts), shards, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _scatter_sum(x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
    """Partial sums [b, sum(shards), h] on every rank -> the summed [b, shards[index], h], added in rank order."""
    b, _, h = x.shape
    own = shards[group.index]
    send = torch.cat([part.reshape(-1) for part in x.split(list(shards), dim=1)])
    flat = group.all_to_all(send, [b * n * h for n in shards], [b * own * h] * group.size).wait()
    assert flat is not None
    parts = flat.view(group.size, b, own, h)
    if x.dtype in (torch.float16, torch.bfloat16):
        return parts.sum(0, dtype=torch.float32).to(x.dtype)
    return parts.sum(0)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, shards: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.shards = group, shards
        return _gather(x, group, shards)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scatter_sum(grad, ctx.group, ctx.shards), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, shards: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.shards = group, shards
        return _scatter_sum(x, group, shards)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, ctx.group, ctx.shards), None, None


def gather_tokens(x: torch.Tensor, group: Group, shards: tuple[int, ...]) -> torch.Tensor:
    """All tokens from sequence-parallel shards: [b, shards[index], h] -> [b, sum(shards), h]."""
    return x if group.size == 1 else _GatherTokens.apply(x, group, shards)  # type: ignore[no-any-return]


def scatter_tokens(x: torch.Tensor, group: Group, shards: tuple[int, ...]) -> torch.Tensor:
    """Sum of all ranks' partial [b, sum(shards), h], of which each keeps its tokens [b, shards[index], h]."""
    return x if group.size == 1 else _ScatterTokens.apply(x, group, shards)  # type: ignore[no-any-return]
