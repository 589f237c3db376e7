"""What a CPU quota costs the work that it slows.

A quota lets a slow rank compute for some milliseconds of each period. While it pauses, others take the caches that it
had filled, also those outside a virtual machine, and it needs more CPU time for the same work: up to 1 ms in each
period, a fifth of what a chip of speed 0.2 gets. Caches take long to become as cold as that; single pauses cost less.
"""

from __future__ import annotations

import time

from hetero_megatron.comm.small_layers import SmallLayers

ALONE, COOLING, SLOWED = 0.4, 0.7, 1.5  # seconds: without a quota, until one has its full effect, and under it


class Pauses:
    """Measured in two parts: :meth:`alone` before the quota begins, :meth:`cost` under it."""

    def __init__(self) -> None:
        self._layers = SmallLayers()

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
            self._layers()
            units += 1
        return time.thread_time() - cpu, units, time.monotonic() - start
