"""The one error class for what a user can get wrong: it says what, where, and what would be accepted. And how a program
ends that the user interrupts."""

from __future__ import annotations

from typing import Any

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended
_ABSENT = object()


class UserError(ValueError):
    """A request that cannot be honoured.

    Args:
        problem: what is wrong, in one sentence without a final stop.
        field: the flag or key, e.g. ``--tensor-model-parallel-size`` or ``pipelines[0].stages[1].tp``.
        value: the value that was read.
        accepted: what would be accepted instead.
        where: file and line (``plan.yaml:12``) or another place where the value was read.
    """

    def __init__(
        self, problem: str, *, field: str = "", value: Any = _ABSENT, accepted: str = "", where: str = ""
    ) -> None:
        self.problem, self.field, self.accepted, self.where = problem, field, accepted, where
        self.value = None if value is _ABSENT else value
        self.several: tuple[UserError, ...] = ()  # of which this one is made
        parts = [_line(where)] if where else []
        if field:
            name = _cut(_line(field), 200)
            parts.append(name if value is _ABSENT else f"{name} = {_short(value)}")
        message = _cut(": ".join([*parts, problem]))
        if accepted:
            message += f"{'' if message.endswith(('.', '?')) else '.'} Accepted: {_cut(accepted)}"
        super().__init__(printable(message))


def printable(text: str) -> str:
    """``text`` with every character that a terminal would obey instead of showing (escape sequences, changes of
    direction, lone surrogates) written as an escape; line breaks stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _line(text: str) -> str:
    """Names of keys and files that others wrote may have line breaks."""
    return text.replace("\n", "\\n")


def without_controls(text: str) -> str:
    """A model's or a corpus's text as a terminal may have it: control characters but line breaks and tabs written as
    escapes; letters that only join or mark others stay, unlike in :func:`printable`."""

    def obeyed(c: str) -> bool:
        return c not in "\n\t" and (c < " " or "\x7f" <= c <= "\x9f")

    return "".join(c.encode("unicode_escape").decode() if obeyed(c) else c for c in text)


def _short(value: Any, limit: int = 120) -> str:
    text = value if isinstance(value, str) else _repr(value)
    return _cut(" ".join(text[: 8 * limit].split()), limit)


def _cut(text: str, limit: int = 4000) -> str:
    """Lists of keys and names that others wrote may be of any length."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
