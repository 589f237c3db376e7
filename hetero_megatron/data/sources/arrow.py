"""Arrow files, as ``save_to_disk`` of datasets and others write them (IPC streams and files), batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.data.sources.columns import (
    Position,
    converted_rows,
    import_pyarrow,
    read_texts,
    require_strings,
    unreadable,
)
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file

_FILE = b"ARROW1"  # how an IPC file begins; a stream has no such mark


def read(path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """See :func:`read_texts`."""
    return read_texts(_batches, path, key, position)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """All columns of each row, see :mod:`.structure`."""
    with open_file(path, "--data-path") as file:
        schema = _open(path, file).schema
    return converted_rows((rows for _, rows in _batches(path)), schema, path)


def check(path: Path, key: str) -> None:
    """UserError unless this is an Arrow file with a column of strings ``key``."""
    with open_file(path, "--data-path") as file:
        require_strings(_open(path, file).schema, key, path)


def _batches(path: Path, key: str | None = None, done: int = 0) -> Iterator[tuple[int, list[Any]]]:
    """(row of the first, rows) in order, without the batches that end before row ``done``; rows have all columns or,
    with ``key``, are the values of that column, which must be strings."""
    with open_file(path, "--data-path") as file:
        reader = _open(path, file)
        if key is not None:
            require_strings(reader.schema, key, path)
        count = getattr(reader, "num_record_batches", None)  # of a file
        row = 0
        try:
            for batch in reader if count is None else map(reader.get_batch, range(count)):
                batch.validate()
                if row + batch.num_rows > done:
                    # Strings are decoded here, so what is no UTF-8 is found here.
                    values = batch if key is None else batch.column(batch.schema.get_field_index(key))
                    yield row, values.to_pylist()
                row += batch.num_rows
        except UserError:
            raise
        except Exception:  # pyarrow's own kinds, and UnicodeDecodeError
            raise _unreadable(path, f"it is damaged after row {row}") from None


def _open(path: Path, file: Any) -> Any:
    pa = import_pyarrow(path)
    try:
        start = file.read(len(_FILE))
        file.seek(0)
        return pa.ipc.open_file(file) if start == _FILE else pa.ipc.open_stream(file)
    except Exception:
        raise _unreadable(path, "it is damaged, or of another format") from None


def _unreadable(path: Path, problem: str) -> UserError:
    return unreadable(path, "Arrow", problem, "an undamaged Arrow IPC file or stream")
