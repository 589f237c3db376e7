"""Files of text as they lie on disk or as ``gzip``, ``bzip2`` or ``xz`` packed them: their content, by suffix."""

from __future__ import annotations

import bz2
import gzip
import lzma
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
