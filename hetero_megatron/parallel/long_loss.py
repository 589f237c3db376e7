"""Output head and loss over chunks of tokens: the logits of all tokens never exist at once.

Forward keeps one log-sum-exp per token; backward computes each chunk's logits again. Works over a vocabulary that
is cut over a TP group, too: a chunk then costs one exchange of four numbers per token in forward, none in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_megatron.comm import Group
from hetero_megatron.ops.bind import Split
from hetero_megatron.parallel.vocab import VOCAB_CROSS_ENTROPY, combine_shares


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk: int,
        group: Group,
        vocab: tuple[int, int],
        op: Split,
    ) -> torch.Tensor:
        flat, targets = x.flatten(0, -2), labels.flatten()
        wide = torch.promote_types(x.dtype, torch.float32)
        loss, lse = (torch.empty(targets.shape, dtype=wide, device=x.device) for _ in range(2))
        for rows in _chunks(len(flat), chunk):
            statistics, _ = op.forward(_logits(flat[rows], weight, wide), targets[rows], vocab[0])
            loss[rows], peak, normalizer = combine_shares(statistics, targets[rows], group, vocab)
            lse[rows] = peak + normalizer.log()
        ctx.save_for_backward(x, weight, labels, lse)
        ctx.chunk, ctx.vocab = chunk, vocab
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, labels, lse = ctx.saved_tensors
        start, stop = ctx.vocab
        flat, targets, seeds = x.flatten(0, -2), labels.flatten(), grad.flatten()
        dx = torch.empty_like(flat)
        dw = torch.zeros_like(weight, dtype=lse.dtype)
        for rows in _chunks(len(flat), ctx.chunk):
            probs = _logits(flat[rows], weight, lse.dtype).sub_(lse[rows, None]).exp_().mul_(seeds[rows, None])
            if stop > start:
                mine = (targets[rows] >= start) & (targets[rows] < stop)
                local = (targets[rows] - start).clamp(0, stop - start - 1)
                probs.scatter_add_(-1, local[:, None], torch.where(mine, -seeds[rows], 0)[:, None].to(probs.dtype))
            narrow = probs.to(x.dtype)
            dx[rows] = narrow @ weight
            dw += narrow.t() @ flat[rows]
        return dx.view(x.shape), dw.to(weight.dtype), None, None, None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, tokens)) for i in range(0, tokens, chunk)]


def _logits(x: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """[tokens, rows of weight], rounded as the unchunked head's are."""
    return torch.nn.functional.linear(x, weight).to(wide)


def chunked_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    group: Group,
    vocab: tuple[int, int],
    op: Split = VOCAB_CROSS_ENTROPY,
) -> torch.Tensor:
    """Cross-entropy of x W^T per token, in at least fp32, ``chunk`` tokens at a time.

    Args:
        x: [..., h], equal on all ranks of ``group``; weight: [V_local, h], rows ``vocab`` of the whole.
        labels: [...] int64, indices in the whole vocabulary.
        chunk: the same on all ranks of the group.
        op: the operator ``vocab_cross_entropy`` of the kernel plan.

    Returns:
        [...], equal on all ranks of the group. The gradient of x is this rank's partial sum.
    """
    return _ChunkedLoss.apply(x, weight, labels, chunk, group, vocab, op)  # type: ignore[no-any-return]
