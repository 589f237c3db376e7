"""Parquet, read by pyarrow row group by row group: only the one column, nothing is copied anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.data.sources.jsonl import shown_names
from hetero_megatron.errors import UserError
from hetero_megatron.files import require_regular

Position = tuple[int, ...]
_ROWS = 1024  # that are in memory at a time


def read(path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """The string in column ``key`` of each row; null counts as empty. A position is (rows before it,)."""
    done = position[0] if position else 0
    for begin, values in _batches(path, key, done):
        for text in values[max(0, done - begin) :]:
            done += 1
            yield text or "", (done,)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """All columns of each row."""
    file = _open_file(path)
    at = 0
    try:
        for batch in file.iter_batches(_ROWS, use_threads=False):
            rows = batch.to_pylist()
            yield from rows
            at += len(rows)
    except Exception:  # pyarrow's own kinds, and UnicodeDecodeError
        raise _unreadable(path, f"it is damaged after row {at}") from None


def check(path: Path, key: str) -> None:
    """UserError unless this is a parquet file with a column of strings ``key``."""
    _open(path, key)


def _batches(path: Path, key: str, done: int) -> Iterator[tuple[int, list[str | None]]]:
    """(row of the first, values of the column) in order, without the row groups that end before row ``done``."""
    file = _open(path, key)
    at = 0
    try:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if at + rows <= done:
                at += rows
                continue
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[key], use_threads=False):
                values = batch.column(0).to_pylist()
                yield at, values
                at += len(values)
    except Exception:  # pyarrow's own kinds, and UnicodeDecodeError
        raise _unreadable(path, f"it is damaged after row {at}") from None


def _open_file(path: Path) -> Any:
    """A ParquetFile."""
    require_regular(path, "--data-path")
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "parquet needs the package pyarrow", field="--data-path", value=str(path),
            accepted="pip install 'hetero-megatron[data]'",
        ) from None  # fmt: skip
    try:
        file = pyarrow.parquet.ParquetFile(path)
        len(file.schema_arrow)
        return file
    except Exception:
        raise _unreadable(path, "it is damaged, or of another format") from None


def _open(path: Path, key: str) -> Any:
    """A ParquetFile that has a column ``key`` of strings."""
    file = _open_file(path)
    import pyarrow as pa

    columns = {field.name: field.type for field in file.schema_arrow}
    twice = len(columns) < len(file.schema_arrow)
    if key not in columns or twice:
        problem = "two columns have one name" if twice else "no such column"
        raise UserError(problem, field="--json-keys", value=key, accepted=shown_names(columns), where=str(path))
    kind = columns[key]
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(test(kind) for test in strings):
        raise UserError(
            f"a column of {str(kind)[:60]}, not of strings", field="--json-keys", value=key,
            accepted="a column of strings", where=str(path),
        )  # fmt: skip
    return file


def _unreadable(path: Path, problem: str) -> UserError:
    return UserError(
        f"cannot be read as parquet: {problem}",
        field="--data-path", value=str(path), accepted="an undamaged parquet file",
    )  # fmt: skip
