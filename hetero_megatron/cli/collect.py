"""All errors of a command line in one message: each part of it is checked, whatever the others are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hetero_megatron.cli.flags.config_file import placed
from hetero_megatron.cli.flags.parse import Unknown, together
from hetero_megatron.errors import UserError

T = TypeVar("T")


class Collector:
    """
    Args:
        errors: that were found before.
        places: flag -> file and line, of those that a file gave.
    """

    def __init__(self, errors: list[UserError], places: Mapping[str, str]) -> None:
        self._errors, self._places = errors, places

    def part(self, build: Callable[..., T], *arguments: Any) -> T:
        """What ``build`` returns. Where it raises a UserError, which is kept, or needs what could not be built or read,
        the result is one that no other part takes."""
        if not any(argument is _NOTHING for argument in arguments):
            try:
                return build(*arguments)
            except UserError as raised:
                error = placed(raised, self._places)
                if str(error) not in map(str, self._errors):
                    self._errors.append(error)
            except Unknown:
                pass
        return _NOTHING

    def done(self) -> None:
        """UserError: all that were found, in one."""
        if self._errors:
            raise together(self._errors)


_NOTHING: Any = object()
