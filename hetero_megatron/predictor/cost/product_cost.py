"""Seconds of the matrix products of linear modules on one chip: in the dtype of the weights, and in fp8.

In fp8 (``ops/gemm_fp8.py``) every product quantises both its operands, in forward and again in both products of
backward: nothing quantised is kept. What that moves through memory is counted as the kernels of the recipe do it,
``tests/unit/planner/test_fp8_costs.py`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from hetero_megatron.plans.fp8 import BLOCK
from hetero_megatron.predictor.cost.rates import ChipRates

NEAREST = 2  # measured rows used to interpolate at other sizes
SCALE = 4 / BLOCK  # bytes of scales per element of 1 x 128 blocks


class Products(NamedTuple):
    """Seconds of a linear module, or of several: forward, and the gradients of its input and of its weight."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0

    def times(self, count: float) -> Products:
        return Products(*(count * seconds for seconds in self))


def in_all(each: Iterable[Products]) -> Products:
    return Products(*map(sum, zip(Products(), *each)))


def product_seconds(rates: ChipRates, m: float, n: float, k: float, moved: float, speed: float = 1.0) -> float:
    """[m, k] x [k, n]: FLOPs at ``speed`` x the chip's rate for products of this size, or ``moved`` bytes of memory
    traffic if that takes longer."""
    size = min(n, k)
    rate = speed * rates.gemm_flops * size / (size + rates.gemm_half) * m / (m + rates.gemm_half)
    return max(2 * m * n * k / rate, moved / rates.bytes_per_second)


@dataclass(frozen=True)
class Fp8Products:
    """Prices products in fp8.

    Args:
        rates: of the chip in fp8. Measured rows are of whole products, both operands quantised: ``gemm`` of forward,
            ``gemm_backward`` of backward, which without it follows forward. At other sizes the modelled seconds are
            corrected by measured / modelled at the nearest ones.
        recipe: ``tensorwise`` or ``blockwise``.
        item: bytes per element of activations and weights.
    """

    rates: ChipRates
    recipe: str
    item: int

    def seconds(self, m: float, n: float, k: float) -> Products:
        """y = x w^T of x [m, k] and w [n, k]."""
        if min(m, n, k) <= 0:
            return Products()
        size = m, n, k
        ratios = 3 * [self._correction(size, self.rates.gemm, 0)]
        if self.rates.gemm_backward:
            ratios[1:] = (self._correction(size, self.rates.gemm_backward, product) for product in (1, 2))
        return Products(*map(mul, self._modelled(m, n, k), ratios))

    def _correction(self, size: tuple[float, float, float], rows: Sequence[tuple[float, ...]], part: int) -> float:
        """Measured / modelled seconds of one of the three products, at the nearest sizes; 1: none was measured."""
        column = 3 + max(part - 1, 0)
        ratios = [(row[:3], row[column] / self._modelled(*row[:3])[part]) for row in rows]
        return nearest(ratios, size) if ratios else 1.0

    def _modelled(self, m: float, n: float, k: float) -> Products:
        item, moved = self.item, quantised_bytes(self.recipe, m, n, k, self.item)
        products = (
            product_seconds(self.rates, m, n, k, m * k + n * k + item * m * n),
            product_seconds(self.rates, m, k, n, m * n + n * k + item * m * k),
            product_seconds(self.rates, n, k, m, m * n + m * k + 4 * n * k),
        )
        return Products(*(a + b / self.rates.bytes_per_second for a, b in zip(products, moved, strict=True)))


def quantised_bytes(recipe: str, m: float, n: float, k: float, item: int) -> Products:
    """Bytes read and written beside a product's own operands and result, for one sequence: to find largest magnitudes,
    to scale and cast, to turn what was cast, and to add a weight gradient in fp32 (its sum not counted) to its sum."""
    x, weight, dy = m * k, n * k, m * n
    if recipe == "blockwise":
        row, square = item + 1 + SCALE, item + 1  # one kernel reads, and writes turned or not
        return Products(x * row + weight * square, dy * row + weight * (square + 2), (dy + x) * row + 4 * weight)
    cast = item + 1  # one kernel, turned or not; before it, another one reads all to find the largest magnitude
    return Products(
        (x + weight) * (item + cast), dy * (item + cast) + weight * cast, (dy + x) * cast + 4 * weight
    )


def nearest(points: Sequence[tuple[tuple[float, ...], float]], at: tuple[float, ...]) -> float:
    """Weighted mean of the values at the nearest points, in log space, weights 1 / distance; exact at a point."""
    ranked = sorted((math.dist([math.log(x) for x in p], [math.log(x) for x in at]), v) for p, v in points)[:NEAREST]
    if ranked[0][0] < 1e-9:
        return ranked[0][1]
    weights = [1 / d for d, _ in ranked]
    return math.exp(sum(w * math.log(v) for w, (_, v) in zip(weights, ranked)) / sum(weights))
