"""Parquet, read by pyarrow row group by row group: only the one column, nothing is copied anywhere."""

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
from hetero_megatron.utils.files import require_regular

_ROWS = 1024  # that are in memory at a time


def read(path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """See :func:`read_texts`."""
    return read_texts(_batches, path, key, position)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """All columns of each row, see :mod:`.structure`."""
    file = _open_file(path)
    return converted_rows(_all_columns(path, file), file.schema_arrow, path)


def _all_columns(path: Path, file: Any) -> Iterator[list[dict[str, Any]]]:
    row = 0
    try:
        for batch in file.iter_batches(_ROWS, use_threads=False):
            rows = batch.to_pylist()
            yield rows
            row += len(rows)
    except Exception:  # pyarrow's own kinds, and UnicodeDecodeError
        raise _unreadable(path, f"it is damaged after row {row}") from None


def check(path: Path, key: str) -> None:
    """UserError unless this is a parquet file with a column of strings ``key``."""
    _open(path, key)


def _batches(path: Path, key: str, done: int) -> Iterator[tuple[int, list[str | None]]]:
    """(row of the first, values of the column) in order, without the row groups that end before row ``done``."""
    file = _open(path, key)
    row = 0
    try:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= done:
                row += rows
                continue
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[key], use_threads=False):
                values = batch.column(0).to_pylist()
                yield row, values
                row += len(values)
    except Exception:  # pyarrow's own kinds, and UnicodeDecodeError
        raise _unreadable(path, f"it is damaged after row {row}") from None


def _open_file(path: Path) -> Any:
    """A ParquetFile."""
    require_regular(path, "--data-path")
    import_pyarrow(path)
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        len(file.schema_arrow)
        return file
    except Exception:
        raise _unreadable(path, "it is damaged, or of another format") from None


def _open(path: Path, key: str) -> Any:
    """A ParquetFile that has a column ``key`` of strings."""
    file = _open_file(path)
    require_strings(file.schema_arrow, key, path)
    return file


def _unreadable(path: Path, problem: str) -> UserError:
    return unreadable(path, "parquet", problem, "an undamaged parquet file")
