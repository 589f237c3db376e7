"""Reading files that others wrote: configurations, plans, indices, metadata, logs.

Every reader of such a file goes through here, so that a damaged or hostile one is a refusal and never a
traceback, a hang or an exhausted memory: only regular files are opened (a FIFO or a device would block for
ever), sizes, nesting and digits are bounded before anything is built, and text is text (UTF-8 without lone
surrogates, which cannot be printed).
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

from hetero_megatron.errors import UserError

MAX_TEXT_BYTES = 64 << 20  # a plan of 10,240 ranks with every unit written out has 4 MB
MAX_LINE_BYTES = 16 << 20  # the record of a step of 10,240 ranks has 0.7 MB
MAX_DEPTH = 64
MAX_DIGITS = 32  # of an integer; readers bound the value itself
_POINTER = b"version https://git-lfs.github.com/spec/v1"
POINTER = "it is a pointer of Git LFS, not the file itself, which git lfs pull fetches"
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = (
    (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"),
)  # fmt: skip

Name = str | os.PathLike[str]


def open_file(path: Name, field: str = "") -> BinaryIO:
    """Open a regular file for reading, without ever blocking.

    Args:
        field: the flag or key that named the file, for refusals.

    Raises:
        UserError: it does not exist, cannot be read, or is not a regular file (links are followed).
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        _unreadable(path, field, getattr(error, "strerror", None) or "not a name of a file")
    kind = _kind(os.fstat(handle).st_mode)
    if kind:
        os.close(handle)
        _unreadable(path, field, f"it is {kind}, not a regular file")
    return os.fdopen(handle, "rb")


def require_regular(path: Name, field: str = "") -> None:
    """Refuse anything but a readable regular file; for files whose path is then given to a library."""
    open_file(path, field).close()


def is_regular(path: Name) -> bool:
    """Whether there is a regular file (links are followed); False for anything else, and where nothing is."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Name, field: str = "", limit: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. UserError otherwise."""
    with open_file(path, field) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            _unreadable(path, field, error.strerror or "input/output error")
    if len(content) > limit:
        _unreadable(path, field, f"it is larger than {limit >> 20} MiB" if limit >> 20 else "it is too large")
    return content


def read_text(path: Name, field: str = "", limit: int = MAX_TEXT_BYTES) -> str:
    """The content of a regular UTF-8 file of at most ``limit`` bytes. UserError otherwise."""
    try:
        return read_bytes(path, field, limit).decode("utf-8")
    except UnicodeDecodeError:
        _unreadable(path, field, "it is not UTF-8 text")


def read_lines(path: Name, field: str = "") -> list[str]:
    """The lines of a text file that are not blank, without their ends, ``\\n`` or ``\\r\\n``; spaces are kept.

    What Unicode calls a line break besides (a form feed, U+2028) is part of a line; a byte order mark is not.
    """
    lines = read_text(path, field).removeprefix("\ufeff").split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip(" \t\r")]


def read_json(path: Name, field: str = "", limit: int = MAX_TEXT_BYTES) -> Any:
    """The value in a JSON file, parsed by :func:`parse_json`. UserError if it cannot be read or parsed."""
    return parse_json(read_text(path, field, limit), os.fspath(path), field)


def is_pointer(path: Name) -> bool:
    """Whether a regular file is a pointer of Git LFS, as a clone without it has them in place of large files."""
    return begins_with(path, _POINTER)


def begins_with(path: Name, mark: bytes) -> bool:
    """Whether these are the first bytes of a regular file."""
    with open_file(path) as file:
        return file.read(len(mark)) == mark


