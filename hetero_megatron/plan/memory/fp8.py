"""Bytes that a product in fp8 needs for a while, as ``ops/gemm_fp8.py`` with a chip's kernels allocates them.

Nothing quantised is kept from forward to backward: a linear module keeps x and the weight as it does without fp8.
"""

from __future__ import annotations

from hetero_megatron.plan.fp8 import BLOCK


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
        most = m * n * element + 2 * weight + dx  # w in fp8, and turned
        return max(most, dx + m * (n + k) * element + 4 * weight) if trained else most
    several = rows > 1
    most = weight + m * n + (2 if several else 1) * dx  # results of several sequences, and all in one piece
    of_weight = m * (n + k) + (8 if several else 4) * weight
    return max(most, dx + of_weight) if trained else most
