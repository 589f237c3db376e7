"""Embedding and cross-entropy over a vocabulary cut unevenly over the ranks of a TP group (empty shares allowed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetero_megatron.comm import Group
from hetero_megatron.ops import gemm, softcap
from hetero_megatron.ops.bind import Split, bind
from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.ops.linear_cross_entropy import KnownLoss, with_known_gradient
from hetero_megatron.ops.spec import Kernel
from hetero_megatron.ops.vocab_cross_entropy import KERNELS, SPEC
from hetero_megatron.parallel.collectives import scatter_tokens
from hetero_megatron.plans import Stage
from hetero_megatron.plans.memory.activations import chunk_limit, widest_vocabulary
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import chunk_tokens

VOCAB_CROSS_ENTROPY: Split = bind(SPEC, KERNELS[0])


class VocabParallelEmbedding(nn.Module):
    """Rows ``[start, stop)`` of the embedding; the output is this rank's token shard [b, shard, hidden]."""

    def __init__(self, weight: nn.Parameter, group: Group, vocab: tuple[int, int], shards: Sequence[int]) -> None:
        super().__init__()
        self.weight = weight  # [stop - start, hidden]; the same Parameter, so names and ties stay
        self.group, self.vocab, self.shards = group, vocab, shards

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start, stop = self.vocab
        is_local = (tokens >= start) & (tokens < stop)
        if stop == start:
            partial = self.weight.new_zeros(*tokens.shape, self.weight.shape[1]) + self.weight.sum()
        else:
            rows = nn.functional.embedding((tokens - start).clamp(0, stop - start - 1), self.weight)
            partial = rows * is_local[..., None]
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
    is_local = (labels >= vocab[0]) & (labels < vocab[1])
    # One exchange of four numbers per token instead of three reductions; combined in rank order everywhere.
    row = torch.stack([*statistics, is_local.to(top.dtype)])
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
        (gradient,) = ctx.op.backward(grad, tuple(saved), labels, peak, normalizer, ctx.start)
        return gradient, None, None, None, None


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


def vocab_loss(
    gradients: WeightGradients,
    group: Group,
    vocab: tuple[int, int],
    op: Split = VOCAB_CROSS_ENTROPY,
    product: Kernel = gemm.KERNELS[0],
    cap: float | None = None,
) -> KnownLoss:
    """Cross-entropy of x W^T per token, in at least fp32, as
    :func:`~hetero_megatron.ops.linear_cross_entropy.with_known_gradient` has it: for training the gradient of the
    losses must be given. x [..., h] and the losses [...] are equal on all ranks of ``group``, and so must ``dloss`` be;
    the gradient of x is this rank's partial sum.

    Args:
        gradients: who takes the gradient of the weight, [V_local, h], rows ``vocab`` of the whole; none is made of a
            frozen one.
        op, product: the operator ``vocab_cross_entropy`` and the kernel of ``gemm`` of the kernel plan.
        cap: logits become cap x tanh(logit / cap).
    """

    def logits_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        logits: torch.Tensor = product.forward(x, weight, bias)[0]
        return logits if cap is None else softcap(logits, cap)

    @torch.no_grad()
    def losses(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        statistics, _ = op.forward(logits_of(x, weight, bias), labels, vocab[0])
        return combine_shares(statistics, labels, group, vocab)[0]

    def together(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
        into: torch.Tensor | None = None, beta: float = 1.0, bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, object, object, object]:  # fmt: skip
        logits, slope = logits_of(x, weight, bias), None
        if cap is not None:
            # Of c tanh(x / c); made here, because the operator may overwrite the logits.
            slope = 1 - (logits.to(dloss.dtype) / cap).square()
        statistics, saved = op.forward(logits, labels, vocab[0])
        loss, peak, normalizer = combine_shares(statistics, labels, group, vocab)
        (dy,) = op.backward(dloss, saved, labels, peak, normalizer, vocab[0])
        dy = dy if slope is None else (dy * slope).to(dy.dtype)
        del logits, saved, slope
        dx = product.parts["input"](dy, weight)
        dw = product.parts["weight"](dy, x, into, beta) if weight.requires_grad else None
        db = dy.flatten(0, -2).sum(0) if bias is not None and bias.requires_grad else None
        return loss, dx, dw, db

    return with_known_gradient(losses, together, gradients)


def in_chunks(
    loss: KnownLoss, chunk: int, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    dloss: torch.Tensor | None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``loss(x, weight, labels, dloss)``, with the head's bias where it has one, ``chunk`` tokens at a time: the same
    on all ranks of a TP group."""
    with_bias = {} if bias is None else {"bias": bias}
    rows = x.flatten(0, -2).split(chunk), labels.flatten().split(chunk)
    seeds = [None] * len(rows[0]) if dloss is None else dloss.flatten().split(chunk)
    parts = [loss(a, weight, b, seed, **with_bias) for a, b, seed in zip(*rows, seeds, strict=True)]
    return torch.cat(parts).view(labels.shape)


def loss_chunk(stage: Stage, unit: int, spec: ModelSpec, dtype: torch.dtype, logits_bytes: int) -> int | None:
    """Of a stage with a head, tokens per chunk of head and loss on the ranks of a unit, whole tiles where they are that
    many; None: all at once, because the logits of a micro-batch are at most ``logits_bytes`` on every rank of the stage
    (whose ranks all go through chunks, or none)."""
    sizes = [(u.micro_batch_tokens, u.tp_split) for u in stage.units]
    if chunk_limit(spec, sizes, dtype.itemsize, logits_bytes) is None:
        return None
    per_token = widest_vocabulary(spec, stage.units[unit].tp_split) * max(dtype.itemsize, 4)
    return chunk_tokens(logits_bytes, per_token)
