"""What goes wrong on one rank, told to all: they refuse together, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from hetero_megatron.comm.comm import Group
from hetero_megatron.errors import UserError


@dataclass(frozen=True)
class Refusal:
    """A ``UserError`` as it travels between ranks; ``value``: as it is shown, None where there is none."""

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
    """Do ``action`` here; its results (of ``kind``, see :mod:`~hetero_megatron.comm.values`) on all ranks of the group.

    Raises:
        UserError: of the first rank whose action raised one, on all ranks.
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
