"""Reading a few numbers from a device at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

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
        """The elements of tensors of any dtype and shape, and numbers, as numbers. Waits for all that the current
        stream has queued, even if there is no tensor: so that what was timed on it can be read, too."""
        tensors = [x.detach().double().flatten() for x in values if isinstance(x, torch.Tensor)]
        if self._accelerator is None:
            return _numbers(values, torch.cat(tensors) if tensors else torch.empty(0))
        count = sum(map(len, tensors))
        if self._memory is None or self._memory.numel() < 8 * count:
            self._memory = self._accelerator.host_memory(8 * max(count, 4))
        host = self._memory.view(torch.float64)[:count]
        if tensors:
            host.copy_(torch.cat(tensors), non_blocking=True)
        event = self._accelerator.event()
        event.record(self._accelerator.current_stream())
        event.synchronize()
        return _numbers(values, host)


def _numbers(values: Sequence[float | torch.Tensor], elements: torch.Tensor) -> list[float]:
    """``elements``: of the tensors among the values, one after the other."""
    left = iter(elements.tolist())
    found: list[float] = []
    for x in values:
        found += islice(left, x.numel()) if isinstance(x, torch.Tensor) else [float(x)]
    return found
