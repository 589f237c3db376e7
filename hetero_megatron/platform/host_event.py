"""Events of the processor, which is a platform like any other."""

from __future__ import annotations

import time
from typing import Any


class HostEvent:
    """An event of a device that is always in step with the host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: HostEvent) -> float:
        """Milliseconds from this event to ``other``."""
        return (other.seconds - self.seconds) * 1e3
