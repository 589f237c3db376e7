"""Exclusive use of a --save directory: a second run would remove what the first is writing."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError

WAIT_SECONDS = 5.0  # a process of the previous round may still be ending
TAKEN, ACCEPTED = "another run is writing there", "a directory of its own for each run"
_held: set[str] = set()  # directories of this process: a run that failed may not be collected yet


class DirectoryLock:
    """A kernel lock on the directory itself, released when the process ends. It stays with the directory when that is
    moved, so ``lost`` tells whether the path still leads to it."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._name = os.fspath(path), os.path.realpath(path)
        self._handle: int | None = None  # while it is open, no other directory has its number
        self._locked = False

    def take(self, seconds: float = WAIT_SECONDS) -> bool:
        """Whether no other process holds the lock; also True where the file system has no locks."""
        handle = os.open(self._name, os.O_RDONLY | os.O_DIRECTORY)
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locked = True
                _held.add(self._name)
                break
            except OSError as error:
                is_taken = error.errno == errno.EWOULDBLOCK and self._name not in _held
                if not is_taken:
                    break
                if time.monotonic() >= deadline:
                    os.close(handle)
                    return False
            time.sleep(0.1)
        self._handle = handle
        return True

    def watch(self) -> None:
        """Without the lock, which somebody else holds for this run: only notice when the directory is lost."""
        self._handle = os.open(self._name, os.O_RDONLY | os.O_DIRECTORY)

    def lost(self) -> str:
        """Why the path no longer leads to the locked directory; empty while it does, or without a lock."""
        if self._handle is None:
            return ""
        try:
            path, locked = os.stat(self._path), os.fstat(self._handle)
        except OSError as error:
            return error.strerror or "it cannot be read"
        return "" if (path.st_dev, path.st_ino) == (locked.st_dev, locked.st_ino) else "another directory has its name"

    def check(self) -> None:
        """Raises UserError where the directory is lost."""
        if reason := self.lost():
            raise UserError(
                f"is no longer the directory that this run began with ({reason}): it was moved, removed or unmounted, "
                "and is not made anew",
                field="--save", value=self._path,
                accepted="the directory back in its place; then --load goes on from the latest checkpoint in it",
            )  # fmt: skip

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._locked:
            self._locked = False
            _held.discard(self._name)

    def __del__(self) -> None:
        self.release()


def lock_directory(path: str, group: Group, by_launcher: bool = False) -> DirectoryLock:
    """A lock held by the first rank of the group while the result is referenced; UserError on all ranks if another run
    holds it.

    Args:
        by_launcher: it is the launcher that locks the directory for the job; a rank that hangs would hold it for ever.
    """
    lock = DirectoryLock(path)
    problem = ""
    if group.index == 0:
        try:
            if by_launcher:
                lock.watch()
            elif not lock.take():
                problem = TAKEN
        except OSError as error:
            problem = f"cannot be opened: {error.strerror}"
    first = group.gather_objects(problem, str)[0]
    if first:
        raise UserError(first, field="--save", value=path, accepted=ACCEPTED)
    return lock
