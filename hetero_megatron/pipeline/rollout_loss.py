"""The loss of sampled answers (GRPO): of each token the clipped ratio of its probability to that under the policy that
sampled it, times the advantage of its answer; and the divergence from a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_megatron.data.batch import Batch
from hetero_megatron.pipeline.stage_model import StageLoss
from hetero_megatron.pipeline.stage_work import ComparedLoss
from hetero_megatron.spec.grpo import Grpo

_Rows = tuple[int, ...]  # of a micro-batch: the places of its rows in the global batch


def token_losses(
    g: Grpo, policy: torch.Tensor, old: torch.Tensor, reference: torch.Tensor | None, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses [b, s], facts [facts, b, s]) of tokens.

    Args:
        policy, old, reference: log-probabilities [b, s] under the model, the policy that sampled, and the reference.
        advantages: [b, 1].
    """
    ratio = torch.exp(policy - old)
    losses = -torch.min(ratio * advantages, ratio.clamp(1 - g.eps_lower, 1 + g.eps_upper) * advantages)
    low, high = (ratio < 1 - g.eps_lower) & (advantages < 0), (ratio > 1 + g.eps_upper) & (advantages > 0)
    facts = [low, high, low | high]
    if reference is not None:
        difference = reference - policy
        divergence = torch.exp(difference) - difference - 1  # k3 of Schulman, 2020: unbiased, and never negative
        divergence = divergence * ratio if g.weighs_kl else divergence
        losses = losses + g.beta * divergence
        facts.append(divergence.detach())
    return losses, torch.stack([fact.to(losses.dtype) for fact in facts])


class RolloutLoss(ComparedLoss):
    """The loss of a stage with a head; called as :class:`StageLoss`.

    Args:
        tokens: the losses of single tokens.

    Attributes:
        first: global index of the first row of the step's batch.
        sampled: log-probabilities [rows of a batch, positions of a sequence], fp64, by which the answers were sampled,
            where that was by other weights than those of the first step on them; None: it was by these.
    """

    def __init__(self, g: Grpo, tokens: StageLoss) -> None:
        super().__init__()
        self.grpo, self._tokens, self.first = g, tokens, 0
        self.sampled: torch.Tensor | None = None
        self._old: dict[_Rows, torch.Tensor] = {}
        self._reference: dict[_Rows, torch.Tensor] = {}
        self._records = False

    @property
    def head(self) -> object:
        return self._tokens.head

    def begin_rollout(self) -> None:
        """Other answers come: what is known of those before is given up."""
        self.sampled = None
        self._old.clear()
        self._reference.clear()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Inside, what is computed are the reference's log-probabilities."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def facts(self, device: torch.device) -> torch.Tensor:
        """Sums of the facts over this rank's tokens since :meth:`begin`."""
        return self._summed(len(self.grpo.facts), device)

    def count(self, batch: Batch) -> int:
        return batch.num_loss_tokens()

    def _before(self, rows: _Rows, batch: Batch, policy: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [b, s] under the policy that sampled; ``policy``: under that of this step."""
        if rows not in self._old:
            self._old[rows] = policy
            if self.sampled is not None:
                of_rows = self.sampled[list(rows)].to(policy.device, policy.dtype)
                self._old[rows] = of_rows.gather(1, batch.positions)  # a rank may have some of the positions only
        return self._old[rows]

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        """Weighted sum of the losses of the answers' tokens: a tensor [], in at least fp32."""
        mask, judged = batch.loss_mask, batch.judged
        assert mask is not None and judged is not None, "rows that are no sampled answers"
        rows = tuple(sample - self.first for sample in batch.samples)
        losses = self._tokens.losses(out, batch)
        if self._records:
            self._reference[rows] = -losses.detach()
            return losses.new_zeros(())
        leaf = losses.detach().requires_grad_(torch.is_grad_enabled())
        policy = torch.where(mask, -leaf, 0.0)
        old_policy = policy.detach() if self._rehearsing else self._before(rows, batch, policy.detach())
        reference = None
        if self.grpo.beta:
            reference = policy.detach() if self._rehearsing else torch.where(mask, self._reference[rows], 0.0)
        advantages, weights = (values.to(policy.dtype) for values in (judged.advantages, judged.weights))
        of_tokens, facts = token_losses(self.grpo, policy, old_policy, reference, advantages)
        self._tell((facts * mask).sum((1, 2)))
        value = (of_tokens * weights * mask).sum()
        if not torch.is_grad_enabled():
            return value
        (slope,) = torch.autograd.grad(value, leaf)
        weighted = (self._tokens.losses(out, batch, slope, seed, losses) * slope).sum()
        return value.detach() + (weighted - weighted.detach())
