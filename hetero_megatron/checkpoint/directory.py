"""The directory that checkpoints are saved to.

SAVE/iter_0000010/            a complete checkpoint: rank_*.safetensors, metadata.json, SHA256SUMS
SAVE/iter_0000020.incomplete/ one that is being written, or was when the job ended: never read
SAVE/latest                   "iter_0000010 <sha256 of its SHA256SUMS>"; moved last
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hetero_megatron.checkpoint.companions import Private
from hetero_megatron.checkpoint.manifest import SUMS, Damaged, sha256

LATEST = "latest"
INCOMPLETE, OLD = ".incomplete", ".old"
_NAME = re.compile(r"iter_(\d{7,})")
_LATEST = re.compile(r"iter_(\d{7,}) ([0-9a-f]{64})\n")


def name_of(step: int) -> str:
    return f"iter_{step:07d}"


class CheckpointDirectory:
    """Finds, publishes and removes checkpoints; one rank does the writing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def at(self, step: int) -> Path:
        return self.path / name_of(step)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending (complete by name; their content is not looked at)."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(p.name) for p in self.path.iterdir() if p.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def held(self) -> list[int]:
        """Steps of which there is a complete checkpoint, also under the name that ``_mend`` knows."""
        old = (_NAME.fullmatch(p.name.removesuffix(OLD)) for p in self.path.glob(f"iter_*{OLD}") if p.is_dir())
        return sorted({*self.steps(), *(int(match[1]) for match in old if match)})

    def latest(self) -> int | None:
        """The step that ``latest`` names; None when there are no checkpoints at all.

        Raises:
            Damaged: ``latest`` is missing beside checkpoints, altered, or names one that is gone or altered.
        """
        path = self.path / LATEST
        if not path.exists():
            if self.steps():
                raise Damaged(path, "is missing beside checkpoints")
            return None
        try:
            match = _LATEST.fullmatch(path.read_bytes().decode("ascii"))
        except (OSError, UnicodeDecodeError):
            match = None
        if match is None:
            raise Damaged(path, "does not name a checkpoint")
        step = int(match[1])
        self._mend(step)
        if not self.at(step).is_dir():
            raise Damaged(path, f"names {name_of(step)}, which does not exist")
        if sha256(self.at(step) / SUMS) != match[2]:
            raise Damaged(self.at(step) / SUMS, f"its checksum is not the one in {LATEST}")
        return step

    def _mend(self, step: int) -> None:
        """A job that died between the two renames of a replacement left the old one under another name."""
        old = self.at(step).with_name(name_of(step) + OLD)
        if not self.at(step).exists() and old.is_dir():
            old.rename(self.at(step))

    def begin(self, step: int) -> Path:
        """An empty directory to write into; what earlier jobs left incomplete is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in [*self.path.glob(f"iter_*{INCOMPLETE}"), *self.path.glob(f"iter_*{OLD}")]:
            if leftover.name.endswith(OLD) and not leftover.with_name(leftover.name.removesuffix(OLD)).exists():
                continue  # the only copy
            shutil.rmtree(leftover)
        work = self.work(step)
        work.mkdir()
        return work

    def work(self, step: int) -> Path:
        return self.path / (name_of(step) + INCOMPLETE)

    def publish(self, step: int) -> None:
        """The complete directory gets its name, then ``latest`` moves to it. Every rename follows an fsync."""
        final, old = self.at(step), self.at(step).with_name(name_of(step) + OLD)
        sync_directory(self.work(step))
        if final.exists():
            final.rename(old)
        self.work(step).rename(final)
        sync_directory(self.path)
        text = f"{name_of(step)} {sha256(final / SUMS)}\n"
        fresh = self.path / (LATEST + ".new")
        write_synced(fresh, text.encode())
        fresh.replace(self.path / LATEST)
        sync_directory(self.path)
        if old.exists():
            shutil.rmtree(old)

    def prune(self, keep: int, retain_interval: int | None, newest: int) -> None:
        """Remove all but the ``keep`` newest up to ``newest`` (0: all stay) and multiples of ``retain_interval``."""
        old = [s for s in self.steps() if s <= newest]
        for step in old[:-keep] if keep else []:
            if retain_interval and step % retain_interval == 0:
                continue
            doomed = self.at(step).with_name(name_of(step) + INCOMPLETE)  # never seen half-removed
            self.at(step).rename(doomed)
            shutil.rmtree(doomed)


def write_synced(path: Path, content: bytes) -> None:
    mode = 0o600 if isinstance(content, Private) else 0o666
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
