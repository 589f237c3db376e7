"""Numbers on command lines: how they are written, and their ranges."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

KINDS: dict[type, str] = {int: "an integer", float: "a number"}
MOST_DIGITS = 4000
ENDLESS, TINY = 10**12, 1e-3  # bounds that only keep arithmetic in order are not what a user asks about
_SPELLINGS = {  # Python's own int() and float() also take "1_000", "infinity" and digits of other scripts
    int: re.compile(rf"[+-]?[0-9]{{1,{MOST_DIGITS}}}"),
    float: re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?"),
}


def read_number(kind: type, word: str) -> int | float:
    """ValueError: not written as one of this kind, or not finite; its text says what is wrong."""
    if not _SPELLINGS[kind].fullmatch(word.strip(" ")):
        raise ValueError(f"is not {KINDS[kind]}")
    value: int | float = kind(word.strip(" "))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is not finite")
    return value


def beyond(
    value: float, least: float | None, most: float | None, above: float | None = None, below: float | None = None
) -> tuple[str, str] | None:
    """(what is wrong, what would be accepted) of a number outside its range, whose bounds are included but for
    ``above`` and ``below``; None: it is inside."""
    low = (least is not None and value < least) or (above is not None and value <= above)
    high = (most is not None and value > most) or (below is not None and value >= below)
    if not low and not high:
        return None
    return "too small" if low else "too large", in_words(isinstance(value, int), least, most, above, below)


def in_words(
    whole: bool, least: float | None, most: float | None, above: float | None = None, below: float | None = None
) -> str:
    """A range: ``an integer >= 1, at most 65,536``, ``0 or more, less than 1``, ``above 0 (from 1e-30), at most 1``."""
    if whole:
        low = "" if least is None else f"an integer >= {least:,}"
        high = "" if most is None or most >= ENDLESS else f"at most {most:,}"
        return ", ".join(filter(None, (low, high)))
    tiny = least is not None and 0 < least <= TINY
    low = f"above {above:g}" if above is not None else f"above 0 (from {least:g})" if tiny else (
        f"{least:g} or more" if least is not None else ""
    )  # fmt: skip
    high = f"less than {below:g}" if below is not None else f"at most {most:g}" if most is not None else ""
    return ", ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class Number:
    """For argparse's ``type``: a number and its range; see :func:`beyond`."""

    kind: type
    least: float | None
    most: float | None
    above: float | None = None
    below: float | None = None

    def __call__(self, word: str) -> int | float:
        try:
            value = read_number(self.kind, word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{word[:40]!r} {error}") from None
        if (wrong := beyond(value, self.least, self.most, self.above, self.below)) is not None:
            raise argparse.ArgumentTypeError(f"{word[:40]!r} is {wrong[0]}; accepted: {wrong[1]}")
        return value


def count(least: int = 1, most: int = 2**31 - 1) -> Number:
    """A whole number."""
    return Number(int, least, most)


def seconds(most: float = 1e6) -> Number:
    """Above 0, and long enough to be told from it."""
    return Number(float, 1e-3, most)


SHARE = Number(float, 0, None, below=1)
