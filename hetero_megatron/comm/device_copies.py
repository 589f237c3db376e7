"""Copies between a device and pinned host memory, by what torch's device modules have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hetero_megatron.platform import Accelerator, Platform


class TorchDevice(Accelerator):
    """A device that torch knows and no plugin."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type  # type: ignore[misc]


class DeviceCopies:
    """See :class:`~hetero_megatron.comm.bridge.Copies`."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self.accelerator, self._device, self._aside = accelerator, device, None

    def buffer(self, size: int) -> torch.Tensor:
        return self.accelerator.host_memory(size)

    def now(self) -> Any:
        event = self.accelerator.event()
        event.record(self.accelerator.current_stream())
        return event

    def join(self, event: Any) -> None:
        self.accelerator.current_stream().wait_event(event)

    def stream(self) -> Any:
        self.accelerator.use(self._device.index or 0)  # of a new thread, the first one is current
        return self.accelerator.stream()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A stream of its own is the current one, for a thread that only looks."""
        self._aside = self._aside or self.stream()
        with self.accelerator.on_stream(self._aside):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any) -> Any:
        with self.accelerator.on_stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            event = self.accelerator.event()
            event.record(stream)
        return event


def copies_of(platform: Platform) -> DeviceCopies | None:
    """None: the platform computes in host memory."""
    if platform.device.type == "cpu":
        return None
    return DeviceCopies(platform.accelerator or TorchDevice(platform.device.type), platform.device)
