"""What compressed differences decode to, by NumPy and from the rule alone."""

from __future__ import annotations

import itertools

import numpy as np

from hetero_megatron.layout import Box

BLOCK = 64
LEVELS = {"int8": 127, "int4": 7}
TOP_BF16 = np.float32(3.3895313892515355e38)


def decoded(values: np.ndarray, box: Box, compress: str) -> np.ndarray:
    """``values``: of the box of a tensor, finite."""
    if compress == "none":
        return values
    if compress == "bf16":
        bits = np.clip(values, -TOP_BF16, TOP_BF16).astype(np.float32).view(np.uint32).astype(np.uint64)
        bits += 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even
        return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(values.dtype)
    out, levels, begins = np.empty_like(values), LEVELS[compress], box.lo[-1]
    edges = sorted({begins, box.hi[-1], *range(-(-begins // BLOCK) * BLOCK, box.hi[-1], BLOCK)})
    for a, b in itertools.pairwise(edges):
        block = values[..., a - begins : b - begins]
        scale = scale_of(np.abs(block).max(-1, keepdims=True), levels).astype(values.dtype)
        out[..., a - begins : b - begins] = np.clip(np.rint(block / scale), -levels, levels) * scale
    return out


def scale_of(largest: np.ndarray, levels: int) -> np.ndarray:
    top = np.finfo(np.float32)
    most = float(top.max) / levels * (1 - 2.0**-23)
    return np.clip(largest / largest.dtype.type(levels), top.tiny, most).astype(np.float32)
