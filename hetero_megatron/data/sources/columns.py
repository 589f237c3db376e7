"""What parquet and Arrow files have in common: pyarrow, a column of strings, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.data.sources.jsonl import shown_names
from hetero_megatron.data.sources.structure import row_converter
from hetero_megatron.errors import UserError

Position = tuple[int, ...]
# (path, column, rows that are done) -> (row of the first, values) in order, from the batch on that holds the next row
Batches = Callable[[Path, str, int], Iterator[tuple[int, list[str | None]]]]


def import_pyarrow(path: Path) -> Any:
    """The package. UserError: it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"{path.suffix} files need the package pyarrow", field="--data-path", value=str(path),
            accepted="pip install 'hetero-megatron[data]'",
        ) from None  # fmt: skip
    return pyarrow


def read_texts(batches: Batches, path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """The string in column ``key`` of each row; null counts as empty. A position is (rows before it,)."""
    rows_done = position[0] if position else 0
    for begin, values in batches(path, key, rows_done):
        for text in values[max(0, rows_done - begin) :]:
            rows_done += 1
            yield text or "", (rows_done,)


def converted_rows(
    batches: Iterator[list[dict[str, Any]]], schema: Any, path: Path
) -> Iterator[dict[str, Any]]:
    """Rows as the values that were written, from those of pyarrow."""
    convert = row_converter(schema, str(path))
    row = 0
    for rows in batches:
        for value in rows:
            yield convert(value, f"{path}: row {row}")
            row += 1


def unreadable(path: Path, kind: str, problem: str, accepted: str) -> UserError:
    """The refusal of a file that is not what its suffix says; ``kind``: what that is."""
    return UserError(
        f"cannot be read as {kind}: {problem}", field="--data-path", value=str(path), accepted=accepted
    )  # fmt: skip


def require_strings(schema: Any, key: str, path: Path) -> None:
    """UserError unless a pyarrow schema has one column ``key``, of any type of string."""
    columns = {field.name: field.type for field in schema}
    twice = len(columns) < len(schema)
    if key not in columns or twice:
        problem = "two columns have one name" if twice else "no such column"
        raise UserError(problem, field="--json-keys", value=key, accepted=_accepted(columns), where=str(path))
    kind = columns[key]
    if not _is_string(kind):
        raise UserError(
            f"a column of {str(kind)[:60]}, not of strings", field="--json-keys", value=key,
            accepted="a column of strings", where=str(path),
        )  # fmt: skip


def _accepted(columns: dict[str, Any]) -> str:
    """What --json-keys may name; and where conversations go."""
    if strings := [name for name, kind in columns.items() if _is_string(kind)]:
        return shown_names(strings)
    chats = {"messages", "conversations"} & columns.keys()
    chat_hint = "; conversations are for hetero-megatron finetune" if chats else ""
    return f"a file with a column of strings (it has {shown_names(columns)}){chat_hint}"


def _is_string(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)
