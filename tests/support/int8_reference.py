"""Weights in 8 bits by NumPy, from the rule alone: one scale per output channel, its largest magnitude over 127.5."""

from __future__ import annotations

import numpy as np
import torch


def rounded(weight: np.ndarray) -> np.ndarray:
    """[..., outputs, inputs] as its 8-bit form stands for it, exact in fp64."""
    values = weight.astype(np.float32)
    scales = np.abs(values).max(-1, keepdims=True) / np.float32(127.5)
    levels = np.clip(np.rint(values * (np.float32(1) / scales)), -128, 127)
    return levels.astype(np.float64) * scales.astype(np.float64)


@torch.no_grad()
def round_projections(model: torch.nn.Module, transposed: bool) -> None:
    """Round all projections of a Hugging Face model's layers, in place; not norms, routers, embedding and head.

    Args:
        transposed: experts' parameters are [experts, inputs, outputs], as gpt-oss has them.
    """
    for name, param in model.named_parameters():
        if ".layers." not in name or param.dim() < 2 or name.endswith(("_bias", "gate.weight", "router.weight")):
            continue
        if transposed and param.dim() == 3:
            param.copy_(torch.from_numpy(rounded(param.mT.numpy())).mT)
        else:
            param.copy_(torch.from_numpy(rounded(param.numpy())))
