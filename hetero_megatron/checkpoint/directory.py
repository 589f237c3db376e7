"""The directory that checkpoints are saved to.

SAVE/iter_0000010/            a complete checkpoint: rank_*.safetensors, metadata.json, SHA256SUMS
SAVE/iter_0000010.old/        the one that it replaces, until ``latest`` names the new one
SAVE/iter_0000020.incomplete/ being written or removed, or left over from a job that ended: never read
SAVE/latest                   "iter_0000010 <sha256 of its SHA256SUMS>"; updated last

A job may end between any two operations. Readers change nothing: ``place`` and ``latest`` understand the state at every
point of a save. ``begin``, the start of the next save, restores the names and removes leftovers.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from hetero_megatron.checkpoint.manifest import SUMS, Damaged, sha256
from hetero_megatron.checkpoint.model_files import Private
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_bytes
from hetero_megatron.utils.text import notice_line

LATEST = "latest"
INCOMPLETE, OLD = ".incomplete", ".old"
_NAME = re.compile(r"iter_(\d{7,18})")
_LATEST = re.compile(r"iter_(\d{7,18}) ([0-9a-f]{64})\n")


def name_of(step: int) -> str:
    return f"iter_{step:07d}"


class CheckpointDirectory:
    """Finds, publishes and removes checkpoints; only one rank writes.

    Args:
        log: for notices.
        check: asked before every change; raises an error if this process is not to write: UserError where the path no
            longer leads to the directory that the run began with (moved, removed or unmounted), which must not be
            created again; CommError where the job went on without it. None: not locked; ``begin`` creates it.
    """

    def __init__(
        self, path: str | Path, log: Callable[[str], None] = print, check: Callable[[], None] | None = None
    ) -> None:
        self.path, self.log, self.check = Path(path), log, check
        self._reported: set[str | None] = set()

    def at(self, step: int) -> Path:
        return self.path / name_of(step)

    def work(self, step: int) -> Path:
        return self.path / (name_of(step) + INCOMPLETE)

    # Reading

    def steps(self) -> list[int]:
        """Steps with complete checkpoints, ascending (judged by name only)."""
        return sorted(self._listed(""))

    def held(self) -> list[int]:
        """Steps with a complete checkpoint, including one that was being replaced."""
        return sorted({*self._listed(""), *self._listed(OLD)})

    def _listed(self, ending: str) -> Iterator[int]:
        if not self.path.is_dir():
            return
        for path in self.path.iterdir():
            match = _NAME.fullmatch(path.name.removesuffix(ending))
            if match and path.name == name_of(int(match[1])) + ending and path.is_dir():
                yield int(match[1])

    def place(self, step: int) -> Path:
        """Path of a step's checkpoint: its name, or the ``.old`` name if the job ended while replacing it, before
        ``latest`` named the new one."""
        final, old = self.at(step), self._old(step)
        if not old.is_dir():
            return final
        if not final.is_dir():
            return old
        with suppress(Damaged):
            if self._named() == (step, sha256(old / SUMS)) and sha256(final / SUMS) != sha256(old / SUMS):
                return old
        return final

    def latest(self) -> int | None:
        """The step that ``latest`` names; None without any checkpoints. Leftovers of a job that ended during a save are
        reported by a notice.

        Raises:
            Damaged: ``latest`` is missing although there are several checkpoints, or is altered, or names a checkpoint
                that is missing or altered.
        """
        path, step_and_digest = self.path / LATEST, self._named()
        if step_and_digest is None:
            steps = self.held()
            if len(steps) > 1:
                raise Damaged(path, "is missing beside checkpoints")
            if steps:
                problem = f"{LATEST} is missing, as after a save that was cut off; the only checkpoint"
                self.log(notice_line(f"{self.path}: {problem}, {self.place(steps[0]).name}, is taken"))
            return steps[0] if steps else None
        step, digest = step_and_digest
        place = self.place(step)
        if not place.is_dir():
            raise Damaged(path, f"names {name_of(step)}, which does not exist")
        if sha256(place / SUMS) != digest:
            raise Damaged(place / SUMS, f"its checksum is not the one in {LATEST}")
        if place != self.at(step):
            problem = f"{name_of(step)} was being replaced when a save was cut off; the one that {LATEST} names"
            self.log(notice_line(f"{self.path}: {problem}, {place.name}, is taken"))
        return step

    def _named(self) -> tuple[int, str] | None:
        """(step, checksum of its SHA256SUMS) from ``latest``; None without it. Damaged: malformed."""
        path = self.path / LATEST
        if not os.path.lexists(path):
            return None
        try:
            match = _LATEST.fullmatch(read_bytes(path, limit=4096).decode("ascii"))
        except (UserError, UnicodeDecodeError):
            match = None
        if match is None:
            raise Damaged(path, "does not name a checkpoint")
        return int(match[1]), match[2]

    def _old(self, step: int) -> Path:
        return self.path / (name_of(step) + OLD)

    # Writing

    def allowed(self) -> None:
        """Raises what ``check`` does."""
        if self.check is not None:
            self.check()

    def begin(self, step: int) -> Path:
        """Make an empty directory to write into; removes incomplete checkpoints of earlier jobs."""
        if self.check is not None:
            self.check()
        else:
            self.path.mkdir(parents=True, exist_ok=True)
        self._restore()
        for replaced in self.path.glob(f"iter_*{OLD}"):
            self._retire(replaced)
        for leftover in self.path.glob(f"iter_*{INCOMPLETE}"):
            self._remove(leftover)
        work = self.work(step)
        if os.path.lexists(work):  # it could not be removed
            work.rename(self._free_name(work))
        work.mkdir()
        return work

    def publish(self, step: int) -> None:
        """Rename the complete directory, then update ``latest``. Every rename follows an fsync."""
        final, old, work = self.at(step), self._old(step), self.work(step)
        sync_directory(work)
        self.allowed()
        if os.path.lexists(final):
            final.rename(old)
        work.rename(final)
        self._point(step)
        if os.path.lexists(old):
            self._retire(old)

    def abandon(self, step: int) -> None:
        """Remove the files of a failed save, if possible."""
        with suppress(OSError, UserError, RuntimeError):
            self.allowed()  # otherwise it is another run's
            shutil.rmtree(self.work(step))

    def prune(self, keep: int, retain_interval: int | None, newest: int) -> None:
        """Remove all checkpoints but the ``keep`` newest up to ``newest`` (0: keep all) and multiples of
        ``retain_interval``; what cannot be removed stays, with a notice."""
        self.allowed()
        old = [s for s in self.steps() if s <= newest]
        for step in old[:-keep] if keep else []:
            if not (retain_interval and step % retain_interval == 0):
                self._retire(self.at(step))

    def _restore(self) -> None:
        """After a job that ended during a save: restore the names of valid checkpoints, and ``latest`` if there is only
        one. Makes all other intermediate states unambiguous."""
        for step in list(self._listed(OLD)):
            if self.place(step) == self._old(step):
                if os.path.lexists(self.at(step)):
                    self._retire(self.at(step))
                self._old(step).rename(self.at(step))
        steps = self.held()
        if len(steps) == 1 and not os.path.lexists(self.path / LATEST):
            with suppress(Damaged):
                self._point(steps[0])

    def _point(self, step: int) -> None:
        """Update ``latest`` without following links or writing through existing names."""
        text = f"{name_of(step)} {sha256(self.at(step) / SUMS)}\n"
        sync_directory(self.path)
        new_path, latest = self.path / (LATEST + ".new"), self.path / LATEST
        for path in (new_path, latest):
            if path.is_dir() and not path.is_symlink():
                path.rename(self._free_name(path))
        write_synced(new_path, text.encode())
        self.allowed()
        new_path.replace(latest)
        sync_directory(self.path)

    def _retire(self, path: Path) -> None:
        """Remove a checkpoint; it never appears half-removed under its name."""
        try:
            doomed = path.rename(self._free_name(path))
        except OSError as error:
            self._say(path, error)
        else:
            self._remove(doomed)

    def _remove(self, path: Path) -> None:
        """Remove a directory, or a link but not its target. Failures are reported once per cause."""
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._say(path, error)

    def _free_name(self, path: Path) -> Path:
        names = (path.with_name(f"{path.name}.{number}{INCOMPLETE}") for number in count(1))
        return next(name for name in names if not os.path.lexists(name))

    def _say(self, path: Path, error: OSError) -> None:
        if error.strerror not in self._reported:
            self._reported.add(error.strerror)
            path_left = error.filename or path
            problem = f"cannot be removed ({error.strerror}: {path_left}); it is left, and training goes on"
            self.log(notice_line(f"{path} {problem}"))


def write_synced(path: Path, content: bytes) -> None:
    """Replace whatever has this name by a new file that is on disk when this returns."""
    path.unlink(missing_ok=True)
    mode = 0o600 if isinstance(content, Private) else 0o666
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:  # follows no link
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
