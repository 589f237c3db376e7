"""Embedding and cross-entropy over a vocabulary cut unevenly over the ranks of a TP group (empty shares allowed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetero_megatron.comm import Group
from hetero_megatron.ops.bind import Split, bind
from hetero_megatron.ops.vocab_cross_entropy import KERNELS, SPEC
from hetero_megatron.parallel.collectives import scatter_tokens

VOCAB_CROSS_ENTROPY: Split = bind(SPEC, KERNELS[0])


class VocabParallelEmbedding(nn.Module):
    """Rows ``[start, stop)`` of the embedding; the output is this rank's token shard [b, shard, hidden]."""

    def __init__(self, weight: nn.Parameter, group: Group, vocab: tuple[int, int], shards: Sequence[int]) -> None:
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


def combine_shares(
    statistics: tuple[torch.Tensor, ...], labels: torch.Tensor, group: Group, vocab: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, peak, normalizer) per token over all shares of the vocabulary, the same on all ranks of the group; the
    log-sum-exp is peak + log(normalizer).

    Args:
        statistics: (top, total, target) of this rank's share, as the operator ``vocab_cross_entropy`` gives them.
    """
    top = statistics[0]
    mine = (labels >= vocab[0]) & (labels < vocab[1])
    # One exchange of four numbers per token instead of three reductions; combined in rank order everywhere.
    row = torch.stack([*statistics, mine.to(top.dtype)])
    tops, totals, targets, owns = group.gather_vectors(row.reshape(-1)).view(group.size, *row.shape).unbind(1)
    peak = tops.amax(0)
    normalizer = (totals * (tops - peak).exp()).sum(0)
    # Differences to the peak first, so that large logits lose no digits.
    loss = normalizer.log() - torch.where(owns > 0, targets + (tops - peak), 0).sum(0)
    return loss.masked_fill_(owns.sum(0) == 0, math.nan), peak, normalizer  # a label outside must not pass unseen


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss from logits whose last axis is one rank's share of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab: tuple[int, int], op: Split
    ) -> torch.Tensor:
        statistics, saved = op.forward(logits, labels, vocab[0])
        loss, peak, normalizer = combine_shares(statistics, labels, group, vocab)
        ctx.save_for_backward(labels, peak, normalizer, *saved)
        ctx.start, ctx.op = vocab[0], op
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        labels, peak, normalizer, *saved = ctx.saved_tensors
        (found,) = ctx.op.backward(grad, tuple(saved), labels, peak, normalizer, ctx.start)
        return found, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab: tuple[int, int], op: Split = VOCAB_CROSS_ENTROPY
) -> torch.Tensor:
    """Loss per token, at least fp32, equal on all ranks of the group.

    Args:
        logits: [..., V_local], columns ``vocab`` of the full logits (V_local may be 0); fp32 and fp64 logits are
            overwritten, and backward may run once.
        labels: [...] int64, indices in the full vocabulary.
        op: the operator ``vocab_cross_entropy`` of the kernel plan.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group, vocab, op)  # type: ignore[no-any-return]
