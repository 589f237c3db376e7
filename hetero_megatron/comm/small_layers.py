"""Work like that of the models that testbeds train: what the emulation of chips measures itself with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

TOKENS, HIDDEN, HEADS, FFN = 512, 128, 8, 352


class SmallLayers:
    """Called, forward and backward of two transformer layers in fp32; some 20 to 40 ms of a core."""

    def __init__(self) -> None:
        shapes = (TOKENS, HIDDEN), (HIDDEN, 3 * HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)
        self._values = [torch.full(s, 0.01, dtype=torch.float32, device="cpu", requires_grad=True) for s in shapes]

    def __call__(self) -> None:
        with torch.enable_grad():
            torch.autograd.grad(self._layer(self._layer(self._values[0])).sum(), self._values)

    def _layer(self, hidden: torch.Tensor) -> torch.Tensor:
        """[TOKENS, HIDDEN] -> the same."""
        _, attention, up, down = self._values
        query, key, value = (hidden @ attention).view(1, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(TOKENS, HIDDEN)
        gate, value = (hidden @ up).chunk(2, -1)
        return hidden + (F.silu(gate) * value) @ down
