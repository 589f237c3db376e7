"""Output head and loss over chunks of tokens: the logits of all tokens never exist at once.

Forward keeps two numbers per token; backward computes each chunk's logits again. Both go through the operators
``gemm`` and ``vocab_cross_entropy`` of the kernel plan, also where one rank has the whole vocabulary; where it is cut
over a TP group, a chunk costs one exchange of four numbers per token in forward, none in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_megatron.comm import Group
from hetero_megatron.ops import gemm, softcap
from hetero_megatron.ops.bind import Split
from hetero_megatron.ops.kernel import Kernel
from hetero_megatron.parallel.vocab import VOCAB_CROSS_ENTROPY, combine_shares
from hetero_megatron.plan import Stage
from hetero_megatron.plan.memory import chunk_limit, widest_vocabulary
from hetero_megatron.spec import ModelSpec


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
        product: Kernel,
        cap: float | None,
    ) -> torch.Tensor:
        flat, targets = x.flatten(0, -2), labels.flatten()
        wide = torch.promote_types(x.dtype, torch.float32)
        made = torch.empty(3, *targets.shape, dtype=wide, device=x.device)
        for rows in _chunks(len(flat), chunk):
            logits = product.forward(flat[rows], weight, None)[0]
            logits = logits if cap is None else softcap(logits, cap)
            statistics, _ = op.forward(logits, targets[rows], vocab[0])
            made[0, rows], made[1, rows], made[2, rows] = combine_shares(statistics, targets[rows], group, vocab)
        loss, peak, normalizer = made.unbind()
        ctx.save_for_backward(x, weight, labels, peak, normalizer)
        ctx.chunk, ctx.start, ctx.op, ctx.product, ctx.cap = chunk, vocab[0], op, product, cap
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, labels, peak, normalizer = ctx.saved_tensors
        flat, targets, seeds = x.flatten(0, -2), labels.flatten(), grad.flatten()
        dx = torch.empty_like(flat)
        dw = torch.zeros_like(weight, dtype=peak.dtype)  # chunks are added up in at least fp32
        for rows in _chunks(len(flat), ctx.chunk):
            # A provider may keep state of its own, so its forward runs again, not only the product.
            logits = ctx.product.forward(flat[rows], weight, None)[0]
            slope = None
            if ctx.cap is not None:
                logits = softcap(logits, ctx.cap)
                # Of c tanh(x / c); made here, because backward may overwrite the logits.
                slope = 1 - (logits.to(peak.dtype) / ctx.cap).square()
            _, saved = ctx.op.forward(logits, targets[rows], ctx.start)
            (dy,) = ctx.op.backward(seeds[rows], saved, targets[rows], peak[rows], normalizer[rows], ctx.start)
            dy = dy if slope is None else (dy * slope).to(dy.dtype)
            del logits, saved, slope
            dx[rows] = ctx.product.parts["input"](dy, weight)
            ctx.product.parts["weight"](dy, flat[rows], dw)
        return dx.view(x.shape), dw.to(weight.dtype), None, None, None, None, None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, tokens)) for i in range(0, tokens, chunk)]


def loss_chunk(stage: Stage, unit: int, spec: ModelSpec, dtype: torch.dtype, logits_bytes: int) -> int | None:
    """Tokens per chunk of head and loss on the ranks of a unit; None: all at once, because the logits of a micro-batch
    are at most ``logits_bytes`` on every rank of the stage (whose ranks all call the same operators)."""
    if not stage.head:
        return None
    sizes = [(u.micro_batch_tokens, u.tp_split) for u in stage.units]
    if chunk_limit(spec, sizes, dtype.itemsize, logits_bytes) is None:
        return None
    per_token = widest_vocabulary(spec, stage.units[unit].tp_split) * max(dtype.itemsize, 4)
    return max(logits_bytes // 4 // per_token, 1)  # a chunk's logits, probabilities and their gradients


def chunked_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    group: Group,
    vocab: tuple[int, int],
    op: Split = VOCAB_CROSS_ENTROPY,
    product: Kernel = gemm.KERNELS[0],
    cap: float | None = None,
) -> torch.Tensor:
    """Cross-entropy of x W^T per token, in at least fp32, ``chunk`` tokens at a time.

    Args:
        x: [..., h], equal on all ranks of ``group``; weight: [V_local, h], rows ``vocab`` of the whole.
        labels: [...] int64, indices in the whole vocabulary.
        chunk: the same on all ranks of the group.
        op, product: the operator ``vocab_cross_entropy`` and the kernel of ``gemm`` of the kernel plan.
        cap: logits become cap x tanh(logit / cap).

    Returns:
        [...], equal on all ranks of the group. The gradient of x is this rank's partial sum.
    """
    return _ChunkedLoss.apply(x, weight, labels, chunk, group, vocab, op, product, cap)  # type: ignore[no-any-return]
