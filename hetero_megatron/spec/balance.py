"""How the load of experts is balanced in training. None of it depends on the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_megatron.spec.moe import MoE


@dataclass(frozen=True)
class Balancing:
    """What is added to the loss of the next token, for every mixture-of-experts layer, and what moves the bias.

    Of a sequence of T tokens (a row of the batch, however many documents are packed in it) with E experts of which each
    token uses k, the sequence loss is ``E / (k T^2) sum_i c_i P_i``: c_i tokens have expert i among their k best scores
    (without bias and groups), P_i sums the scores of expert i, those of a token normalised to 1. It is 1 where all are
    equal. Megatron's and DeepSeek-V3's definition.

    Args:
        sequence_loss: coefficient of the mean over sequences, each weighted by its tokens that count in the loss.
        z_loss: coefficient of the mean of logsumexp(router logits)^2 over the tokens that count in the loss (ST-MoE).
        bias_rate: after a step the bias of every expert that fewer (more) tokens of the step chose than the mean grows
            (falls) by this (DeepSeek-V3's balancing without a loss); 0: it stays.
    """

    sequence_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def describe(self, moe: MoE) -> str:
        """What training minimises besides the loss that is printed, and what else balances."""
        parts = [f"{self.sequence_loss:g} x the sequence loss of each layer"] if self.sequence_loss else []
        parts += [f"{self.z_loss:g} x the z-loss of each layer"] if self.z_loss else []
        told = f"experts: the gradient also has {' and '.join(parts)}; " if parts else "experts: "
        told += "the loss that is printed is that of the next token alone"
        if self.bias_rate:
            return f"{told}; the router's bias moves by {self.bias_rate:g} per step"
        if moe.score_bias:
            return f"{told}; the router's bias stays as it is (--moe-router-enable-expert-bias moves it)"
        return told if parts else f"{told}; nothing balances their load"


UNBALANCED = Balancing()
