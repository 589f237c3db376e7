"""The one error class for what a user can get wrong: it says what, where, and what would be accepted."""

from __future__ import annotations

import re
from typing import Any

_ABSENT = object()
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a name in a file must not steer the terminal


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
            parts.append(field if value is _ABSENT else f"{field} = {_short(value)}")
        message = ": ".join([*parts, problem])
        if accepted:
            message += f"{'' if message.endswith(('.', '?')) else '.'} Accepted: {accepted}"
        super().__init__(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", message))


def _short(value: Any, limit: int = 120) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
