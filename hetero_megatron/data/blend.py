"""Blends: which dataset each global sample index comes from.

After any number n of samples, dataset d has given ``n * weight_d`` of them, within one sample. Always taking the
dataset that lags most does not guarantee that for more than two datasets; Tijdeman's algorithm for the chairman
assignment problem (1980) does: among datasets that are eligible, take the one with the earliest deadline. With integer
weights the sequence repeats after sum(weights) samples, so one period serves every index.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from hetero_megatron.data.sample import Dataset, Sample
from hetero_megatron.errors import UserError
from hetero_megatron.layout import largest_remainder

MAX_PERIOD = 2**18  # longer periods are rounded to this one: weights are then exact to 1 / 2**18


def integer_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """The smallest integers in proportion to positive weights; rounded if their sum exceeds ``MAX_PERIOD``."""
    exact = [w if isinstance(w, Fraction) else Fraction(repr(w)) for w in weights]
    scale = math.lcm(*(w.denominator for w in exact))
    integers = [int(w * scale) for w in exact]
    divisor = math.gcd(*integers)
    integers = [w // divisor for w in integers]
    if sum(integers) <= MAX_PERIOD:
        return tuple(integers)
    return tuple(max(1, w) for w in largest_remainder(MAX_PERIOD, integers))


def blend_period(weights: Sequence[int]) -> np.ndarray:
    """int16 [sum(weights)]: the dataset of each sample of one period."""
    total, slack = sum(weights), max(1, 2 * len(weights) - 2)
    # Sample j of dataset d may come at slot n (from 1) once n * w/total >= j + 1/slack, and is due by
    # n = (j + 1 - 1/slack) * total/w.
    waiting = [(-(-total // (slack * w)), d, 0) for d, w in enumerate(weights)]
    heapq.heapify(waiting)
    ready: list[tuple[float, int, int]] = []
    dataset_of_sample = np.empty(total, np.int16)
    for slot in range(1, total + 1):
        while waiting and waiting[0][0] <= slot:
            _, d, j = heapq.heappop(waiting)
            heapq.heappush(ready, (((j + 1) * slack - 1) / weights[d], d, j))
        _, d, j = heapq.heappop(ready)
        dataset_of_sample[slot - 1] = d
        if j + 1 < weights[d]:
            release = -(-((j + 1) * slack + 1) * total // (slack * weights[d]))
            heapq.heappush(waiting, (release, d, j + 1))
    return dataset_of_sample


class BlendedDataset:
    """Samples of several datasets mixed by weight; UserError for weights that are not positive numbers."""

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float | Fraction], field: str = "--data-path"
    ) -> None:
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise UserError("a weight must be positive", field=field, value=float(weight), accepted="numbers > 0")
        self.datasets = tuple(datasets)
        self.weights = integer_weights(weights)
        self._choice = blend_period(self.weights)
        self._rank = np.zeros(len(self._choice), np.int32)  # how many samples of the same dataset came before
        for d in range(len(datasets)):
            own_choices = self._choice == d
            self._rank[own_choices] = np.arange(int(own_choices.sum()))

    def locate(self, index: int) -> tuple[int, int]:
        """(dataset, sample in it) of a global sample index."""
        period, slot = divmod(index, len(self._choice))
        d = int(self._choice[slot])
        return d, period * self.weights[d] + int(self._rank[slot])

    def taken(self, index: int) -> list[int]:
        """How many samples of each dataset come before a global sample index."""
        period, slot = divmod(index, len(self._choice))
        counts_before = np.bincount(self._choice[:slot], minlength=len(self.weights))
        return [period * w + int(n) for w, n in zip(self.weights, counts_before)]

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        d, sample = self.locate(index)
        return self.datasets[d][sample]
