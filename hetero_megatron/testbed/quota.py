"""Control groups of the ranks: CPU quota and memory limit, in cgroups v1 and v2.

A testbed's groups are children of the launcher's own group where the kernel allows it (v1), so that whatever limits
hold for the launcher hold for its ranks too. v2 does not allow a group to hold both processes and limited children:
there the groups are made below the first ancestor that holds no processes (or the root).
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

PERIOD_US = 25_000  # 20-30 ms: 3:1 asked gave 3.01-3.08; longer ones starve a rank in the middle of a message
MIN_QUOTA_US = 1_000  # the kernel takes no less
PREFIX = "hetero-testbed-"
MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Hierarchy:
    """One controller of the kernel: where it is mounted, and this process' group in it."""

    version: int
    controller: str
    root: Path
    own: Path


def hierarchies() -> dict[str, Hierarchy]:
    """The mounted hierarchies of the controllers ``cpu`` and ``memory``; either may be missing."""
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:
        return {}
    own = {name: path for _, names, path in lines for name in names.split(",")}  # "" is v2
    result: dict[str, Hierarchy] = {}
    for words in mounts:
        after = words[words.index("-") + 1 :]
        kind, root, options = after[0], Path(words[4]), after[2].split(",")
        for name in ("cpu", "memory"):
            if kind == "cgroup" and name in options:
                result[name] = Hierarchy(1, name, root, _visible(root, own.get(name, "/")))
            elif kind == "cgroup2" and name not in result and name in _read(root / "cgroup.controllers").split():
                result[name] = Hierarchy(2, name, root, _visible(root, own.get("", "/")))
    return result


def _visible(root: Path, path: str) -> Path:
    """A group's directory; the mounted root when the path is one outside this container."""
    directory = root / path.lstrip("/")
    return directory if directory.is_dir() else root


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parent_for(hierarchy: Hierarchy) -> Path:
    """Below which group a testbed's groups are made; on v2 the controller is passed down to it.

    Raises:
        UserError: the kernel refuses.
    """
    if hierarchy.version == 1:
        return hierarchy.own
    path, switch = hierarchy.own, f"+{hierarchy.controller}"
    while path != hierarchy.root and _read(path / "cgroup.procs").strip():
        path = path.parent
    if hierarchy.controller not in _read(path / "cgroup.subtree_control").split():
        try:
            (path / "cgroup.subtree_control").write_text(switch)
        except OSError as error:
            raise UserError(
                f"cgroups v2 do not let {hierarchy.controller} be limited below {path}: {error.strerror}",
                field="cgroups",
                accepted="--chips clock or soft; in a container start it with its own cgroup and --privileged",
            ) from None
    return path


@contextmanager
def _writing(group: Path) -> Iterator[None]:
    """UserError where the kernel refuses what is written in here."""
    try:
        yield
    except OSError as error:
        accepted = "--chips clock or soft, which need no cgroups; a run without --memory-limit"
        raise UserError(f"the kernel refuses the cgroup {group}: {error.strerror}", field="cgroups",
                        value=error.filename or str(group), accepted=accepted) from None  # fmt: skip


@dataclass
class RankGroups:
    """The groups of one rank: ``cpu`` for its quota, ``memory`` for its limit; None where not wanted."""

    cpu: Path | None = None
    memory: Path | None = None
    version: int = 1

    def attach(self, pid: int, which: str) -> None:
        """Move a process with all its threads into the group."""
        group = self.cpu if which == "cpu" else self.memory
        assert group is not None
        with suppress(ProcessLookupError):  # it has just ended
            (group / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How often the kernel killed something in the group for its memory limit."""
        if self.memory is None:
            return 0
        text = _read(self.memory / ("memory.oom_control" if self.version == 1 else "memory.events"))
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def set_quota(group: Path, speed: float, pause_seconds: float = 0.0) -> None:
    """Let the group have ``speed`` cores, and in each period the CPU time that its pauses cost it besides; no more
    than one core.

    Raises:
        UserError: less than the kernel can give, or it refuses.
    """
    wanted = round(speed * PERIOD_US)
    if wanted < MIN_QUOTA_US:
        least = MIN_QUOTA_US / PERIOD_US
        raise UserError("too slow for a CPU quota", field="emulate.speed", value=speed, accepted=f"at least {least}")
    wanted = min(wanted + round(pause_seconds * 1e6), PERIOD_US)
    with _writing(group):
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{wanted} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(wanted))


def set_memory(group: Path, limit: int) -> None:
    """Limit the memory of the group to ``limit`` bytes; no swap beyond it, where the kernel counts swap by group.

    Raises:
        UserError: the kernel refuses.
    """
    memory, swap, most = group / "memory.max", group / "memory.swap.max", 0
    if not memory.exists():  # v1, where the limit of swap is one of memory and swap together
        memory, swap, most = group / "memory.limit_in_bytes", group / "memory.memsw.limit_in_bytes", limit
    with _writing(group):
        memory.write_text(str(limit))
        if swap.exists():
            swap.write_text(str(most))


def make_group(hierarchy: Hierarchy, testbed: str, rank: int) -> Path:
    """``PARENT/hetero-testbed-ID/rank-R``; on v2 with the controller switched on in between.

    Raises:
        UserError: the kernel refuses.
    """
    middle = parent_for(hierarchy) / (PREFIX + testbed)
    group = middle / f"rank-{rank}"
    with _writing(group):
        middle.mkdir(exist_ok=True)
        if hierarchy.version == 2 and (middle / "cgroup.subtree_control").exists():
            (middle / "cgroup.subtree_control").write_text(f"+{hierarchy.controller}")
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
    """Every group named as ours, in the hierarchies used here: below our own group, its ancestors, or any child of
    the root (an earlier launcher may have been in another group)."""
    found: dict[Path, None] = {}
    for hierarchy in hierarchies().values():
        for directory, names, _ in os.walk(hierarchy.root):
            for name in names:
                if name.startswith(PREFIX):
                    found[Path(directory) / name] = None
            names[:] = [name for name in names if not name.startswith(PREFIX)]
    return list(found)


def remove_groups(groups: Iterable[Path], patience: float = 5.0) -> list[Path]:
    """Kill what is in the groups and remove them; returns those that would not go."""
    left = list(groups)
    end = time.monotonic() + patience
    while left:
        for path in list(left):
            for pid in _read(path / "cgroup.procs").split():
                if int(pid) > 0:  # 0: a process of another pid namespace
                    signal_all([int(pid)], signal.SIGKILL)
            try:
                path.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            left.remove(path)
        if not left or time.monotonic() > end:
            break
        time.sleep(0.05)
    return left
