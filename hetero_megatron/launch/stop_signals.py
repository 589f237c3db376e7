"""Signals to a launcher: the first one stops the job in good order, another one ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from hetero_megatron.training.exit import ECHO_SECONDS, handled, note_hang_up


class StopSignals:
    """Catches SIGTERM, SIGINT and SIGHUP while it is entered.

    Args:
        first: called with the number of the first one, in the signal's handler.

    Attributes:
        number: of the first one; None: none came.
        again: whether another came after it, and was no echo of it (terminals and ``timeout`` send one signal twice).
    """

    def __init__(self, first: Callable[[int], None]) -> None:
        self._first, self._at = first, 0.0
        self.number: int | None = None
        self.again = False

    def __enter__(self) -> StopSignals:
        numbers = handled(("SIGTERM", "SIGINT", "SIGHUP"))
        self._old_handlers = {number: signal.signal(number, self._received) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _received(self, number: int, _: FrameType | None) -> None:
        note_hang_up(number)
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            self._first(number)
        elif time.monotonic() - self._at > ECHO_SECONDS:
            self.again = True
