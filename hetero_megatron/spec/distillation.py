"""Losses that draw a student towards a teacher's distribution of the next token. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.spec.flops import Words

LOSSES = ("forward_kl", "reverse_kl", "js")
# Means over the tokens that count, in nats: the labels' loss, and the divergence at the temperature, not scaled.
FACTS = ("distill/cross_entropy", "distill/divergence")

# With a weight below 1.
LOGITS_WORDS: Words = (46.5, 0.0)  # beside a teacher's logits


def likeliest_words(k: int) -> Words:
    """Beside the log-probabilities of a teacher's k likeliest tokens."""
    return 42.5, 55.5 * k


def saying_words(k: int) -> Words:
    """Of a teacher that finds its k likeliest tokens."""
    return 5.5, 58.5 * k


@dataclass(frozen=True)
class Distillation:
    """The loss of a token: ``(1 - weight)`` times the cross-entropy of its label, and ``weight`` times the squared
    temperature times the divergence of the teacher's distribution and the student's, both at the temperature.

    Attributes:
        loss: ``forward_kl``: KL(teacher, student); ``reverse_kl``: KL(student, teacher); ``js``: the generalised
            Jensen-Shannon divergence, ``js_beta`` KL(teacher, m) + (1 - ``js_beta``) KL(student, m) with m the mixture
            of both by the same weights.
        weight: 0 to 1.
        temperature: by which logits are divided; gradients of divergences shrink with its square, which the factor
            makes good (Hinton et al. 2015).
    """

    loss: str = "forward_kl"
    weight: float = 1.0
    temperature: float = 1.0
    js_beta: float = 0.5

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UserError("no such loss", field="loss", value=self.loss, accepted=", ".join(LOSSES))
        bounds = (("weight", 0 < self.weight <= 1, "a number > 0 and at most 1"),
                  ("temperature", 0 < self.temperature < math.inf, "a number > 0"),
                  ("js_beta", 0 < self.js_beta < 1, "a number between 0 and 1"))  # fmt: skip
        for name, is_valid, accepted in bounds:
            if not is_valid:
                raise UserError("cannot be used", field=name, value=getattr(self, name), accepted=accepted)
