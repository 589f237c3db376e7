"""Errors of one rank that are raised on all ranks with the same message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from hetero_megatron.comm.comm import Group
from hetero_megatron.errors import UserError


@dataclass(frozen=True)
class Refusal:
    """A serialisable ``UserError``; ``value``: as shown, None if there is none."""

    problem: str
    field: str
    value: str | None
    accepted: str
    where: str

    @staticmethod
    def of(error: UserError) -> Refusal:
        value = error.value if error.value is None or isinstance(error.value, str) else repr(error.value)
        return Refusal(error.problem, error.field, value, error.accepted, error.where)

    def error(self) -> UserError:
        shown = {} if self.value is None else {"value": self.value}
        return UserError(self.problem, field=self.field, accepted=self.accepted, where=self.where, **shown)


def together(group: Group, action: Callable[[], Any], kind: Any = NoneType) -> list[Any]:
    """Run ``action`` here; returns the results (of type ``kind``) of all ranks of the group.

    Raises:
        UserError: that of the first rank whose action raised one, on all ranks.
    """
    problem, result = None, None
    try:
        result = action()
    except UserError as error:
        problem = Refusal.of(error)
    found = group.gather_objects((problem, result), tuple[Refusal | None, kind | None])
    for failed, _ in found:
        if failed is not None:
            raise failed.error()
    return [done for _, done in found]
