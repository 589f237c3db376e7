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
    cast = 8 if item < 4 else 5  # while it is scaled: two copies in fp32, or one and the result
    several = rows > 1
    most = max(
        item * m * n,  # magnitudes, of which the largest is sought
        cast * weight,
        weight + (m - length) * n + cast * length * n,
        weight + m * n + weight + dx,
        weight + 2 * dx * several,  # results of the sequences, and all in one piece
    )
    if not trained:
        return most
    of_weight = max(
        (m - length) * n + cast * length * n,
        m * n + (m - length) * k + cast * length * k,
        m * (n + k) + length * (n + k) + (8 if several else 4) * weight,
    )
    return max(most, dx + of_weight)
