"""What unsteady chips add to a step: it ends when the unluckiest of them does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
REACH, CELLS = 8, 400  # deviations to each side that are integrated over, and in how many pieces


def expected_delay(ends: Iterable[tuple[float, float]]) -> float:
    """How much later than planned the last of several is done on average.

    Args:
        ends: (planned seconds, standard deviation) of each; they vary independently and normally.

    Returns:
        E[max(end + deviation x z)] - max(end), seconds; exactly 0 where nothing varies.
    """
    counts = Counter(ends)
    last, widest = (max(column) for column in zip(*counts))
    if widest == 0.0:
        return 0.0
    cell = 2 * REACH * widest / CELLS
    at = (np.arange(CELLS) - CELLS // 2 + 0.5) * cell  # the middle of each, after ``last``
    done = np.ones(CELLS)  # the probability that all are
    for (end, deviation), count in counts.items():
        done *= _done(last + at - end, deviation) ** count
    return float(cell * np.sum(np.where(at < 0, -done, 1 - done)))


def _done(late: Floats, deviation: float) -> Floats:
    if deviation == 0.0:
        return (late >= 0).astype(float)
    cdf = NormalDist(0.0, deviation).cdf
    return np.array([cdf(x) for x in late.tolist()])
