"""The one error class for what a user can get wrong: it says what, where, and what would be accepted."""

from __future__ import annotations

from typing import Any

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
        parts = [where] if where else []
        if field:
            name = _cut(field, 200)
            parts.append(name if value is _ABSENT else f"{name} = {_short(value)}")
        message = _cut(": ".join([*parts, problem]))
        if accepted:
            message += f"{'' if message.endswith(('.', '?')) else '.'} Accepted: {_cut(accepted)}"
        super().__init__(printable(message))


def printable(text: str) -> str:
    """``text`` with characters that steer a terminal, or cannot be written, spelled as escapes (``\\x1b``)."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _short(value: Any, limit: int = 120) -> str:
    text = value if isinstance(value, str) else repr(value)
    return _cut(" ".join(text[: 8 * limit].split()), limit)


def _cut(text: str, limit: int = 4000) -> str:
    """Lists of keys and names that others wrote may be of any length."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
