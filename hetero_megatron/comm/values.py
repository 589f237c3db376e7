"""Values exchanged between ranks as JSON: nothing received is executed, and types are checked.

A kind is ``None``, ``bool``, ``int``, ``float``, ``str``, a dataclass, or composed of kinds: ``list[K]``, ``tuple[K,
...]``, ``tuple[K, L]``, ``dict[K, L]``, ``K | L``. ``Any``: any JSON; tuples arrive as lists.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json

MAX_BYTES = 1 << 30  # of one value; the chunks of a rank's checkpoint take about 200 bytes each


class _WrongType(Exception):
    pass


def encode(value: object) -> bytes:
    """A value of one of the kinds as UTF-8 JSON. TypeError: of none of them."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes, kind: Any, source: str) -> Any:
    """The value that was encoded.

    Args:
        source: the sender, for error messages.

    Raises:
        UserError: it is not a value of this kind.
    """
    try:
        return _typed(parse_json(data, source), kind)
    except _WrongType as error:
        raise UserError(
            f"{source} sent {error}", accepted="the same version of hetero-megatron on every rank, and nobody else"
        ) from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    raise TypeError(f"{type(value).__name__} does not travel between ranks: {value!r}")


@functools.cache
def _field_kinds(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _typed(value: Any, kind: Any) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (None, type(None), bool, int, str):
        if type(value) is not (kind or type(None)):
            raise _WrongType(f"{_shown(value)} for {_name(kind)}")
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, arguments, kind)
    if origin is list and isinstance(value, list):
        return [_typed(item, arguments[0]) for item in value]
    if origin is tuple and isinstance(value, list):
        if arguments[1:] == (...,):
            return tuple(_typed(item, arguments[0]) for item in value)
        if len(value) == len(arguments):
            return tuple(_typed(item, inner) for item, inner in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict) and (arguments[0] is str or not value):
        return {key: _typed(item, arguments[1]) for key, item in value.items()}
    if origin is dict and isinstance(value, list) and arguments[0] is not str:
        return dict(_typed(value, list[tuple[arguments]]))  # type: ignore[valid-type]
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        kinds = _field_kinds(typing.cast(type, kind))
        if value.keys() == kinds.keys():
            return kind(**{name: _typed(value[name], inner) for name, inner in kinds.items()})  # type: ignore[operator]
    raise _WrongType(f"{_shown(value)} for {_name(kind)}")


def _one_of(value: Any, kinds: tuple[Any, ...], whole: Any) -> Any:
    for kind in kinds:
        try:
            return _typed(value, kind)
        except _WrongType:
            pass
    raise _WrongType(f"{_shown(value)} for {_name(whole)}")


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _shown(value: Any, limit: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
