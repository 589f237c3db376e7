"""A stream beside the one that computes, for what is done with gradients while backward goes on."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from hetero_megatron.platform.accelerator import Accelerator


class SideStream:
    """Work that the compute stream does not wait for until it is told to. The host never waits.

    Args:
        accelerator: None: there are no streams, and everything is done in the order of the calls.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._stream: Any = accelerator.stream() if accelerator is not None else None

    @property
    def same(self) -> bool:
        """Whether it is no other stream than the one that computes."""
        return self._accelerator is None

    def catch_up(self) -> None:
        """What comes here is after all that the current stream has queued so far."""
        if self._accelerator is not None:
            event = self._accelerator.event()
            event.record(self._accelerator.current_stream())
            self._stream.wait_event(event)

    def current(self) -> AbstractContextManager[None]:
        """Context in which it is the current stream."""
        return contextlib.nullcontext() if self._accelerator is None else self._accelerator.on_stream(self._stream)

    def carry(self, size: int) -> None:
        """Copies of so many bytes have been queued here."""

    def moment(self) -> Any:
        """For :meth:`join`."""
        if self._accelerator is None:
            return None
        event = self._accelerator.event()
        event.record(self._stream)
        return event

    def join(self, moment: Any) -> None:
        """What the current stream does next is after ``moment``."""
        if moment is not None:
            assert self._accelerator is not None
            self._accelerator.current_stream().wait_event(moment)

    def wait(self, moment: Any) -> None:
        """The host waits until ``moment`` has come."""
        if moment is not None:
            moment.synchronize()

    def give(self, tensor: torch.Tensor) -> None:
        """A tensor made here is used on the current stream, and may be released there."""
        if self._accelerator is not None:
            self._accelerator.used_on(self._accelerator.current_stream(), tensor)
