"""Words of a command line -> checked values. Exact names only: no abbreviations, no guesses."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.cli.flag import NOTICE, REFUSED, Flag
from hetero_megatron.cli.table import ALL
from hetero_megatron.errors import UserError

WHERE = "command line"
_TYPES = {int: "an integer", float: "a number", str: "a word"}
_OPTION = re.compile(r"--?[A-Za-z_]")


@dataclass
class Arguments:
    """Values by key (``--num-layers`` is ``num_layers``), defaults included.

    Attributes:
        given: keys of the supported flags that stood on the command line.
        notices: one sentence per flag that was accepted without effect.
    """

    values: dict[str, Any]
    given: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def has(self, *keys: str) -> bool:
        """Whether any of them was given."""
        return any(key in self.given for key in keys)


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def flag_error(key: str, value: object, problem: str, accepted: str = "") -> UserError:
    """A refusal of the flag with this key."""
    name = next((flag.name for flag in ALL if flag.key == key), flag_name(key))
    return UserError(problem, field=name, value=value, accepted=accepted or "leave the flag out", where=WHERE)


def index(flags: Sequence[Flag] = ALL) -> Mapping[str, Flag]:
    """Flags by every spelling of their names."""
    return {name: flag for flag in flags for name in (flag.name, *flag.aliases)}


def parse(argv: Sequence[str]) -> Arguments:
    """Read all words; of a flag that stands twice the last one counts, as in Megatron, with a notice.

    Raises:
        UserError: an unknown or refused flag, a missing, superfluous or unreadable value. Refusals come last, so
            that one message can list every flag to take out.
    """
    flags = index()
    result = Arguments({flag.key: flag.default for flag in ALL})
    refusals: list[_Refusal] = []
    at = 0
    while at < len(argv):
        name, separator, attached = argv[at].partition("=")
        if not _OPTION.match(name):
            raise UserError("belongs to no flag", field="word", value=argv[at], accepted="--flag value", where=WHERE)
        if name not in flags:
            raise _unknown(name, flags)
        flag = flags[name]
        at += 1
        words = [attached] if separator else []
        while not separator and at < len(argv) and not _OPTION.match(argv[at]) and _wants(flag, len(words)):
            words.append(argv[at])
            at += 1
        _check_count(flag, words)
        try:
            _store(flag, words, result)
        except _Refusal as refusal:
            refusals.append(refusal)
    if refusals:
        raise _first_of(refusals)
    return result


class _Refusal(UserError):
    """A flag, or a value of it, that Megatron knows and this version cannot honour."""

    def __init__(self, flag: Flag, words: Sequence[str]) -> None:
        value = " ".join(words) if words else "given"
        super().__init__(flag.help, field=flag.name, value=value, accepted=flag.remedy, where=WHERE)


def _first_of(refusals: list[_Refusal]) -> UserError:
    """The first refusal; the others are listed in it, so that one edit of the command line is enough."""
    first = refusals[0]
    others = [name for name in dict.fromkeys(r.field for r in refusals) if name != first.field]
    also = f" (also refused here: {', '.join(others)})" if others else ""
    return UserError(first.problem + also, field=first.field, value=first.value, accepted=first.accepted, where=WHERE)


def _wants(flag: Flag, count: int) -> bool:
    return flag.nargs in ("+", "*") or (isinstance(flag.nargs, int) and count < flag.nargs)


def _check_count(flag: Flag, words: list[str]) -> None:
    wrong = len(words) != flag.nargs if isinstance(flag.nargs, int) else flag.nargs == "+" and not words
    if wrong:
        wanted = {0: "no value", 1: "one value", "+": "one or more values"}.get(flag.nargs, f"{flag.nargs} values")
        raise UserError("wrong number of values", field=flag.name, value=" ".join(words), accepted=wanted, where=WHERE)


def _store(flag: Flag, words: list[str], result: Arguments) -> None:
    if flag.status == REFUSED:
        raise _Refusal(flag, words)
    values = tuple(_convert(flag, word) for word in words)
    value: Any = True if flag.nargs == 0 else values[0] if flag.nargs == 1 else values
    if flag.status == NOTICE or flag.says:
        result.notices.append(f"{flag.name} has no effect: {flag.says or flag.help}")
    if flag.status == NOTICE:
        return
    if flag.key in result.given and result.values[flag.key] != value:
        result.notices.append(f"{flag.name} stands twice: the last value counts")
    result.given.add(flag.key)
    result.values[flag.key] = value


def _convert(flag: Flag, word: str) -> Any:
    if flag.status != NOTICE and not word.strip():  # --save "$OUT" without OUT would be the working directory
        accepted = "a value, or leave the flag out"
        raise UserError("is empty (an unset variable?)", field=flag.name, value=word, accepted=accepted, where=WHERE)
    try:
        value = flag.type(word)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("not finite")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("absurdly large")
    except ValueError:
        accepted = _TYPES.get(flag.type, "JSON: a list of lists")  # type: ignore[call-overload]
        raise UserError(f"is not {accepted}", field=flag.name, value=word, accepted=accepted, where=WHERE) from None
    if flag.choices and value not in flag.choices:
        if flag.remedy:
            raise _Refusal(flag, [word])
        accepted = ", ".join(map(str, flag.choices))
        raise UserError("unknown value", field=flag.name, value=word, accepted=accepted, where=WHERE)
    return value


def _unknown(name: str, flags: Mapping[str, Flag]) -> UserError:
    spelled = name.replace("_", "-")
    longer = [known for known in flags if known.startswith(spelled) and len(spelled) > 5]
    near = longer or difflib.get_close_matches(spelled, flags, n=1, cutoff=0.75)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UserError(f"unknown flag{hint}", field=name, accepted="the flags of docs/flags.md", where=WHERE)
