"""Products in 8-bit floats: what a run asks for, and which stages compute so.

``--fp8-format`` and ``--fp8-recipe`` say it for the run; ``dtype`` of a stage keeps that stage in the dtype of the
weights. No torch; the operators are in ``ops/gemm_fp8.py``, what plans may ask for in :mod:`.fp8_checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMATS, RECIPES = ("e4m3", "hybrid"), ("tensorwise", "blockwise")
BLOCK = 128  # elements that share a scale


@dataclass(frozen=True)
class Fp8:
    """``format``: ``e4m3``, or ``hybrid`` with gradients in e5m2; ``recipe``: ``tensorwise`` or ``blockwise``."""

    format: str
    recipe: str

    @property
    def operator(self) -> str:
        return f"gemm_fp8_{self.recipe}"

    @property
    def hybrid(self) -> bool:
        return self.format == "hybrid"

    def __str__(self) -> str:
        return f"fp8 ({self.format}, {self.recipe})"


def backward_bytes(recipe: str, rows: int, length: float, n: float, k: float, item: int, trained: bool = True) -> float:
    """Most bytes at once in the backward of y = x w^T, beside x, w and the gradient of y; that of x is among them.

    Args:
        rows, length: x is [rows, length, k], w is [n, k].
        trained: w has a gradient, made in fp32.
    """
    m, weight = rows * length, n * k
    dx = item * m * k
    if recipe == "blockwise":
        element = 1 + 4 / BLOCK  # with its share of a scale
        peak = m * n * element + 2 * weight + dx  # w in fp8, and turned
        return max(peak, dx + m * (n + k) * element + 4 * weight) if trained else peak
    several = rows > 1
    peak = weight + m * n + (2 if several else 1) * dx  # results of several sequences, and all in one piece
    of_weight = m * (n + k) + (8 if several else 4) * weight
    return max(peak, dx + of_weight) if trained else peak
