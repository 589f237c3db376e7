"""From a last stage's output to the sum of token losses."""

from __future__ import annotations

import torch

from hetero_megatron.comm import Group
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import GPTStage
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.linear_cross_entropy import KnownLoss
from hetero_megatron.parallel.vocab import in_chunks, vocab_loss, vocab_parallel_cross_entropy
from hetero_megatron.pipeline.rank_stage import RankStage


class StageLoss:
    """Of a stage with or without a head; it may take over what the head does (``Head.in_loss``).

    Args:
        group: the unit's ranks.
        chunk: see :meth:`RankStage.loss_chunk`.

    Attributes:
        head: head and loss in one, where logits never exist as a whole; None: the model applies the head.
    """

    def __init__(
        self, here: RankStage, model: GPTStage, kernels: KernelPlan, group: Group, chunk: int | None
    ) -> None:
        self._model, self._kernels, self._group, self._chunk = model, kernels, group, chunk
        self._vocab = here.share.vocab
        self.head: KnownLoss | None = None
        if "linear_cross_entropy" in kernels.choices:
            self.head = kernels.linear_cross_entropy
        elif chunk is not None:
            assert "vocab_cross_entropy" in kernels.choices, "a plan for other logits_bytes"
            self.head = vocab_loss(
                kernels.weight_gradients, group, self._vocab, kernels.vocab_cross_entropy,
                kernels.choices["gemm"].kernel, here.spec.logit_softcap,
            )  # fmt: skip
        if self.head is not None:
            model.lm_head.in_loss = True

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        """Sum of the losses of tokens that count: a tensor [], in at least fp32.

        Args:
            out: logits [b, s, V_local], or the head's input [b, s, h] where ``head`` is not None.
            seed: gradient of the sum with which backward will start.
        """
        losses = self._token_losses(out, batch, seed)
        return losses.sum() if batch.loss_mask is None else (losses * batch.loss_mask).sum()

    def _token_losses(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        kernels, labels = self._kernels, batch.labels
        if self.head is not None:
            dloss = None
            if torch.is_grad_enabled():
                wide = torch.promote_types(out.dtype, torch.float32)
                dloss = torch.full(labels.shape, seed, dtype=wide, device=labels.device)
                dloss = dloss if batch.loss_mask is None else dloss * batch.loss_mask
            chunk = labels.numel() if self._chunk is None else self._chunk
            return in_chunks(self.head, max(chunk, 1), out, self._model.lm_head.matrix, labels, dloss)
        if self._group.size > 1:
            return vocab_parallel_cross_entropy(out, labels, self._group, self._vocab, kernels.vocab_cross_entropy)
        return kernels.cross_entropy(out, labels)  # type: ignore[no-any-return]
