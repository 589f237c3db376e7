"""Weights in 4 bits by NumPy, from the rules of NF4 and of double quantisation alone: nearest values, one at a time."""

from __future__ import annotations

import numpy as np
import torch

# As published: QLoRA (2023), appendix E.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def dynamic() -> np.ndarray:
    """8-bit dynamic numbers (8-bit Optimizers, 2021): e zeros after the sign say a power of ten, the bits after the
    next one a fraction between 0.1 and 1, linearly; all zeros are 0, and the largest positive one is 1."""
    found = {0.0, 1.0}
    for zeros in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (6 - zeros) + 1).numpy()  # bitsandbytes', to the last bit
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            value = float(np.float32(10.0**-zeros) * ((low + high) / np.float32(2)))
            found |= {value, -value}
    return np.array(sorted(found), np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None].astype(np.float64) - table.astype(np.float64)).argmin(-1)


def shares(values: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Of the largest magnitude, by its reciprocal in fp32, as bitsandbytes has it: the last bit may decide."""
    inverse = np.float32(1) / np.where(most > 0, most, np.float32(1)).astype(np.float32)
    return np.clip(values * inverse, np.float32(-1), np.float32(1))


def largest_magnitudes(weight: np.ndarray) -> np.ndarray:
    """Of blocks of 64, as their 8 bits stand for them."""
    largest = np.abs(weight.astype(np.float32).reshape(-1, 64)).max(1)
    mean = torch.from_numpy(largest).mean().numpy()  # whose order of adding decides the last bit
    around, found = largest - mean, []
    for start in range(0, len(around), 256):
        group = around[start : start + 256]
        most = np.abs(group).max()
        found.append(dynamic()[nearest(shares(group, most), dynamic())] * most)
    return np.concatenate(found).astype(np.float32) + mean


def rounded(weight: np.ndarray) -> np.ndarray:
    """[outputs, inputs] as its 4-bit form stands for it, in fp32."""
    blocks = weight.astype(np.float32).reshape(-1, 64)
    most = np.abs(blocks).max(1, keepdims=True)
    levels = nearest(shares(blocks, most), NF4)
    return (NF4[levels] * largest_magnitudes(weight)[:, None]).reshape(weight.shape)


@torch.no_grad()
def round_projections(model: torch.nn.Module) -> None:
    """Round all projections of a Hugging Face model's layers, in place."""
    for name, param in model.named_parameters():
        if ".layers." in name and param.dim() == 2:
            param.copy_(torch.from_numpy(rounded(param.numpy())))
