"""Places that are written at the end of long work: tried before it, written aside, and moved by what the place allows.

A new name is written beside itself and renamed. An empty directory that is there receives the files one by one: it may
be a mount point, or a link to one elsewhere.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hetero_megatron.errors import UserError

ASIDE = ".incomplete"  # ends, or is, the name of the folder in which a directory is written until it is complete
_TRIED = b"\0" * 4096  # a block, so that a full disk is noticed
_OF_VOLUME = "lost+found"  # what an empty volume holds
_TRIAL = ".hetero-megatron-"  # begins the name of a file that is written to try a folder, perhaps by another rank
_IN_PLACE = {errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV}  # no renaming there, but perhaps writing


def try_file(name: str, field: str) -> None:
    """UserError if the file cannot be written. Leaves nothing, and an existing file as it is."""
    path = Path(os.path.realpath(name))
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            return  # opening a pipe or a device here would be seen at its other end
        if name.endswith("/"):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists():
            path.open("ab").close()
        else:
            _try_name(path)
        if not path.exists() or os.access(path.parent, os.W_OK):
            _try_block(path.parent)
    except OSError as error:
        raise unwritable(error, name, field) from None


def try_folder(name: str, field: str) -> None:
    """UserError if no files can be written in the folder, or in what will be made of it. Leaves nothing."""
    path = Path(os.path.expanduser(name)).absolute()
    try:
        if path.is_symlink() and not path.exists():
            raise UserError("is a link to what is not there", field=field, value=name, accepted="a folder")
        _try_name(path)
        existing = next(p for p in (path, *path.parents) if p.exists())
        _try_block(existing)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", field=field, value=name, accepted="a folder with write permission"
        ) from None


def try_export(name: str, field: str) -> None:
    """UserError if a directory of ours cannot be written there: it exists and is not empty, or cannot be made."""
    final = Path(name)
    if os.path.lexists(final) and not is_free(final):
        raise UserError("exists and is not an empty directory", field=field, value=name, accepted="a new directory")
    place = final if inside(final) else final.absolute().parent
    try:
        _try_name(final)
        _try_name(place)
        _try_block(next(p for p in (place, *place.parents) if p.exists()))
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
        raise UserError(problem, field=field, value=name, accepted="a new directory") from None


def is_free(final: Path) -> bool:
    """Whether it is an empty directory, but for what was left of an export that was cut off."""
    return os.path.isdir(final) and not [
        name for name in os.listdir(final) if name not in (ASIDE, _OF_VOLUME) and not name.startswith(_TRIAL)
    ]


def inside(final: Path) -> bool:
    """Whether files for ``final`` are written in it: what is there may be a mount point or a link, over which nothing
    can be renamed, also in ways that the system does not tell."""
    return os.path.isdir(final)  # unlike Path.is_dir, False also for a name that is too long


def move_up(work: Path) -> None:
    """Everything in a folder goes into the one that holds it, the names in ``work`` that readers look for last."""
    for path in sorted(work.iterdir(), key=lambda path: (path.suffix == ".json", path.name)):
        path.rename(work.parent / path.name)
    work.rmdir()


def write_text(name: str | os.PathLike[str], field: str, text: str) -> None:
    """Write the file whole, or leave what is there; UserError if that is not possible."""
    target = Path(os.path.realpath(name))
    try:
        if not (target.is_file() or not target.exists()) or not _write_aside(target, text.encode()):
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(error, str(name), field) from None


def unwritable(error: OSError, name: str, field: str) -> UserError:
    """What is said of a file that the system refuses."""
    return UserError(
        f"cannot be written: {error.strerror}", field=field, value=name, accepted="a file in an existing directory"
    )


def _write_aside(target: Path, data: bytes) -> bool:
    """Write beside the file and rename; False: the place takes files, but no renaming."""
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        if error.errno in _IN_PLACE:
            return False
        raise
    return True


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _try_block(folder: Path) -> None:
    """OSError if a block cannot be written in a folder that is there."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=_TRIAL, suffix=".tmp")
    try:
        os.write(descriptor, _TRIED)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(name)


def _try_name(path: Path) -> None:
    """OSError if the name is none that could be made: too long, or through a file."""
    with suppress(FileNotFoundError):
        os.lstat(path)
