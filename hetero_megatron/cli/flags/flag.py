"""Definition of a flag: the entry of the table that parser, refusals, help and docs/flags.md use."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError

SUPPORTED, NOTICE, REFUSED = "supported", "notice", "refused"


@dataclass(frozen=True)
class Need:
    """A condition without which a flag has no effect. Giving the flag without it is an error.

    Args:
        any_of: one of these must hold: ``--flag`` (neither off nor 0), ``--flag VALUE`` (has this value, possibly by
            default), or a fact about the data (see ``cli.use``).
        harmless: only give a notice, because Megatron launch lines commonly have the flag anyway.
    """

    any_of: tuple[str, ...]
    harmless: bool = False


def needs(*any_of: str, harmless: bool = False) -> tuple[Need, ...]:
    """A condition for ``Flag.needs``: one of these must hold; several conditions are combined by "and"."""
    return (Need(any_of, harmless),)


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
        needs: what it has no effect without; all of them have to hold.
        least, most, above, below: bounds of a number; the number itself may be ``least`` or ``most``.
        summary: what it does, for ``--help``, where ``help`` says why other values are refused.
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
    needs: tuple[Need, ...] = ()
    least: float | None = None
    most: float | None = None
    summary: str = ""
    above: float | None = None
    below: float | None = None

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
    needs: tuple[Need, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Flag:
    """A supported flag with one value (or ``nargs`` of them)."""
    return Flag(
        name, SUPPORTED, nargs, type, default, help, "", choices, differs, aliases, "", needs, least, most, "", above,
        below,
    )  # fmt: skip


def count(
    name: str,
    default: int | None,
    help: str,
    *,
    least: int = 1,
    most: int = 10**12,
    nargs: int | str = 1,
    differs: str = "",
    aliases: tuple[str, ...] = (),
    needs: tuple[Need, ...] = (),
) -> Flag:
    """A supported flag with a whole number of something (or ``nargs`` of them)."""
    return value(
        name, int, default, help, nargs=nargs, differs=differs, aliases=aliases, needs=needs, least=least, most=most
    )


def switch(
    name: str, help: str, *, differs: str = "", aliases: tuple[str, ...] = (), needs: tuple[Need, ...] = ()
) -> Flag:
    """A supported flag without a value."""
    return Flag(name, SUPPORTED, 0, str, False, help, differs=differs, aliases=aliases, needs=needs)


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
    needs: tuple[Need, ...] = (),
    summary: str = "",
) -> Flag:
    """A flag for a feature that this version lacks: only these values are accepted."""
    return Flag(
        name, SUPPORTED, nargs, type, default, reason, remedy, choices, differs, says=says, needs=needs, summary=summary
    )


def notice(
    name: str,
    reason: str,
    *,
    nargs: int | str = 0,
    type: Callable[[str], Any] = str,
    differs: str = "",
    aliases: tuple[str, ...] = (),
) -> Flag:
    """A harmless flag: accepted without effect; the start of the run gives the reason."""
    return Flag(name, NOTICE, nargs, type, None, reason, differs=differs, aliases=aliases)


def refused(
    name: str,
    reason: str,
    remedy: str = "leave the flag out",
    *,
    nargs: int | str = 0,
    aliases: tuple[str, ...] = (),
) -> Flag:
    """A flag that this version does not support."""
    return Flag(name, REFUSED, nargs, str, None, reason, remedy, aliases=aliases)


def family(status: Callable[..., Flag], names: str, *words: str) -> tuple[Flag, ...]:
    """Flags with one status, reason and remedy.

    Args:
        status: ``notice`` or ``refused``.
        names: separated by blanks: ``--name``; ``--name=`` takes a value, ``--name=+`` one or more, ``--name=*`` any
            number; ``--name/--other`` are spellings of one flag.
        words: reason and remedy.
    """
    nargs: dict[str, int | str] = {"": 1, "+": "+", "*": "*"}
    flags = []
    for word in names.split():
        spelled, equals, count_mark = word.partition("=")
        name, *aliases = spelled.split("/")
        flags.append(status(name, *words, nargs=nargs[count_mark] if equals else 0, aliases=tuple(aliases)))
    return tuple(flags)


def unknown_flag(name: str, flags: Iterable[str], where: str) -> UserError:
    """Of a name that is no flag's, with those that are near."""
    spelled = name.replace("_", "-")[:200]
    names = list(flags)
    longer = [candidate for candidate in names if candidate.startswith(spelled) and len(spelled) > 5]
    nearest = list(dict.fromkeys([*longer, *difflib.get_close_matches(spelled, names, n=3, cutoff=0.6)]))[:3]
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    hint += f" (near are also {' and '.join(nearest[1:])})" if nearest[1:] else ""
    return UserError(f"unknown flag{hint}", field=name, accepted="the flags of docs/flags.md", where=where)
