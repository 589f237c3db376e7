"""When to stop: a signal, a time limit, an interval. One rank's wish becomes everyone's at the next step."""

from __future__ import annotations

import signal
import time
from types import FrameType


class ExitConditions:
    """Attributes:
    reason: why this rank wants to stop; empty while it does not.
    """

    def __init__(
        self, minutes: float | None = None, interval: int | None = None, signal_name: str | None = None
    ) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._interval = minutes, interval
        self.reason = ""
        if signal_name is not None:
            signal.signal(signal.Signals[signal_name], self._received)

    def _received(self, number: int, _: FrameType | None) -> None:
        self.reason = f"received {signal.Signals(number).name}"

    def check(self, step: int) -> bool:
        """Whether to stop after ``step`` completed steps."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = f"--exit-duration-in-mins {self._minutes:g} are over"
        if self._interval and step and step % self._interval == 0:
            self.reason = f"step {step} is a multiple of --exit-interval {self._interval}"
        return bool(self.reason)
