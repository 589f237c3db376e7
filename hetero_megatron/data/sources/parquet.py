"""Parquet, read through Hugging Face datasets in streaming mode: nothing is copied to its cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.errors import UserError

Position = tuple[int, ...]


def read(path: Path, key: str, position: Position) -> Iterator[tuple[str, Position]]:
    """The string in column ``key`` of each row; null counts as empty. A position is (rows before it,)."""
    done = position[0] if position else 0
    rows = _open(path, key)
    try:
        for row in rows.skip(done) if done else rows:
            done += 1
            text = row[key]
            if text is not None and not isinstance(text, str):
                raise UserError("not a string", field=key, value=text, accepted="strings", where=f"{path} row {done}")
            yield text or "", (done,)
    except UserError:
        raise
    except Exception as error:  # pyarrow's and datasets' own kinds: the file is damaged
        raise _unreadable(path, error) from None


def _open(path: Path, key: str) -> Any:
    """An iterable of rows with only the column ``key``."""
    try:
        import datasets
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"parquet needs the package {error.name}", field="--data-path", value=str(path),
            accepted="pip install 'hetero-megatron[data]'",
        ) from None  # fmt: skip
    try:
        columns = pyarrow.parquet.read_schema(path).names
        if key not in columns:
            known = ", ".join(columns)
            raise UserError("no such column", field="--json-keys", value=key, accepted=known, where=str(path))
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True, columns=[key])
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from None
    return rows


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"cannot be read as parquet: {reason}",
        field="--data-path", value=str(path), accepted="an undamaged parquet file",
    )  # fmt: skip
