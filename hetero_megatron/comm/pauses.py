"""What a CPU quota costs the work that it slows.

A quota lets a slow rank compute for some milliseconds of each period. While it pauses, others take the caches that it
had filled, also those outside a virtual machine, and it needs more CPU time for the same work: up to 1 ms in each
period, a fifth of what a chip of speed 0.2 gets. Caches take long to become as cold as that; single pauses cost less.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

TOKENS, HIDDEN, HEADS, FFN = 512, 128, 8, 352  # of small layers like those that testbeds train: some 10 ms each
ALONE, COOLING, SLOWED = 0.4, 0.7, 1.5  # seconds: without a quota, until one has its full effect, and under it


class Pauses:
    """Measured in two parts: :meth:`alone` before the quota begins, :meth:`cost` under it."""

    def __init__(self) -> None:
        shapes = (TOKENS, HIDDEN), (HIDDEN, 3 * HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)
        self._values = [torch.full(s, 0.01, dtype=torch.float32, device="cpu", requires_grad=True) for s in shapes]

    def alone(self) -> float:
        """CPU seconds of a unit of work while nobody else computes on this core."""
        self._work(ALONE / 2)  # allocations
        cpu, units, _ = self._work(ALONE)
        return cpu / units

    def cost(self, alone: float, period: float) -> float:
        """CPU seconds that work needs more in each period of the quota than it does alone; at least 0."""
        self._work(COOLING)
        cpu, units, wall = self._work(SLOWED)
        return max(0.0, (cpu - units * alone) / (wall / period))

    def _work(self, seconds: float) -> tuple[float, int, float]:
        """(CPU seconds, units of work, seconds) of the work of about so many seconds."""
        start, cpu, units = time.monotonic(), time.thread_time(), 0
        while time.monotonic() - start < seconds:
            with torch.enable_grad():
                torch.autograd.grad(self._layer(self._layer(self._values[0])).sum(), self._values)
            units += 1
        return time.thread_time() - cpu, units, time.monotonic() - start

    def _layer(self, hidden: torch.Tensor) -> torch.Tensor:
        """[TOKENS, HIDDEN] -> the same."""
        _, attention, up, down = self._values
        query, key, value = (hidden @ attention).view(1, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(TOKENS, HIDDEN)
        gate, value = (hidden @ up).chunk(2, -1)
        return hidden + (F.silu(gate) * value) @ down
