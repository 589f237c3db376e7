"""Reading a few numbers from a device at once."""

from __future__ import annotations

import torch

from hetero_megatron.platform.accelerator import Accelerator


class ScalarReader:
    """Reads numbers that were computed on a device: one copy to pinned memory, one wait for it.

    Args:
        accelerator: of the device; None: numbers are in host memory.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._memory: torch.Tensor | None = None

    def read(self, *values: float | torch.Tensor) -> list[float]:
        """Tensors [] of any dtype, and numbers, as numbers. Waits for all that the current stream has queued, even if
        there is no tensor: so that what was timed on it can be read, too."""
        if self._accelerator is None:
            return [float(x) for x in values]
        tensors = [x.detach().double() for x in values if isinstance(x, torch.Tensor)]
        if self._memory is None or self._memory.numel() < 8 * len(tensors):
            self._memory = self._accelerator.host_memory(8 * max(len(tensors), 4))
        host = self._memory.view(torch.float64)[: len(tensors)]
        if tensors:
            host.copy_(torch.stack(tensors), non_blocking=True)
        event = self._accelerator.event()
        event.record(self._accelerator.current_stream())
        event.synchronize()
        found = iter(host.tolist())
        return [next(found) if isinstance(x, torch.Tensor) else float(x) for x in values]
