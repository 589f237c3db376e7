"""Choosing the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0: the most likely token. ``top_p``: only from the smallest set of most likely tokens with at
    least this probability together. Draws depend on (seed, prompt, position in the answer), not on batches or plans."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1234

    def choose(self, logits: torch.Tensor, prompts: Sequence[int], step: int) -> torch.Tensor:
        """Next token of every row, int64 [b].

        Args:
            logits: [b, vocabulary].
            prompts: global index of each row's prompt; step: tokens of its answer so far.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        values, order = torch.sort(logits.double() / self.temperature, descending=True, dim=-1)
        probabilities = torch.softmax(values, -1)
        before = probabilities.cumsum(-1) - probabilities  # of all that are more likely
        kept = torch.where(before < self.top_p, probabilities, 0)
        kept[:, 0] = probabilities[:, 0]
        sums = kept.cumsum(-1)
        draws = [np.random.RandomState([self.seed & 0xFFFFFFFF, prompt, step]).random_sample() for prompt in prompts]
        aim = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
        at = torch.searchsorted(sums, aim, right=True).clamp_max((kept > 0).sum(-1, keepdim=True) - 1)
        return order.gather(-1, at)[:, 0]
