"""What the fields of a run's logs may be: each is checked before anything is computed with it. No torch.

A ``Check`` is called with a value and says what is wrong: (field in it, the value there, what is accepted), or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hetero_megatron.errors import UserError

Wrong = tuple[str, Any, str] | None
Check = Callable[[Any], Wrong]
MISSING = object()
LARGEST = 1e30  # of a measured number: differences and sums of such numbers are finite
MOST = 2**53  # of a count: it is exact as a float, too


def integer(low: int = 0, high: int = MOST) -> Check:
    def check(value: Any) -> Wrong:
        is_valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if is_valid else ("", value, f"an integer from {low} to {high}")

    return check


def number(low: float = -LARGEST, high: float = LARGEST) -> Check:
    def check(value: Any) -> Wrong:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_valid and math.isfinite(value) and low <= value <= high
        return None if is_valid else ("", value, f"a number from {low:g} to {high:g}")

    return check


def kind(of: type, accepted: str) -> Check:
    return lambda value: None if isinstance(value, of) else ("", value, accepted)


text, flag, anything = kind(str, "text"), kind(bool, "true or false"), kind(object, "")


def one_of(*values: str) -> Check:
    return lambda value: None if isinstance(value, str) and value in values else ("", value, ", ".join(values))


def maybe(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def array(inner: Check) -> Check:
    def check(value: Any) -> Wrong:
        if not isinstance(value, list):
            return "", value, "a list"
        for index, item in enumerate(value):
            if problem := inner(item):
                return f"[{index}]" + problem[0], *problem[1:]
        return None

    return check


def row(*inner: Check) -> Check:
    """A list with as many items as there are checks, one for each."""

    def check(value: Any) -> Wrong:
        if not isinstance(value, list) or len(value) != len(inner):
            return "", value, f"a list of {len(inner)}"
        for index, (item, one) in enumerate(zip(value, inner, strict=True)):
            if problem := one(item):
                return f"[{index}]" + problem[0], *problem[1:]
        return None

    return check


def some(inner: Check) -> Check:
    """Not empty."""
    return lambda value: ("", value, "one or more") if value in ([], {}, "") else inner(value)


def mapping(inner: Check, keys: Check = text) -> Check:
    def check(value: Any) -> Wrong:
        if not isinstance(value, dict):
            return "", value, "an object"
        for key, item in value.items():
            if problem := keys(key) or inner(item):
                return f".{key}" + problem[0], *problem[1:]
        return None

    return check


def numbered(inner: Check) -> Check:
    """An object whose keys are ranks."""
    ranks = lambda key: None if key.isascii() and key.isdigit() and len(key) < 10 else ("", key, "a rank")  # noqa: E731
    return mapping(inner, ranks)


def record(fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object with these fields; it may have others, which nobody reads."""

    def check(value: Any) -> Wrong:
        if not isinstance(value, dict):
            return "", value, "an object"
        for name, inner in fields.items():
            if name not in value:
                return f".{name}", MISSING, ""
            if problem := inner(value[name]):
                return f".{name}" + problem[0], *problem[1:]
        for name, inner in (optional or {}).items():
            if name in value and (problem := inner(value[name])):
                return f".{name}" + problem[0], *problem[1:]
        return None

    return check


def require(value: Any, check: Check, what: str, where: str) -> None:
    """UserError that names field, value and place where ``value`` is not ``what`` it should be."""
    if problem := check(value):
        field, wrong_value, accepted = problem
        if wrong_value is MISSING:
            raise UserError(f"is missing: this is not {what}", field=field.lstrip("."), where=where)
        raise UserError(f"is not {what}", field=field.lstrip("."), value=wrong_value, accepted=accepted, where=where)
