"""The certificate: a step time that no plan can beat under the same rates, by the speeds of all chips alone.

See :mod:`context_certificate` for how it is computed. :data:`ASSUMPTIONS` states what it covers; the report prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ASSUMPTIONS = (
    "all plans; only products of layers and attention take time, at each chip's best rate",
    "rates as given, chips steady (no jitter)",
)


@dataclass(frozen=True)
class LowerBound:
    """No plan has a shorter step than ``seconds``; ``method``: what it is computed from, "work"."""

    seconds: float
    method: str = "work"

    def reached(self, step_seconds: float) -> float:
        """Share of the tokens per second of the bound that a plan reaches, at most 1."""
        return min(1.0, self.seconds / step_seconds)

    def gap(self, step_seconds: float) -> float:
        """Optimality gap of a plan: ``step_seconds / seconds - 1`` (inf without a bound)."""
        return step_seconds / self.seconds - 1 if self.seconds > 0 else math.inf
