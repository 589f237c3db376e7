"""Embedding and cross-entropy over a vocabulary cut unevenly over the ranks of a TP group (empty shares allowed)."""

from __future__ import annotations

from typing import Any

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


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss from logits whose last axis is one rank's share of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab: tuple[int, int]
    ) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [..., V_local]
        start, stop = vocab
        mine = (labels >= start) & (labels < stop)
        local = (labels - start).clamp(0, max(stop - start - 1, 0))
        if stop > start:
            top = wide.amax(-1)
            probs = (wide - top[..., None]).exp_()
            total = probs.sum(-1)
            target = torch.where(mine, wide.gather(-1, local[..., None]).squeeze(-1), 0)
        else:
            probs, top = wide, torch.full(labels.shape, -torch.inf, dtype=wide.dtype, device=wide.device)
            total = target = torch.zeros_like(top)
        # One exchange of three numbers per token instead of three reductions; combined in rank order everywhere.
        every = group.gather_vectors(torch.stack([top, total, target]).reshape(-1)).view(group.size, 3, *labels.shape)
        peak = every[:, 0].amax(0)
        normalizer = (every[:, 1] * (every[:, 0] - peak).exp()).sum(0)
        loss = normalizer.log() + peak - every[:, 2].sum(0)
        if stop > start:
            probs *= ((top - peak).exp() / normalizer)[..., None]
        ctx.save_for_backward(probs, local, mine)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs, local, mine = ctx.saved_tensors
        if probs.shape[-1] == 0:
            return probs.to(ctx.dtype), None, None, None
        out = probs * grad[..., None]
        out.scatter_add_(-1, local[..., None], torch.where(mine, -grad, 0)[..., None])
        return out.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab: tuple[int, int]
) -> torch.Tensor:
    """Loss per token, at least fp32, equal on all ranks of the group.

    Args:
        logits: [..., V_local], columns ``vocab`` of the full logits (V_local may be 0).
        labels: [...] int64, indices in the full vocabulary.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group, vocab)  # type: ignore[no-any-return]
