"""Control groups that limit the memory of the ranks (cgroups v1 and v2).

A testbed's groups are children of the launcher's own group where the kernel allows it (v1), so that the launcher's
limits apply to its ranks. A v2 group cannot have both processes and limited children: there the groups are made below
the first ancestor without processes (or the root).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.testbed.process import signal_all

CONTROLLER = "memory"
PREFIX = "hetero-testbed-"
MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Hierarchy:
    """The kernel's memory controller: its mount point, and this process' group in it."""

    version: int
    root: Path
    cgroup: Path


def memory_hierarchy() -> Hierarchy | None:
    """The mounted hierarchy; None: there is none."""
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:
        return None
    path_of_controller = {name: path for _, names, path in lines for name in names.split(",")}  # "" is v2
    second: Hierarchy | None = None
    for words in mounts:
        fields_after = words[words.index("-") + 1 :]
        kind, root, options = fields_after[0], Path(words[4]), fields_after[2].split(",")
        if kind == "cgroup" and CONTROLLER in options:
            return Hierarchy(1, root, _visible(root, path_of_controller.get(CONTROLLER, "/")))
        if kind == "cgroup2" and CONTROLLER in _read(root / "cgroup.controllers").split():
            second = second or Hierarchy(2, root, _visible(root, path_of_controller.get("", "/")))
    return second


def _visible(root: Path, path: str) -> Path:
    """A group's directory; the mounted root if the path is outside this container."""
    directory = root / path.lstrip("/")
    return directory if directory.is_dir() else root


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parent_for(hierarchy: Hierarchy) -> Path:
    """The group below which a testbed's groups are made; on v2 the controller is enabled down to it.

    Raises:
        UserError: the kernel refuses.
    """
    if hierarchy.version == 1:
        return hierarchy.cgroup
    path, switch = hierarchy.cgroup, f"+{CONTROLLER}"
    while path != hierarchy.root and _read(path / "cgroup.procs").strip():
        path = path.parent
    if CONTROLLER not in _read(path / "cgroup.subtree_control").split():
        try:
            (path / "cgroup.subtree_control").write_text(switch)
        except OSError as error:
            raise UserError(
                f"cgroups v2 do not let memory be limited below {path}: {error.strerror}", field="cgroups",
                accepted="no --memory-limit; in a container start it with its own cgroup and --privileged",
            ) from None
    return path


@contextmanager
def _writing(group: Path) -> Iterator[None]:
    """Raise UserError if a write in this block fails."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the kernel refuses the cgroup {group}: {error.strerror}", field="cgroups",
            value=error.filename or str(group), accepted="a run without --memory-limit",
        ) from None  # fmt: skip


def attach(group: Path, pid: int) -> None:
    """Move a process with all its threads into the group."""
    with suppress(ProcessLookupError):  # it has just ended
        (group / "cgroup.procs").write_text(str(pid))


def oom_kills(group: Path) -> int:
    """Number of processes of the group that were killed for exceeding its memory limit."""
    text = _read(group / "memory.oom_control") or _read(group / "memory.events")  # v1, v2
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def set_memory(group: Path, limit: int) -> None:
    """Limit the memory of the group to ``limit`` bytes, without swap beyond it where the kernel counts swap by group.

    Raises:
        UserError: the kernel refuses.
    """
    memory, swap, most_swap = group / "memory.max", group / "memory.swap.max", 0
    if not memory.exists():  # v1, where the limit of swap is one of memory and swap together
        memory, swap, most_swap = group / "memory.limit_in_bytes", group / "memory.memsw.limit_in_bytes", limit
    with _writing(group):
        memory.write_text(str(limit))
        if swap.exists():
            swap.write_text(str(most_swap))


def make_group(hierarchy: Hierarchy, testbed: str, rank: int) -> Path:
    """Make ``PARENT/hetero-testbed-ID/rank-R``; on v2 with the controller enabled in between.

    Raises:
        UserError: the kernel refuses.
    """
    middle = parent_for(hierarchy) / (PREFIX + testbed)
    group = middle / f"rank-{rank}"
    with _writing(group):
        middle.mkdir(exist_ok=True)
        if hierarchy.version == 2 and (middle / "cgroup.subtree_control").exists():
            (middle / "cgroup.subtree_control").write_text(f"+{CONTROLLER}")
        group.mkdir(exist_ok=True)
    return group


def find_groups(testbed: str) -> list[Path]:
    """The groups of a testbed, children before parents."""
    tops = [path for path in _all_tops() if path.name == PREFIX + testbed]
    return [path for top in tops for path in (*sorted(p for p in top.iterdir() if p.is_dir()), top)]


def testbeds_with_groups() -> set[str]:
    """The testbeds that have groups, dead or alive."""
    return {path.name.removeprefix(PREFIX) for path in _all_tops()}


def _all_tops() -> list[Path]:
    """Top groups of all testbeds: below our own group, its ancestors, or any child of the root (a launcher may have
    been in another group)."""
    tops: list[Path] = []
    hierarchy = memory_hierarchy()
    for directory, names, _ in os.walk(hierarchy.root) if hierarchy is not None else ():
        tops += [Path(directory) / name for name in names if name.startswith(PREFIX)]
        names[:] = [name for name in names if not name.startswith(PREFIX)]
    return tops


def remove_groups(groups: Iterable[Path], patience: float = 5.0) -> list[Path]:
    """Kill the processes of the groups and remove them; returns those that could not be removed."""
    groups_left = list(groups)
    end = time.monotonic() + patience
    while groups_left:
        for path in list(groups_left):
            for pid in _read(path / "cgroup.procs").split():
                if int(pid) > 0:  # 0: a process of another pid namespace
                    signal_all([int(pid)], signal.SIGKILL)
            try:
                path.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            groups_left.remove(path)
        if not groups_left or time.monotonic() > end:
            break
        time.sleep(0.05)
    return groups_left
