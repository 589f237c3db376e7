"""Choosing the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hetero_megatron.generation.processors import PromptRow, filtered, processed
from hetero_megatron.generation.settings import Filters, ScoreSettings


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0: the most likely token. Draws depend on (seed, prompt, position in the answer), not on batches
    or plans.

    Args:
        filters: which tokens are drawn from.
        settings: what changes scores before that, and ``ends``, the ids that end an answer, as they count there.
    """

    temperature: float = 0.0
    filters: Filters = field(default_factory=Filters)
    seed: int = 1234
    settings: ScoreSettings = field(default_factory=ScoreSettings)
    ends: tuple[int, ...] = ()

    def choose(self, logits: torch.Tensor, rows: Sequence[PromptRow]) -> torch.Tensor:
        """Next token of every row, int64 [b]; logits: [b, vocabulary]."""
        if self.settings.changes_scores:
            pairs = zip(logits, rows, strict=True)
            logits = torch.stack([processed(scores, row, self.settings, self.ends) for scores, row in pairs])
        best = logits.argmax(-1)
        if self.temperature == 0:
            return best
        top = logits.double().gather(-1, best[:, None])
        # From the most likely one down: of the smallest temperature that is a number, nothing overflows upwards.
        scores = filtered((logits.double() - top) / self.temperature, self.filters)
        values, order = torch.sort(scores, descending=True, dim=-1)
        probabilities = torch.softmax(values, -1)
        sums = probabilities.cumsum(-1)
        draws = [
            np.random.RandomState([self.seed & 0xFFFFFFFF, row.number, len(row.answer)]).random_sample() for row in rows
        ]
        aim = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
        last = ((probabilities > 0).sum(-1, keepdim=True) - 1).clamp_min(0)
        drawn = torch.searchsorted(sums, aim, right=True).clamp_max(last)
        # No distribution where scores are not numbers, or all tokens are forbidden.
        return torch.where(top[:, 0].abs() < math.inf, order.gather(-1, drawn)[:, 0], best)
