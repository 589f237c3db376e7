"""Embedding and cross-entropy over a vocabulary cut unevenly over the ranks of a TP group (empty shares allowed)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hetero_megatron.comm import Group
from hetero_megatron.parallel.collectives import scatter_tokens


class VocabParallelEmbedding(nn.Module):
    """Rows ``[start, stop)`` of the embedding; the output is this rank's token shard [b, shard, hidden]."""

    def __init__(self, weight: nn.Parameter, group: Group, vocab: tuple[int, int], shards: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = weight  # [stop - start, hidden]; the same Parameter, so names and ties stay
        self.group, self.vocab, self.shards = group, vocab, shards

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start, stop = self.vocab
        mine = (tokens >= start) & (tokens < stop)
        if stop == start:
            partial = self.weight.new_zeros(*tokens.shape, self.weight.shape[1]) + self.weight.sum()
        else:
            rows = nn.functional.embedding((tokens - start).clamp(0, stop - start - 1), self.weight)
            partial = rows * mine[..., None]
        return scatter_tokens(partial, self.group, self.shards)


class ShareStatistics(NamedTuple):
    """What one share of the vocabulary knows about its tokens; the first four are [...] in at least fp32.

    ``exps`` [..., V_local]: exp(logit - top), in the memory of the logits. ``local``: the label's place in the share.
    """

    top: torch.Tensor
    total: torch.Tensor  # sum of exps
    target: torch.Tensor  # the label's logit - top
    mine: torch.Tensor  # bool: the label is in this share
    exps: torch.Tensor
    local: torch.Tensor


def share_statistics(logits: torch.Tensor, labels: torch.Tensor, vocab: tuple[int, int]) -> ShareStatistics:
    """From [..., V_local] logits in at least fp32, which are overwritten."""
    start, stop = vocab
    mine = (labels >= start) & (labels < stop)
    local = (labels - start).clamp(0, max(stop - start - 1, 0))
    top = torch.full(labels.shape, -torch.inf, dtype=logits.dtype, device=logits.device)
    total, target = torch.zeros_like(top), torch.zeros_like(top)
    if stop > start:
        top = logits.amax(-1)
        logits.sub_(top[..., None])
        target = logits.gather(-1, local[..., None]).squeeze(-1)
        total = logits.exp_().sum(-1)
    return ShareStatistics(top, total, target, mine, logits, local)


def combine_shares(share: ShareStatistics, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, log-sum-exp) per token over all shares: the same on all ranks of the group."""
    # One exchange of four numbers per token instead of three reductions; combined in rank order everywhere.
    row = torch.stack([share.top, share.total, share.target, share.mine.to(share.top.dtype)])
    tops, totals, targets, owns = group.gather_vectors(row.reshape(-1)).view(group.size, *row.shape).unbind(1)
    peak = tops.amax(0)
    spread = (totals * (tops - peak).exp()).sum(0).log()
    # Differences to the peak first, so that large logits lose no digits.
    return spread - torch.where(owns > 0, targets + (tops - peak), 0).sum(0), peak + spread


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss from logits whose last axis is one rank's share of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab: tuple[int, int]
    ) -> torch.Tensor:
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        share = share_statistics(wide, labels, vocab)
        loss, lse = combine_shares(share, group)
        if share.exps.shape[-1] > 0:
            share.exps.mul_((share.top - lse).exp()[..., None])
        ctx.save_for_backward(share.exps, share.local, share.mine)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, local, mine = ctx.saved_tensors
        if out.shape[-1] > 0:
            out.mul_(grad[..., None])
            out.scatter_add_(-1, local[..., None], torch.where(mine, -grad, 0)[..., None])
        return out.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab: tuple[int, int]
) -> torch.Tensor:
    """Loss per token, at least fp32, equal on all ranks of the group.

    Args:
        logits: [..., V_local], columns ``vocab`` of the full logits (V_local may be 0); fp32 and fp64 logits are
            overwritten, and backward may run once.
        labels: [...] int64, indices in the full vocabulary.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group, vocab)  # type: ignore[no-any-return]
