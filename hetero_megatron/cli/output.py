"""Files that commands write: checked before long work, with one-line error messages."""

from __future__ import annotations

from pathlib import Path

from hetero_megatron.errors import UserError


def check_writable(name: str | None, flag: str) -> None:
    """UserError if ``name`` cannot be written. Called before long work; an existing file is not changed."""
    if not name:
        return
    path = Path(name)
    there = path.exists()
    if there and not (path.is_file() or path.is_dir()):
        return  # opening a pipe or a device here would be seen at its other end
    try:
        path.open("ab").close()
        if not there:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(error, name, flag) from None


def write_text(name: str | Path, flag: str, text: str) -> None:
    """Write the file; UserError if that is not possible."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(error, str(name), flag) from None


def unwritable(error: OSError, name: str, flag: str) -> UserError:
    """What is said of a file that the system refuses."""
    return UserError(
        f"cannot be written: {error.strerror}", field=flag, value=name, accepted="a file in an existing directory"
    )
