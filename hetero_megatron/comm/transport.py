"""What groups and transfers under way need of the rank's communicator (:class:`~hetero_megatron.comm.comm.Comm`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.hooks import Clock, Work
from hetero_megatron.errors import UserError


@dataclass
class WaitSeconds:
    """Seconds blocked so far: in point-to-point transfers (pipeline neighbours) and in collectives."""

    neighbours: float = 0.0
    collectives: float = 0.0

    def add(self, seconds: float, collective: bool) -> None:
        if collective:
            self.collectives += seconds
        else:
            self.neighbours += seconds


class Transport(Protocol):
    """Starts the transfers of one rank and accounts for them; attributes as of ``Comm``."""

    rank: int
    device: torch.device
    clock: Clock
    seconds: WaitSeconds
    sent_bytes: dict[int, int]

    def start(
        self,
        peers: tuple[int, ...],
        transfer: Callable[[], Work | None],
        sizes: Mapping[int, int] | None = None,
        group: tuple[int, ...] = (),
    ) -> Work | None:
        """Start a transfer; where this rank sends, ``sizes`` has the bytes by peer."""

    def failure(
        self, peers: tuple[int, ...], seconds: float, error: Exception, activity: str | None = None
    ) -> CommError | UserError:
        """What to raise for a transfer that failed after ``seconds``."""
