"""argparse for sub-commands; every error in a command line is a UserError."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from hetero_megatron.errors import UserError
from hetero_megatron.utils.version import __version__

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
        if found := _NUMBER.fullmatch(message):
            problem, flag, accepted = found["problem"], found["flag"], found["accepted"] or ""
            raise UserError(problem, field=flag, value=found["word"], accepted=accepted, where=self.prog)
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
    before = ""
    for word in words:
        name, separator, value = word.partition("=")
        if not word.strip() or (separator and name.startswith("--") and not value.strip()):
            field = name if separator else before if before.startswith("-") else "command line"
            raise UserError("is empty (an unset variable?)", field=field, value="", accepted="a value")
        before = word
