"""Existing testbeds, alive or dead, and removal of dead ones.

A testbed is a directory ``/tmp/hetero-testbed-UID/ID``. The ID contains the launcher's pid and start time, so it tells
whether the launcher is alive and is unique. Everything outside that directory carries the ID: processes in their
environment (``HETERO_TESTBED_DIR``), cgroups in their names. Network namespaces, bridges and links are anonymous; the
kernel removes them with the last process that is in them or holds them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.testbed import cgroups, process

RECORD, ENVIRONMENT, CONTROL = "testbed.json", "environment.json", "control.json"
LOAD = "load.json"  # foreign load so far, for the ranks
READY = "ready-{}"  # of a rank whose start-up is over
CLOCKS = "clocks"  # of emulated chips, for the launcher: every rank's at its place
CLOCK = Struct("ddd")  # seconds: emulated, of CPU time beyond that, behind that
_ID = re.compile(r"p(\d+)s(\d+)")


def home() -> Path:
    """Directory of this user's testbeds (HETERO_TESTBED_HOME overrides it); exists only while there is one.

    Raises:
        UserError: it belongs to another user, or is no directory.
    """
    path = Path(os.environ.get("HETERO_TESTBED_HOME") or f"/tmp/hetero-testbed-{os.getuid()}").absolute()
    if path.is_symlink() or (path.exists() and path.stat().st_uid != os.getuid()):
        raise _no_home(path, "belongs to somebody else")
    if path.exists() and not path.is_dir():
        raise _no_home(path, "is no directory")
    return path


def _no_home(path: Path, problem: str) -> UserError:
    accepted = "a directory of one's own, or one that is not there yet, in a directory that is"
    problem = f"the directory of testbeds {problem}"
    return UserError(problem, field="HETERO_TESTBED_HOME", value=str(path), accepted=accepted)


def write_json(path: Path, data: Any) -> None:
    """Replace the file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


@dataclass(frozen=True)
class Testbed:
    """A testbed on this machine, by its directory."""

    directory: Path

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def launcher(self) -> int:
        match = _ID.fullmatch(self.id)
        return int(match[1]) if match else 0

    @property
    def alive(self) -> bool:
        match = _ID.fullmatch(self.id)
        return match is not None and process.alive(int(match[1]), int(match[2]))

    def record(self) -> dict[str, Any]:
        """What the launcher recorded; {} if it ended before."""
        try:
            return dict(json.loads((self.directory / RECORD).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    @contextmanager
    def control(self) -> Iterator[dict[str, Any]]:
        """Read, change and replace the active faults, under a lock."""
        path = self.directory / CONTROL
        with open(self.directory / ".lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            control = json.loads(path.read_text(encoding="utf-8"))
            yield control
            write_json(path, control)

    def write_record(self, data: Mapping[str, Any]) -> None:
        write_json(self.directory / RECORD, dict(data))


def new_testbed() -> Testbed:
    """Make a directory for the testbed of this process; one per process.

    Raises:
        UserError: it cannot be made.
    """
    own_status = process.status(os.getpid())
    name = f"p{os.getpid()}s{own_status.start if own_status else int(time.time())}"
    directory = home() / name
    if directory.exists():
        raise UserError("this process already runs a testbed", field="testbed", value=name)
    while True:
        try:
            directory.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # the last one that was there has just removed the parent
                directory.mkdir(mode=0o700)
                return Testbed(directory)
        except OSError as error:
            raise _no_home(directory.parent, f"cannot be made or written: {error.strerror}") from None


def all_testbeds() -> list[Testbed]:
    """Alive and dead testbeds of this user."""
    try:
        entries = [entry for entry in home().iterdir() if _ID.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    return [Testbed(path) for path in sorted(entries)]


def live_testbed(name: str | None) -> Testbed:
    """The live testbed ``name``, or the only one; UserError if there is none or more than one."""
    live_testbeds = [testbed for testbed in all_testbeds() if testbed.alive]
    names = ", ".join(t.id for t in live_testbeds)
    if name is not None:
        live_testbeds = [testbed for testbed in live_testbeds if testbed.id == name]
    if len(live_testbeds) == 1:
        return live_testbeds[0]
    if not names:
        raise UserError("no testbed is running", field="testbed", accepted="hetero-megatron testbed run ...")
    problem = "several testbeds are running" if name is None else "no such testbed is running"
    raise UserError(problem, field="--testbed", value=name or "not given", accepted=names)


def clean(testbed: Testbed) -> dict[str, Any]:
    """Remove everything of a testbed that has ended, also after an incomplete clean-up; returns what there was.

    Raises:
        RuntimeError: something cannot be removed; the directory stays, so that a later clean finds it.
    """
    directory = str(testbed.directory)
    pids_before = sorted(pid for pid, mark in process.marked().items() if mark == directory)
    stubborn = process.kill_marked(directory)
    groups = cgroups.find_groups(testbed.id)
    groups_left = cgroups.remove_groups(groups)
    if stubborn or groups_left:
        raise RuntimeError(
            f"testbed {testbed.id}: left behind: processes {stubborn}, cgroups {[str(p) for p in groups_left]}"
        )
    shutil.rmtree(testbed.directory, ignore_errors=True)
    with suppress(OSError):  # others are there
        testbed.directory.parent.rmdir()
    return {"testbed": testbed.id, "processes": pids_before, "cgroups": [str(path) for path in groups]}


def clean_dead() -> list[dict[str, Any]]:
    """Remove the remains of this user's dead testbeds."""
    directories = {testbed.directory for testbed in all_testbeds()}
    base = home()
    directories |= {Path(mark) for mark in process.marked().values() if Path(mark).parent == base}
    directories |= {base / name for name in cgroups.testbeds_with_groups() if _ID.fullmatch(name)}
    return [clean(t) for t in map(Testbed, sorted(directories)) if not t.alive and not _cleaning(t)]


def _cleaning(testbed: Testbed) -> bool:
    """Whether its reaper is still working."""
    reaper = testbed.record().get("reaper")
    if not reaper:
        return False
    end = time.monotonic() + 15.0
    while process.alive(*reaper) and time.monotonic() < end:
        time.sleep(0.05)
    return not testbed.directory.exists()