def read_json_object(path: Name, field: str = "", limit: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """As :func:`read_json`, for a file whose value has to be an object."""
    value = read_json(path, field, limit)
    if not isinstance(value, dict):
        raise UserError("not a JSON object", field=field, where=os.fspath(path), accepted='{"key": value, ...}')
    return value


def parse_json(text: str | bytes, where: str, field: str = "") -> Any:
    """JSON text -> plain data with at most ``MAX_DEPTH`` levels and integers of at most ``MAX_DIGITS`` digits.

    Args:
        where: file, or another place where the text was read, for refusals.

    Raises:
        UserError: not JSON, nested too deeply, a number with too many digits, or text that is not Unicode.
    """

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise UserError(f"a number of {len(digits):,} digits", field=field, where=where)
        return int(digits)

    try:
        value = json.loads(text, parse_int=integer)
    except json.JSONDecodeError as error:
        if text.startswith(_POINTER) if isinstance(text, bytes) else text.startswith(_POINTER.decode()):
            raise UserError(POINTER, field=field, where=where) from None
        raise UserError(f"not valid JSON: {error.msg}", field=field, where=f"{where}:{error.lineno}") from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", field=field, where=where) from None
    except RecursionError:
        raise UserError("nested too deeply", field=field, where=where) from None
    _check_json(value, where, field)
    return value


def _check_json(value: Any, where: str, field: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                require_text(item, where, field)
            elif isinstance(item, dict):
                for key in item:
                    require_text(key, where, field)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise UserError("nested too deeply", field=field, where=where, accepted=f"at most {MAX_DEPTH} levels")


def text_lines(path: Name, field: str = "") -> Iterator[tuple[int, bytes]]:
    """(number from 1, line with its end) of a file of any size, whose lines have at most ``MAX_LINE_BYTES``.

    Raises:
        UserError: it cannot be read, or a line is longer.
    """
    with open_file(path, field) as file:
        for number in itertools.count(1):
            try:
                line = file.readline(MAX_LINE_BYTES + 1)
            except OSError as error:
                _unreadable(path, field, error.strerror or "input/output error")
            if len(line) > MAX_LINE_BYTES:
                _unreadable(path, field, f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
            if not line:
                return
            yield number, line


def json_lines(path: Name, field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of a file with a JSON object per line; empty lines are left out.

    So is the last line if it was cut off, as when a process died while writing it.

    Raises:
        UserError: it cannot be read, or another line is not a JSON object.
    """
    for number, line in text_lines(path, field):
        line_place = f"{os.fspath(path)}:{number}"
        if not line.strip():
            continue
        try:
            value = parse_json(line, line_place, field)
        except UserError as error:
            if not line.endswith(b"\n"):
                return
            raise UserError(error.problem, field=field, where=line_place) from None
        if not isinstance(value, dict):
            raise UserError("not a JSON object", field=field, where=line_place)
        yield line_place, value


def open_append(path: Name, field: str = "") -> BinaryIO:
    """Open a regular file for appending, or make it. A last line that was cut off is removed; links are not followed.

    Raises:
        UserError: it cannot be written, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UserError(f"cannot be written: {reason}", field=field, value=os.fspath(path)) from None
    kind = _kind(os.fstat(handle).st_mode)
    if kind:
        os.close(handle)
        raise UserError(f"cannot be written: it is {kind}", field=field, value=os.fspath(path))
    _cut_off(handle)
    return os.fdopen(handle, "ab")


def _cut_off(handle: int) -> None:
    """Remove what follows the last line end."""
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - (1 << 16))
        line_end = os.pread(handle, end - start, start).rfind(b"\n")
        if line_end >= 0:
            end = start + line_end + 1
            break
        end = start
    if end < os.fstat(handle).st_size:
        os.ftruncate(handle, end)


def require_text(text: str, where: str = "", field: str = "") -> str:
    """``text`` itself; UserError if it has lone surrogates, which no file or terminal takes."""
    if not text.isascii() and _SURROGATE.search(text):
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise UserError("not Unicode text (a lone surrogate)", field=field, value=shown, where=where)
    return text


def member(directory: Name, name: str, where: str = "", field: str = "") -> Path:
    """The path of a file that a directory's own index or list names, which has to stay in that directory.

    A link may lead to another place in the directory, or, from a snapshot of the Hugging Face hub's cache
    (``.../snapshots/REVISION``), to the blobs of the same repository.

    Raises:
        UserError: an absolute name, one with ``..``, or a link that leaves the directory.
    """
    pure, root = PurePosixPath(name), Path(directory)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in name:
        raise UserError(
            "names a file outside its directory", field=field, value=name, where=where, accepted="a plain file name",
        )  # fmt: skip
    path = root / name
    if not is_within(path, allowed_roots(root)):
        raise UserError(
            "is a link to a file outside its directory", field=field, value=name, where=where,
            accepted="files that are in the directory (cp -rL makes a copy that has them, of links that you trust)",
        )  # fmt: skip
    return path


def allowed_roots(directory: Path) -> tuple[Path, ...]:
    """Where the files of a directory may really be: in it, and for a snapshot in the hub's cache in its blobs."""
    real = directory.resolve()
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def is_within(path: Path, roots: Iterable[Path]) -> bool:
    """Whether a path, with all links followed, is in one of ``roots`` (which are resolved)."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, a NUL byte
        return False
    return any(real.is_relative_to(root) for root in roots)


def _kind(mode: int) -> str | None:
    """What a file is that is not a regular one."""
    if stat.S_ISREG(mode):
        return None
    return next((name for test, name in _KINDS if test(mode)), "a special file")


def _unreadable(path: Name, field: str, reason: str) -> NoReturn:
    value = {"value": os.fspath(path)} if field else {}
    where = "" if field else os.fspath(path)
    raise UserError(f"cannot read the file: {reason}", field=field, where=where, **value)
