"""The folder in which an export is written until it is complete: ``DIRECTORY.incomplete``, or ``DIRECTORY/.incomplete``
where an empty directory is there."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.utils.outputs import ASIDE, inside, move_up, try_export

_MARK = ".hetero-megatron-export"  # in every folder that was made here; gone when the export is complete


def work_of(final: Path) -> Path:
    """The folder in which the export to ``final`` is written. UserError: ``final`` has no file name."""
    if inside(final):
        return final / ASIDE
    if final.name in ("", ".."):
        raise UserError("is not a name", value=str(final), field="--save-hf", accepted="the name of a new directory")
    return final.with_name(final.name + ASIDE)


def check_target(final: Path, field: str) -> None:
    """Refuse what cannot be written, or holds something, and what :func:`check_work` refuses."""
    try_export(str(final), field)
    check_work(final, field)


def check_work(final: Path, field: str) -> None:
    """Refuse if something is in the way that is not left over from an export of ours.

    Raises:
        UserError: naming it.
    """
    work = work_of(final)
    if os.path.lexists(work) and not _is_left_over(work):
        raise UserError(
            f"is written in {work} first, which exists and was not made by an export that was cut off",
            field=field, value=str(final), accepted="another directory, or that one moved away",
        )  # fmt: skip


def make_work(final: Path, field: str) -> Path:
    """Make an empty folder to write in; removes leftovers of interrupted exports. OSError: it cannot be made.

    Raises:
        UserError: as :func:`check_work`.
    """
    check_work(final, field)
    work = work_of(final)
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    (work / _MARK).touch(exist_ok=False)
    return work


def publish_work(final: Path) -> None:
    """Give a complete export its name, or its files to the directory that is there."""
    work = work_of(final)
    if inside(final):
        (work / _MARK).unlink()
        move_up(work)
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    work.rename(final)
    (final / _MARK).unlink()


def _is_left_over(work: Path) -> bool:
    """Whether it is a real folder that is empty or has our mark."""
    try:
        inside = os.listdir(work)
        real = stat.S_ISDIR(os.lstat(work).st_mode)
        return real and (not inside or stat.S_ISREG(os.lstat(work / _MARK).st_mode))
    except OSError:  # no folder, or without the mark
        return False
