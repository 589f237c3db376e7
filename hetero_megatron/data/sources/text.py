"""Plain text: one document per file, as it lies on disk or as ``gzip``, ``bzip2`` or ``xz`` packed it (by suffix); and
the built-in corpus ``stdlib``, which is there without a download."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file

_OPENERS: Mapping[str, Callable[[BinaryIO], object]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _OPENERS


def uncompressed_name(path: Path) -> Path:
    """``corpus.jsonl`` of ``corpus.jsonl.gz``."""
    return path.with_suffix("") if is_compressed(path) else path


@contextmanager
def open_content(path: Path, field: str = "--data-path") -> Iterator[BinaryIO]:
    """The content of a regular file for reading, unpacked on the way. Positions are those of the content.

    Args:
        field: the flag that named the file, for refusals.

    Raises:
        UserError: the file cannot be read, or is damaged or cut off; also while its content is read.
    """
    with open_file(path, field) as file:
        if not is_compressed(path):
            yield file
            return
        try:
            yield cast(BinaryIO, _OPENERS[path.suffix.lower()](file))
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the content
                raise
            problem = f"damaged or cut off, or no {path.suffix} file"
            raise UserError(problem, field=field, value=str(path), accepted="a sound file") from None


STDLIB = "stdlib"  # the built-in corpus: source files of the running interpreter's standard library
STDLIB_BYTES = 8_000_000
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "__pycache__"}


def stdlib_files() -> list[Path]:
    """At most ``STDLIB_BYTES`` of sources, the same on every rank that runs the same interpreter.

    Sorted by a hash of the name, so that a held-out tail (``--split``) is a fair sample and not the letters x to z.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [p.relative_to(root) for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts)]
    files, total = [], 0
    for relative in sorted(sources, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest()):
        size = (root / relative).stat().st_size
        if total + size > STDLIB_BYTES:
            break  # going on with smaller files would leave only tiny ones at the end, which --split holds out
        files.append(root / relative)
        total += size
    if not files:
        raise UserError(
            f"this interpreter has no source files of its standard library under {root}",
            field="--data-path", value=STDLIB, accepted="a path to data, or --mock-data",
        )  # fmt: skip
    return files


MAX_BYTES = 2 << 30  # the lengths in an .idx file have 32 bits

Position = tuple[int, ...]


def read(path: Path, key: str, position: Position, errors: str = "strict") -> Iterator[tuple[str, Position]]:
    """The file as one document, without a byte order mark; UserError if it is not UTF-8 or cannot be read."""
    if position:
        return
    try:
        with open_content(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(
                f"one document of more than {MAX_BYTES >> 30} GiB", field="--data-path", value=str(path),
                accepted="smaller files, or *.jsonl",
            )  # fmt: skip
        yield content.decode("utf-8", errors).removeprefix("\ufeff"), (1,)
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})",
            field="--data-path", value=str(path),
            accepted="UTF-8 text, *.jsonl, *.parquet, *.arrow, or a .bin/.idx prefix",
        ) from None  # fmt: skip
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field="--data-path", value=str(path)) from None
