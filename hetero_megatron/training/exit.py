"""When to stop: a signal, a time limit, an interval. One rank's wish becomes everyone's at the next step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

INTERRUPTED = 130  # exit code of a process that Ctrl-C ended
ECHO_SECONDS = 1.0  # torchrun sends on to its ranks the Ctrl-C that the terminal has sent them already


class ExitConditions:
    """Attributes:
    reason: why this rank wants to stop; empty while it does not.
    """

    def __init__(self, minutes: float | None = None, interval: int | None = None, signals: Iterable[str] = ()) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._interval = minutes, interval
        self.reason = ""
        self._interrupted: float | None = None
        for name in signals:
            signal.signal(signal.Signals[name], self._received)

    def _received(self, number: int, _: FrameType | None) -> None:
        self.reason = f"received {signal.Signals(number).name}"
        if number == signal.SIGINT:
            now, first = time.monotonic(), self._interrupted
            if first is None:
                self._interrupted = now
                if os.environ.get("RANK", "0") == "0":
                    os.write(2, b"interrupted: stopping after this step; Ctrl-C again ends the run at once\n")
            elif now - first > ECHO_SECONDS:
                os._exit(INTERRUPTED)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C came."""
        return self._interrupted is not None

    def check(self, step: int) -> bool:
        """Whether to stop after ``step`` completed steps."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = f"--exit-duration-in-mins {self._minutes:g} are over"
        if self._interval and step and step % self._interval == 0:
            self.reason = f"step {step} is a multiple of --exit-interval {self._interval}"
        return bool(self.reason)
