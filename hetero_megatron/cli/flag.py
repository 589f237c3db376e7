"""What a flag is: one entry of the table that parser, refusals, help and docs/flags.md all read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUPPORTED, NOTICE, REFUSED = "supported", "notice", "refused"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        name: with its dashes.
        status: ``supported``; ``notice``: accepted, has no effect, and says so; ``refused``.
        nargs: 0 (a switch), a number of values, ``+`` (one or more) or ``*`` (any number).
        type: converts one value.
        default: value when it is not given.
        help: what it does; for other statuses, why it has no effect or is refused.
        remedy: what to do instead, for a refusal.
        choices: accepted values; with ``remedy``, other values are refused for the reason in ``help``.
        differs: how the default differs from Megatron's, and why.
        aliases: other spellings.
        says: printed when the flag is given, where an accepted value has no effect.
    """

    name: str
    status: str
    nargs: int | str
    type: Callable[[str], Any]
    default: Any
    help: str
    remedy: str = ""
    choices: tuple[Any, ...] = ()
    differs: str = ""
    aliases: tuple[str, ...] = ()
    says: str = ""

    @property
    def key(self) -> str:
        """Its name in parsed values: ``--num-layers`` is ``num_layers``."""
        return self.name[2:].replace("-", "_")


def value(
    name: str,
    type: Callable[[str], Any],
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    nargs: int | str = 1,
    differs: str = "",
    aliases: tuple[str, ...] = (),
) -> Flag:
    """A supported flag with one value (or ``nargs`` of them)."""
    return Flag(name, SUPPORTED, nargs, type, default, help, "", choices, differs, aliases)


def switch(name: str, help: str, *, differs: str = "", aliases: tuple[str, ...] = ()) -> Flag:
    """A supported flag without a value."""
    return Flag(name, SUPPORTED, 0, str, False, help, differs=differs, aliases=aliases)


def only(
    name: str,
    type: Callable[[str], Any],
    choices: tuple[Any, ...],
    reason: str,
    remedy: str,
    *,
    default: Any = None,
    nargs: int | str = 1,
    differs: str = "",
    says: str = "",
) -> Flag:
    """A flag that changes something which this version cannot do: only these values are accepted."""
    return Flag(name, SUPPORTED, nargs, type, default, reason, remedy, choices, differs, says=says)


def notice(
    name: str,
    reason: str,
    *,
    nargs: int | str = 0,
    type: Callable[[str], Any] = str,
    differs: str = "",
    aliases: tuple[str, ...] = (),
) -> Flag:
    """A harmless flag: accepted, without effect, and the start of the run says why."""
    return Flag(name, NOTICE, nargs, type, None, reason, differs=differs, aliases=aliases)


def refused(name: str, reason: str, remedy: str = "leave the flag out", *, nargs: int | str = 0) -> Flag:
    """A flag that this version cannot honour."""
    return Flag(name, REFUSED, nargs, str, None, reason, remedy)
