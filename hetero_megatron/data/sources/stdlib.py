"""The built-in corpus ``stdlib``: source files of the running interpreter's standard library. No download."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from hetero_megatron.errors import UserError

NAME = "stdlib"
MAX_BYTES = 8_000_000
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "__pycache__"}


def stdlib_files() -> list[Path]:
    """At most ``MAX_BYTES`` of sources, the same on every rank that runs the same interpreter.

    Sorted by a hash of the name, so that a held-out tail (``--split``) is a fair sample and not the letters x to z.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [p.relative_to(root) for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts)]
    files, total = [], 0
    for relative in sorted(sources, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest()):
        size = (root / relative).stat().st_size
        if total + size > MAX_BYTES:
            break  # going on with smaller files would leave only tiny ones at the end, which --split holds out
        files.append(root / relative)
        total += size
    if not files:
        raise UserError(
            f"this interpreter has no source files of its standard library under {root}",
            field="--data-path", value=NAME, accepted="a path to data, or --mock-data",
        )  # fmt: skip
    return files
