"""A line about long work on a terminal: what, how much of it, how long it will still take. Nothing in other logs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TextIO, TypeVar

from hetero_megatron.utils.text import format_bytes, format_seconds

AFTER, EVERY = 1.0, 0.2  # seconds: quicker work needs no line; between two changes of the line
T = TypeVar("T")


class WorkLine:
    """Shown from ``AFTER`` seconds on, on standard error if that is a terminal, and by the first rank of a job only.

    Args:
        what: e.g. ``checking the checkpoint``.
        total: of whatever ``add`` counts; 0: unknown, and no share is shown.
        bytes: whether that is bytes.
        show: text of an amount; None: by ``bytes``.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        what: str,
        total: float,
        bytes: bool = True,
        stream: TextIO | None = None,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[float], str] | None = None,
    ) -> None:
        self.what, self.total, self.done = what, total, 0.0
        self._show, self._clock = show or (format_bytes if bytes else lambda n: f"{n:,.0f}"), clock
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream.isatty() and environment.get("RANK", "0").strip() == "0"
        self._began, self._last, self._width = clock(), 0.0, 0

    def __enter__(self) -> WorkLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Make room for another line, until more is added."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def add(self, amount: float = 1) -> None:
        """So much more is done."""
        self.done += amount
        if not self._shows:
            return
        now = self._clock()
        if now - self._began < AFTER or now - self._last < EVERY:
            return
        self._last = now
        text = self.text(now - self._began)
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def __str__(self) -> str:
        return self.text(self._clock() - self._began)

    def text(self, seconds: float) -> str:
        """The line after so many seconds of work."""
        if not self.total:
            return f"{self.what}: {self._show(self.done)}"
        share = min(1.0, self.done / self.total)
        left = f", ETA {format_seconds(seconds * (1 / share - 1))}" if share > 0 else ""
        return f"{self.what}: {share:.0%} of {self._show(self.total)}{left}"


def tracked(
    items: Iterable[T], what: str, total: float, amount: Callable[[T], float], bytes: bool = True, **more: Any
) -> Iterator[T]:
    """The items, with a :class:`WorkLine` of what each was when the next is asked for."""
    with WorkLine(what, total, bytes, **more) as line:
        for item in items:
            yield item
            line.add(amount(item))
