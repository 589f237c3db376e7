"""Ranks that fall behind: each one's computing time against what it should be.

What it should be is the prediction from calibrated rates where there is one, else the rank's own earlier steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

WARM_UP, BASELINE, RECENT = 3, 20, 8  # steps that are ignored, that make the own baseline, that are compared with it
FACTOR = 1.5
SILENCE = 100  # steps before the same rank is named again


@dataclass
class StragglerWatch:
    """Fed with every step's busy seconds per rank of the plan.

    Args:
        ranks: of the plan, in the order of the seconds.
        chips: type by rank, for the message.
        expected: predicted busy seconds of a step by rank; empty: the rank's own median of earlier steps.
        factor: a rank is behind when the median of its last steps exceeds this times what is expected.
    """

    ranks: Sequence[int]
    chips: Mapping[int, str]
    expected: Mapping[int, float] = field(default_factory=dict)
    factor: float = FACTOR

    def __post_init__(self) -> None:
        self._size = 0
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._first: dict[int, list[float]] = {r: [] for r in self.ranks}
        self._recent: dict[int, deque[float]] = {r: deque(maxlen=RECENT) for r in self.ranks}
        self._named: dict[int, int] = {}

    def step(self, busy: Sequence[float], batch_size: int) -> list[str]:
        """One sentence for each rank that is found to be behind at this step."""
        if batch_size != self._size:  # another amount of work: begin anew
            self._size = batch_size
            self._begin()
        self._step += 1
        if self._step <= WARM_UP:
            return []
        out = []
        for rank, seconds in zip(self.ranks, busy, strict=True):
            recent = self._recent[rank]
            recent.append(seconds)
            if len(self._first[rank]) < BASELINE:
                self._first[rank].append(seconds)
                if rank not in self.expected:
                    continue
            if len(recent) == RECENT and self._step >= self._named.get(rank, 0):
                out += self._judge(rank, median(recent))
        return out

    def _judge(self, rank: int, seconds: float) -> list[str]:
        predicted = rank in self.expected
        should = self.expected[rank] if predicted else median(self._first[rank])
        if seconds <= self.factor * should:
            return []
        self._named[rank] = self._step + SILENCE
        source = "predicted from calibrated rates" if predicted else f"in steps {WARM_UP + 1} to {WARM_UP + BASELINE}"
        return [
            f"rank {rank} ({self.chips[rank]}) falls behind: it computes {seconds:.3g} s per step, "
            f"{seconds / should:.2f} times the {should:.3g} s {source}"
        ]
