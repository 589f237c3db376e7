"""argparse for sub-commands; every error in a command line is a UserError."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hetero_megatron import __version__
from hetero_megatron.errors import UserError

# What argparse makes of an error of ``numbers.Number``.
_NUMBER = re.compile(
    r"argument (?P<flag>[^:]+): '(?P<word>.*)' (?P<problem>is (not an? \w+|not finite|too small|too large))"
    r"(; accepted: (?P<accepted>.*))?",
    re.DOTALL,
)
MANY = 12  # options that a usage line no longer lists


class CommandParser(argparse.ArgumentParser):
    """Raises UserError; no abbreviated flags, no empty values; has --version."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=version_line())

    def format_help(self) -> str:
        """The help; a usage line with what is required and ``[options]`` where there are many of them."""
        optional = [action for action in self._actions if action.option_strings and not action.required]
        if self.usage is None and len(optional) > MANY:
            formatter = self._get_formatter()
            formatter.add_usage(None, [action for action in self._actions if action not in optional], (), prefix="")
            self.usage = formatter.format_help().strip().replace("%", "%%") + " [options]"
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        if match := _NUMBER.fullmatch(message):
            problem, flag, accepted = match["problem"], match["flag"], match["accepted"] or ""
            raise UserError(problem, field=flag, value=match["word"], accepted=accepted, where=self.prog)
        raise UserError(message, where=self.prog, accepted=f"`{self.prog} --help` lists the flags")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        refuse_empty(args or ())
        return super().parse_known_args(args, namespace)


class ArgumentParser(CommandParser):
    """Of a sub-command of ``hetero-megatron``."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(f"hetero-megatron {command}", description)


def version_line() -> str:
    """What ``--version`` prints."""
    return f"Hetero-Megatron {__version__}"


def refuse_empty(words: Sequence[str]) -> None:
    """Refuse empty values: with an unset variable, ``--out "$OUT"`` would write nothing and ``--directory`` would be
    the working directory."""
    previous_word = ""
    for word in words:
        name, separator, value = word.partition("=")
        if not word.strip() or (separator and name.startswith("--") and not value.strip()):
            field = name if separator else previous_word if previous_word.startswith("-") else "command line"
            raise UserError("is empty (an unset variable?)", field=field, value="", accepted="a value")
        previous_word = word


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
        if (violation := beyond(value, self.least, self.most, self.above, self.below)) is not None:
            raise argparse.ArgumentTypeError(f"{word[:40]!r} is {violation[0]}; accepted: {violation[1]}")
        return value


def count(least: int = 1, most: int = 2**31 - 1) -> Number:
    """A whole number."""
    return Number(int, least, most)


def seconds(most: float = 1e6) -> Number:
    """Above 0, and long enough to be told from it."""
    return Number(float, 1e-3, most)


SHARE = Number(float, 0, None, below=1)
