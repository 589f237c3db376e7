"""Output head and loss over chunks of tokens: the logits of all tokens never exist at once.

The gradient of each token's loss is known when its logits are there, so that a chunk's gradients are made at once and
nothing is computed again: three products. They go through the operators ``linear_cross_entropy`` or, where a vocabulary
is cut over a TP group, logits are soft-capped or the head is frozen, ``gemm`` and ``vocab_cross_entropy`` of the kernel
plan; there a chunk costs one exchange of four numbers per token.
"""

from __future__ import annotations

import torch

from hetero_megatron.comm import Group
from hetero_megatron.ops import gemm, softcap
from hetero_megatron.ops.bind import Split
from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.ops.kernel import Kernel
from hetero_megatron.ops.linear_cross_entropy import KnownLoss, with_known_gradient
from hetero_megatron.parallel.vocab import VOCAB_CROSS_ENTROPY, combine_shares
from hetero_megatron.plan import Stage
from hetero_megatron.plan.memory.activations import chunk_limit, widest_vocabulary
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import chunk_tokens


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

    def logits_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = product.forward(x, weight, None)[0]
        return logits if cap is None else softcap(logits, cap)

    @torch.no_grad()
    def losses(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        statistics, _ = op.forward(logits_of(x, weight), labels, vocab[0])
        return combine_shares(statistics, labels, group, vocab)[0]

    def together(
        x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
        into: torch.Tensor | None = None, beta: float = 1.0,
    ) -> tuple[torch.Tensor, object, object]:  # fmt: skip
        logits, slope = logits_of(x, weight), None
        if cap is not None:
            # Of c tanh(x / c); made here, because the operator may overwrite the logits.
            slope = 1 - (logits.to(dloss.dtype) / cap).square()
        statistics, saved = op.forward(logits, labels, vocab[0])
        loss, peak, normalizer = combine_shares(statistics, labels, group, vocab)
        (dy,) = op.backward(dloss, saved, labels, peak, normalizer, vocab[0])
        dy = dy if slope is None else (dy * slope).to(dy.dtype)
        del logits, saved, slope
        dx = product.parts["input"](dy, weight)
        return loss, dx, product.parts["weight"](dy, x, into, beta) if weight.requires_grad else None

    return with_known_gradient(losses, together, gradients)


def in_chunks(
    loss: KnownLoss, chunk: int, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    dloss: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``loss(x, weight, labels, dloss)``, ``chunk`` tokens at a time: the same on all ranks of a TP group."""
    rows = x.flatten(0, -2).split(chunk), labels.flatten().split(chunk)
    seeds = [None] * len(rows[0]) if dloss is None else dloss.flatten().split(chunk)
    return torch.cat([loss(a, weight, b, seed) for a, b, seed in zip(*rows, seeds, strict=True)]).view(labels.shape)


def loss_chunk(stage: Stage, unit: int, spec: ModelSpec, dtype: torch.dtype, logits_bytes: int) -> int | None:
    """Tokens per chunk of head and loss on the ranks of a unit, whole tiles where they are that many; None: all at
    once, because the logits of a micro-batch are at most ``logits_bytes`` on every rank of the stage (whose ranks all
    go through chunks, or none)."""
    if not stage.head:
        return None
    sizes = [(u.micro_batch_tokens, u.tp_split) for u in stage.units]
    if chunk_limit(spec, sizes, dtype.itemsize, logits_bytes) is None:
        return None
    per_token = widest_vocabulary(spec, stage.units[unit].tp_split) * max(dtype.itemsize, 4)
    return chunk_tokens(logits_bytes, per_token)
