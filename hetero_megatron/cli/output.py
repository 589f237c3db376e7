"""Files that commands write: checked before long work, with one-line error messages."""

from __future__ import annotations

from hetero_megatron.utils.outputs import try_file, unwritable, write_text

__all__ = ["check_writable", "unwritable", "write_text"]


def check_writable(name: str | None, flag: str) -> None:
    """UserError if ``name`` cannot be written. Called before long work; an existing file is not changed."""
    if name:
        try_file(name, flag)
