"""Quantities and plurals in messages, written the same way everywhere."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TextIO, TypeVar

from hetero_megatron.errors import printable

_SPELLED = 200  # characters of a name that are compared with others
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_RATES = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
_DTYPES = {"float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16",
           "float16": "fp16", "half": "fp16"}  # fmt: skip
_IRREGULAR = {"batch": "batches", "is": "are", "was": "were", "has": "have", "entry": "entries", "copy": "copies"}


def notice_line(text: str) -> str:
    """What a user is told beside the work: ``notice: …``, without anything that a terminal would obey (names of files,
    tensors and plugins are others')."""
    return printable(f"notice: {text}").replace("\n", "\\n")


def did_you_mean(name: str, known_names: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean x?)`` with the nearest of the known names; empty: none is near."""
    nearest = difflib.get_close_matches(name[:_SPELLED], list(known_names), 1, cutoff)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def plural(count: float, noun: str, many: str = "") -> str:
    """``1 sequence``, ``2,000 sequences``, ``0 sequences``; ``many``: where the plural is not the noun with an s."""
    return f"{count:,} {word(count, noun, many)}"


def word(count: float, noun: str, many: str = "") -> str:
    """The noun (or verb) alone, in the number that ``count`` asks for."""
    if count == 1:
        return noun
    if many:
        return many
    head, blank, last = noun.rpartition(" ")
    end = last.rpartition("-")[2]
    return f"{head}{blank}{last[: len(last) - len(end)]}{_IRREGULAR.get(end, end + 's')}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """``0-3,8,10-11``: runs of consecutive ranks, in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def dtype_name(text: str) -> str:
    """``fp32`` for ``fp32``, ``float32`` and ``torch.float32``, and so on; other names stay."""
    name = text.strip().removeprefix("torch.")
    return _DTYPES.get(name, name)


def format_bytes(count: float) -> str:
    """``1.5 GiB``."""
    for unit, factor in _BINARY:
        if abs(count) >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f} B"


def format_rate(rate: float) -> str:
    """Bytes per second: ``25 GB/s``."""
    for unit, factor in _RATES:
        if abs(rate) >= factor:
            return f"{rate / factor:.4g} {unit}"
    return f"{rate:.4g} B/s"


def format_seconds(seconds: float) -> str:
    """``2 h 05 min``, ``3 min 20 s``, ``1.25 s``, ``12 ms``, ``340 us``; what rounds to nothing is ``0 s``."""
    rounded = round(seconds)
    if rounded >= 3600:
        return f"{rounded // 3600:,} h {rounded % 3600 // 60:02} min"
    if rounded >= 100:
        return f"{rounded // 60} min {rounded % 60:02} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if abs(seconds) < 5e-10 else f"{seconds * 1e9:.3g} ns"


def listed(names: Iterable[str], most: int = 8) -> str:
    """Distinct names for a message, in order."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (f" and {len(distinct) - most} more" if len(distinct) > most else "")


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
        time_left = f", ETA {format_seconds(seconds * (1 / share - 1))}" if share > 0 else ""
        return f"{self.what}: {share:.0%} of {self._show(self.total)}{time_left}"


def tracked(
    items: Iterable[T], what: str, total: float, amount: Callable[[T], float], bytes: bool = True, **more: Any
) -> Iterator[T]:
    """The items, with a :class:`WorkLine` of what each was when the next is asked for."""
    with WorkLine(what, total, bytes, **more) as line:
        for item in items:
            yield item
            line.add(amount(item))
