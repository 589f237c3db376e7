"""Rows of parquet, Arrow and ``datasets`` as the values that were written: what JSON has, without a table's traces.

A table has all fields of a struct in every row, null where a record had none, and keeps values of any other shape as
JSON text. jsonl has neither. Here fields without a value inside of structs are left out, JSON text is parsed (its
nulls were written by someone and stay), and maps become objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json

Converter = Callable[[Any, str, str], Any]  # (value, name of its place, file and row) -> plain value
# Kinds of features whose values are what rows say.
_PLAIN = ("Value", "List", "LargeList", "Sequence", "Json", "Translation", "TranslationVariableLanguages", "Array2D",
          "Array3D", "Array4D", "Array5D")  # fmt: skip
_FEATURES = b"huggingface"  # key of what datasets says of the columns, in a schema's metadata


class Described(NamedTuple):
    """A value that only stands for what a row says: the number of a class, a picture's path.

    ``kind``: what ``datasets`` calls it.
    """

    kind: str
    value: Any


def row_converter(schema: Any, path: str) -> Callable[[Mapping[str, Any], str], dict[str, Any]]:
    """(row as pyarrow gives it, file and row) -> record, for the pyarrow schema of a file.

    Raises (the converter, too):
        UserError: JSON text that is none, what ``datasets`` says of the columns among it.
    """
    features = _features(schema, path)
    columns = {field.name: _of_type(field.type, features.get(field.name)) for field in schema}

    def convert(row: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {name: value if value is None else columns[name](value, name, where) for name, value in row.items()}

    return convert


def feature_converter(features: Mapping[str, Any] | None) -> Callable[[Mapping[str, Any], str], dict[str, Any]]:
    """The same for rows of ``datasets``, which has parsed JSON text itself; ``features``: its own, None: not known."""
    columns = {name: _of_feature(feature) for name, feature in (features or {}).items()}

    def convert(row: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {name: columns.get(name, _plain)(value, name, where) for name, value in row.items()}

    return convert


def _features(schema: Any, path: str) -> Mapping[str, Any]:
    """What ``datasets`` says of columns; nothing where it did not write the file. UserError: it is damaged."""
    text = (schema.metadata or {}).get(_FEATURES)
    if text is None:
        return {}
    try:
        said = parse_json(text, "schema")
    except UserError as error:
        raise _damaged(error.problem, path) from None
    info = said.get("info") if isinstance(said, dict) else said
    features = info.get("features") if isinstance(info, dict) else info
    if features is None:
        return {}
    if not isinstance(features, dict) or not all(isinstance(one, (dict, list)) for one in features.values()):
        raise _damaged("describes no columns", path)
    return features


def _damaged(problem: str, path: str) -> UserError:
    """datasets does not read such a file either."""
    return UserError(
        f"what datasets says of the columns is damaged: {problem}", field="--data-path", value=path,
        accepted=f"a file whose schema has sound metadata under {_FEATURES.decode()!r}, or none",
    )  # fmt: skip


def _of_type(kind: Any, feature: Any) -> Converter:
    """For a column or a part of it, of a pyarrow type; ``feature``: what ``datasets`` says of the same."""
    import pyarrow as pa

    description = feature if isinstance(feature, dict) else {}
    if getattr(kind, "extension_name", "") == "arrow.json" or description.get("_type") == "Json":
        return _json
    if (name := description.get("_type")) is not None and isinstance(name, str) and name not in _PLAIN:
        return _described(name)
    if pa.types.is_struct(kind):
        return _struct({kind.field(i).name: _of_type(kind.field(i).type, description.get(kind.field(i).name))
                        for i in range(kind.num_fields)})  # fmt: skip
    if pa.types.is_map(kind):
        return _struct_of(_of_type(kind.item_type, None))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind) or (
        pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    ):  # fmt: skip
        inner = feature[0] if isinstance(feature, list) and feature else description.get("feature")
        return _list(_of_type(kind.value_type, inner))
    return _same


def _of_feature(feature: Any) -> Converter:
    """For a column of ``datasets``: nulls in JSON stay, those in structs are left out."""
    if type(feature).__name__ == "Json":
        return _same
    if isinstance(feature, dict):
        return _struct({name: _of_feature(inner) for name, inner in feature.items()})
    if isinstance(feature, (list, tuple)) and feature:
        return _list(_of_feature(feature[0]))
    if hasattr(feature, "feature"):
        return _list(_of_feature(feature.feature))
    return _plain if type(feature).__name__ in _PLAIN else _described(type(feature).__name__)


def _described(kind: str) -> Converter:
    return lambda value, name, where: value if value is None else Described(kind, value)


def _same(value: Any, name: str, where: str) -> Any:
    return value


def _plain(value: Any, name: str, where: str) -> Any:
    """Without nulls in objects, at any depth."""
    if isinstance(value, dict):
        return {key: _plain(inner, name, where) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner, name, where) for inner in value]
    return value


def _json(value: Any, name: str, where: str) -> Any:
    return parse_json(value, where, name) if isinstance(value, (str, bytes)) else value


def _list(inner: Converter) -> Converter:
    if inner is _same:
        return _same

    def convert(value: Any, name: str, where: str) -> Any:
        if not isinstance(value, list):
            return value
        return [part if part is None else inner(part, f"{name}[{i}]", where) for i, part in enumerate(value)]

    return convert


def _struct(fields: Mapping[str, Converter]) -> Converter:
    def convert(value: Any, name: str, where: str) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: fields.get(key, _same)(field, f"{name}.{key}", where)
            for key, field in value.items()
            if field is not None
        }

    return convert


def _struct_of(inner: Converter) -> Converter:
    """Of a map, which pyarrow gives as pairs; its nulls were written by someone."""

    def convert(value: Any, name: str, where: str) -> Any:
        pairs = value.items() if isinstance(value, dict) else value
        return {str(key): field if field is None else inner(field, f"{name}.{key}", where) for key, field in pairs}

    return convert


def json_values(record: Mapping[str, Any], keys: Collection[str], where: str) -> dict[str, Any]:
    """A record of nothing but what JSON has: elsewhere than under ``keys`` other values are replaced by their kind.

    Raises:
        UserError: another value (a date, bytes) under ``keys``.
    """
    return {key: _checked(value, key, where, key in keys) for key, value in record.items()}


def _checked(value: Any, name: str, where: str, needed: bool) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Described) and needed:
        raise UserError(
            f"a column of kind {value.kind[:40]}, whose values only stand for what is meant", field=name,
            value=str(value.value)[:80], accepted="text, or lists and objects of text", where=where,
        )  # fmt: skip
    if isinstance(value, Described):
        return _checked(value.value, name, where, needed)
    if isinstance(value, dict):
        return {str(key): _checked(inner, f"{name}.{key}", where, needed) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_checked(inner, f"{name}[{i}]", where, needed) for i, inner in enumerate(value)]
    if needed:
        raise UserError(
            f"a value of type {type(value).__name__}, which no text has", field=name, value=str(value)[:80],
            accepted="text, numbers, true, false, null, lists and objects of them", where=where,
        )  # fmt: skip
    return f"<{type(value).__name__}>"
