"""Differentiable exchanges inside one tensor-parallel group, over uneven token shards.

Activations are [batch, tokens, hidden]; with sequence parallelism each rank holds an interval of the token axis.
``gather_tokens`` and ``scatter_tokens`` are adjoint: the backward of one is the forward of the other.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from hetero_megatron.comm import Group


def _gather(x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
    """[b, shards[index], h] -> [b, sum(shards), h]."""
    b, n, h = x.shape
    if group.has_collectives and len(set(shards)) == 1:
        gathered = x.new_empty(group.size, b, n, h)
        group.all_gather(x.contiguous().view(-1), gathered.view(-1)).wait()
        return gathered.transpose(0, 1).reshape(b, group.size * n, h)  # of one sequence: as it is
    if b == 1:  # intervals of tokens are intervals of memory: they arrive where they belong
        out = x.new_empty(1, sum(shards), h)
        parts = list(out.split(list(shards), dim=1))
        handle = group.exchange([x.contiguous()] * group.size, parts)
        parts[group.index].copy_(x)
        handle.wait()
        return out
    parts = [x if i == group.index else x.new_empty(b, n, h) for i, n in enumerate(shards)]
    group.exchange([x.contiguous()] * group.size, parts).wait()
    return torch.cat(parts, dim=1)


def _scatter_sum(x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
    """Partial sums [b, sum(shards), h] on every rank -> the summed [b, shards[index], h], added in rank order; by a
    library of devices, where it can, in its own order: where that does not round to 16 bits after every addition, or
    the group allows it (``narrow_sums``)."""
    wide_dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    in_library = wide_dtype == x.dtype or group.narrow_sums
    if group.has_collectives and len(set(shards)) == 1 and in_library:
        b, _, h = x.shape
        sums = x.new_empty(b, shards[0], h)
        rows = x.reshape(b, group.size, shards[0], h).transpose(0, 1).contiguous()
        group.reduce_scatter(rows.view(-1), sums.view(-1)).wait()
        return sums
    send = list(x.split(list(shards), dim=1))
    own_part = send[group.index]
    parts = [own_part if i == group.index else torch.empty_like(own_part, memory_format=torch.contiguous_format)
             for i in range(group.size)]  # fmt: skip
    group.exchange([part if i == group.index else part.contiguous() for i, part in enumerate(send)], parts).wait()
    total = torch.add(parts[0].to(wide_dtype), parts[1])
    for part in parts[2:]:
        total += part
    return total.to(x.dtype)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.shards = group, shards
        return _gather(x, group, shards)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scatter_sum(grad, ctx.group, ctx.shards), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.shards = group, shards
        return _scatter_sum(x, group, shards)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, ctx.group, ctx.shards), None, None


def gather_tokens(x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
    """All tokens from sequence-parallel shards: [b, shards[index], h] -> [b, sum(shards), h]."""
    return x if group.size == 1 else _GatherTokens.apply(x, group, shards)  # type: ignore[no-any-return]


def scatter_tokens(x: torch.Tensor, group: Group, shards: Sequence[int]) -> torch.Tensor:
    """Sum of all ranks' partial [b, sum(shards), h], of which each keeps its tokens [b, shards[index], h]."""
    return x if group.size == 1 else _ScatterTokens.apply(x, group, shards)  # type: ignore[no-any-return]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum(grad, ctx.group), None


def _sum(x: torch.Tensor, group: Group, among: Container[int] | None = None) -> torch.Tensor:
    """Added in rank order, so that all ranks get the same bits."""
    x, nothing = x.contiguous(), x.new_empty(0)
    adds = [among is None or rank in among for rank in group.ranks]
    parts = [x if i == group.index else torch.empty_like(x if added else nothing) for i, added in enumerate(adds)]
    group.exchange([x if added else nothing for added in adds], parts).wait()
    return torch.stack([part for part, added in zip(parts, adds, strict=True) if added]).sum(0)


def max_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The largest of all ranks' x, element by element; without gradients."""
    x = x.contiguous()
    parts = [x if i == group.index else torch.empty_like(x) for i in range(group.size)]
    group.exchange([x] * group.size, parts).wait()
    return torch.stack(parts).amax(0)


def sum_of_ranks(x: torch.Tensor, group: Group, among: Container[int] | None = None) -> torch.Tensor:
    """The sum of all ranks' x, with the same bits on all; no gradient. ``among``: of these ranks alone, this one among
    them; the others of the group call it at the same time, for theirs."""
    return x if group.size == 1 else _sum(x, group, among)


def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of all ranks' x, of which each rank uses its copy: so the gradient is the sum of all ranks' gradients."""
    return x if group.size == 1 else _SumOverRanks.apply(x, group)  # type: ignore[no-any-return]
