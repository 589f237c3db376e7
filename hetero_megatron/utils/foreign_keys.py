"""Tables of the keys that another program's file may have: each is honoured, may only say what is so anyway, or changes
nothing. What is in no table is named with the key that it is nearest to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import did_you_mean

SHOWN = 8  # unknown keys of one file in a message


@dataclass(frozen=True)
class KeyTable:
    """The keys of one kind of file.

    Args:
        honoured: keys that whoever reads the file obeys, and checks.
        fixed: key -> the values that it may have, all of which mean what is done here anyway.
        harmless: key -> why it changes nothing.
        problem: of a value that ``fixed`` does not allow.
    """

    honoured: frozenset[str]
    fixed: Mapping[str, tuple[Any, ...]]
    harmless: Mapping[str, str]
    problem: str = "is not supported"
    accepted_keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accepted_keys", self.honoured | self.fixed.keys() | self.harmless.keys())

    def check_fixed(self, values: Mapping[str, Any], where: str, more: str = "") -> None:
        """UserError for the first key with a value that ``fixed`` does not allow; ``more``: what else would do."""
        for key in self.fixed:
            if key in values and not is_one_of(values[key], self.fixed[key]):
                raise UserError(
                    self.problem, field=key, value=values[key], where=where,
                    accepted=", ".join(dict.fromkeys(map(as_json, self.fixed[key]))) + more,
                )  # fmt: skip

    def unknown(self, values: Mapping[str, Any]) -> list[str]:
        """Keys in no table whose value says something, sorted."""
        return sorted(key for key, value in values.items() if key not in self.accepted_keys and not says_nothing(value))

    def nearest(self, key: str) -> str:
        """`` (did you mean x?)`` for an unknown key, or nothing."""
        return did_you_mean(key, self.accepted_keys, 0.75)

    def named(self, keys: Iterable[str]) -> str:
        """Unknown keys in a message."""
        names = list(keys)
        others_text = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return ", ".join(f"{name[:60]}{self.nearest(name)}" for name in names[:SHOWN]) + others_text


def by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Key -> reason, of {reason: keys separated by blanks}."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


def says_nothing(value: Any) -> bool:
    """null, false, and what is empty."""
    return value is None or value is False or value in ("", [], {})


def is_one_of(value: Any, accepted: Iterable[Any]) -> bool:
    """Whether a value is one of ``accepted``; ``true`` is not 1, but 1 and 1.0 are the same."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)


def as_json(value: Any) -> str:
    """As a file has it, unquoted."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
