"""JSON lines: one object per line, one document per object."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.data.sources.text import is_compressed, open_content
from hetero_megatron.errors import UserError

MAX_LINE = 256 << 20  # bytes: a file without line breaks would fill the memory
MARK = b"\xef\xbb\xbf"  # a byte order mark
_BLANK = b" \t\r\n"  # a line ends with \n or \r\n; what else Unicode calls a line break is part of a line
_DIGITS = 1000  # of a number, which nobody reads
Position = tuple[int, ...]


def read(path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """The string under ``key`` of each line; null counts as empty. A position is (byte, number of lines before it)."""
    for number, record, position_after in read_objects(path, position):
        yield text_of(record, key, f"{path}:{number}"), position_after


def read_objects(
    path: Path, position: Position = (), exact: bool = False
) -> Iterator[tuple[int, dict[str, Any], Position]]:
    """(line number from 1, object, position after it); blank lines are skipped; UserError names file and line.

    Args:
        exact: numbers are read, whatever key they are under; else those of more digits than anybody writes become 0.
    """
    offset, number = position or (0, 0)
    try:
        with open_content(path) as file:
            file.seek(offset)
            while line := file.readline(MAX_LINE + 1):
                offset, number = offset + len(line), number + 1
                if len(line) > MAX_LINE:
                    raise _bad(line, f"longer than {MAX_LINE >> 20} MiB", f"{path}:{number}")
                line = line.removeprefix(MARK)  # also of files that were put one after another
                if line.strip(_BLANK):
                    yield number, _parse(line, f"{path}:{number}", exact), (offset, number)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field="--data-path", value=str(path)) from None


def check_end(path: Path, key: str) -> None:
    """UserError if the last line is not one that ``read`` takes: a file that is cut off.

    Of a compressed file it is the first one: the last one cannot be had without reading all of it.
    """
    if is_compressed(path):
        next(read(path, key, ()), None)
        return
    with open_content(path) as file:
        size, tail, step = file.seek(0, os.SEEK_END), b"", 1 << 16
        while len(tail) < min(size, MAX_LINE):
            step = min(2 * step, size)
            file.seek(size - step)
            tail = file.read(step)
            if b"\n" in tail.rstrip(_BLANK):
                break
    last = tail.rstrip(_BLANK).rpartition(b"\n")[2].removeprefix(MARK)
    if last:
        line_name = f"{path}: last line"
        text_of(_parse(last, line_name), key, line_name)


def text_of(record: dict[str, Any], key: str, where: str) -> str:
    """The string under ``key``; of null, an empty one."""
    if key not in record:
        keys = _keys_of_text(record)
        raise UserError("the object has no such key", field="--json-keys", value=key, accepted=keys, where=where)
    if record[key] is None:
        return ""
    if not isinstance(record[key], str):
        value_shown = json.dumps(record[key])[:80]
        raise UserError("the value is not a string", field=key, value=value_shown, accepted="a string", where=where)
    text = str(record[key])
    try:
        text.encode()  # JSON can spell half of a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise UserError(
            f"holds half of a surrogate pair at character {error.start}, which is no Unicode text",
            field=key, value=ascii(text[error.start : error.start + 20]), accepted="Unicode text", where=where,
        ) from None  # fmt: skip
    return text


def _keys_of_text(record: dict[str, Any]) -> str:
    """What --json-keys may name, of an object; and where conversations go."""
    if keys := shown_names(key for key, value in record.items() if isinstance(value, str)):
        return keys
    lists = (value for value in record.values() if isinstance(value, list) and value)
    if any(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn, *_ in lists):
        return "objects with text; conversations are for hetero-megatron finetune"
    key_names = shown_names(record)
    return f"objects with a key that holds text{f' (it has {key_names})' if key_names else ''}"


def _parse(line: bytes, where: str, exact: bool = False) -> dict[str, Any]:
    try:
        record = json.loads(line.decode(), parse_int=exact_integer if exact else _integer)
    except UserError as error:
        raise _bad(line, error.problem, where) from None
    except UnicodeDecodeError:
        raise _bad(line, "not JSON: not UTF-8 text", where) from None
    except RecursionError:
        raise _bad(line, "not JSON that can be read: nested too deeply", where) from None
    except ValueError:
        raise _bad(line, "not JSON, or cut off", where) from None
    if not isinstance(record, dict):
        raise _bad(line, "not a JSON object", where)
    return record


def exact_integer(digits: str) -> int:
    """An integer of at most ``_DIGITS`` digits. UserError: of more."""
    if len(digits) > _DIGITS:
        raise UserError(f"a number of {len(digits):,} digits", accepted=f"at most {_DIGITS:,}")
    return int(digits)


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= _DIGITS else 0


def shown_names(names: Iterable[str], most: int = 12) -> str:
    """Keys or columns for a message: the first ones, printable."""
    sorted_names = sorted(names)
    shown_part = [name.encode("utf-8", "backslashreplace").decode()[:40] for name in sorted_names[:most]]
    return ", ".join(shown_part) + (f" and {len(sorted_names) - most} more" if len(sorted_names) > most else "")


def _bad(line: bytes, problem: str, where: str) -> UserError:
    line_shown = line[:80].decode("utf-8", "replace").rstrip()
    accepted = "one JSON object per line"
    if line.strip() in (b"[", b"{") or line.lstrip().startswith(b"[{"):  # a list, or objects over several lines
        accepted += f" (jq -c {repr('.[]') if line.lstrip().startswith(b'[') else '.'} makes such lines)"
    return UserError(problem, field="line", value=line_shown, accepted=accepted, where=where)
