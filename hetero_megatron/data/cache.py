"""Cache files that any rank may build at any time and that appear only when complete.

No rank waits for another: a rank without the file builds it. The name contains a hash of everything that the content
depends on, so concurrent builders write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetero_megatron.data.indexed import cannot_write
from hetero_megatron.errors import UserError, printable
from hetero_megatron.utils.files import open_file

FORMAT = 2  # raise it when the meaning of a cached file changes
Log = Callable[[str], None]


def say(message: str) -> None:
    """The default log: standard output, at once."""
    print(printable(message), flush=True)


def cache_key(*parts: Any) -> str:
    """16 hex digits of the parts, which json must be able to write."""
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]


def cache_folder(path: str | None) -> Path:
    """--data-cache-path, or the user's cache folder; created if missing. UserError if not writable."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(path).expanduser() if path else Path(base) / "hetero_megatron"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write there: {error.strerror}", field="--data-cache-path", value=str(folder),
            accepted="a folder with write permission",
        ) from None  # fmt: skip
    return folder


def cached_arrays(
    folder: Path | None, name: str, build: Callable[[], dict[str, np.ndarray]], log: Log
) -> dict[str, np.ndarray]:
    """Arrays from ``folder/name.npz``; built and stored if missing or damaged. Without a folder only built."""
    if folder is None:
        return build()
    path = folder / f"{name}.npz"
    if path.exists():
        stored = _stored(path)
        if stored is not None:
            return stored
        log(f"data: {path} is damaged, building it again")
    arrays = build()
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(error, "--data-cache-path", path) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return arrays


def _stored(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a cached file; None if it is damaged."""
    try:
        with open_file(path) as file, np.load(file) as stored:
            return dict(stored)
    except Exception:  # NumPy and zipfile raise errors of many kinds for a damaged file, whose checksums they check
        return None
