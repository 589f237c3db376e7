"""Reading a few numbers from a device at once. They are widened on the host: not every device has fp64."""

from __future__ import annotations

from itertools import islice

import torch

from hetero_megatron.platform.accelerator import Accelerator

_WIDEST = 8  # bytes of an element


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
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for x in values:
            if isinstance(x, torch.Tensor):
                by_dtype.setdefault(x.dtype, []).append(x.detach().flatten())
        joined = {dtype: torch.cat(tensors) for dtype, tensors in by_dtype.items()}
        host = joined if self._accelerator is None else self._copied(joined, self._accelerator)
        left = {dtype: iter(x.tolist()) for dtype, x in host.items()}
        found: list[float] = []
        for x in values:
            found += islice(left[x.dtype], x.numel()) if isinstance(x, torch.Tensor) else [float(x)]
        return found

    def _copied(
        self, tensors: dict[torch.dtype, torch.Tensor], accelerator: Accelerator
    ) -> dict[torch.dtype, torch.Tensor]:
        """In pinned memory, after one wait."""
        size = sum(_WIDEST * x.numel() for x in tensors.values())
        if self._memory is None or self._memory.numel() < size:
            self._memory = accelerator.host_memory(max(size, 4 * _WIDEST))
        host, at = dict[torch.dtype, torch.Tensor](), 0
        for dtype, x in tensors.items():
            host[dtype] = self._memory[at : at + x.nbytes].view(dtype)
            host[dtype].copy_(x, non_blocking=True)
            at += _WIDEST * x.numel()
        event = accelerator.event()
        event.record(accelerator.current_stream())
        event.synchronize()
        return host
