"""Plain text: one document per file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetero_megatron.data.sources.compressed import open_content
from hetero_megatron.errors import UserError

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
