"""JSON lines: one object per line, one document per object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.errors import UserError

Position = tuple[int, ...]


def read(path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """The string under ``key`` of each line. A position is (byte, number of lines before it)."""
    for number, record, after in read_objects(path, position):
        yield text_of(record, key, f"{path}:{number}"), after


def read_objects(path: Path, position: Position = ()) -> Iterator[tuple[int, dict[str, Any], Position]]:
    """(line number from 1, object, position after it); blank lines are skipped; UserError names file and line."""
    offset, number = position or (0, 0)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                offset, number = offset + len(line), number + 1
                if line.strip():
                    yield number, _parse(line, f"{path}:{number}"), (offset, number)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field="--data-path", value=str(path)) from None


def text_of(record: dict[str, Any], key: str, where: str) -> str:
    """The string under ``key``."""
    if key not in record:
        keys = ", ".join(sorted(record)) or "no keys at all"
        raise UserError("the object has no such key", field="--json-keys", value=key, accepted=keys, where=where)
    if not isinstance(record[key], str):
        shown = json.dumps(record[key])  # null, not None
        raise UserError("the value is not a string", field=key, value=shown, accepted="a string", where=where)
    text = str(record[key])
    try:
        text.encode()  # JSON can spell half of a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise UserError(
            f"holds half of a surrogate pair at character {error.start}, which is no Unicode text",
            field=key, value=ascii(text[error.start : error.start + 20]), accepted="Unicode text", where=where,
        ) from None  # fmt: skip
    return text


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also UnicodeDecodeError
        raise _bad(line, f"not JSON ({error})", where) from None
    if not isinstance(record, dict):
        raise _bad(line, "not a JSON object", where)
    return record


def _bad(line: bytes, problem: str, where: str) -> UserError:
    shown = line[:80].decode("utf-8", "replace").rstrip()
    return UserError(problem, field="line", value=shown, accepted="one JSON object per line", where=where)
