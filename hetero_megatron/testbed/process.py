"""Linux process functions missing from the standard library: namespaces, death signals, /proc."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hetero_megatron.environment.launcher import TESTBED_DIRECTORY

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
PF_KTHREAD = 0x00200000
MARK = TESTBED_DIRECTORY  # in the environment of every process of a testbed: which one it belongs to

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: int) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def current_namespace() -> int:
    """A file descriptor of this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def new_namespace() -> int:
    """A file descriptor of a new anonymous network namespace, which exists while somebody is in it or holds it."""
    home = current_namespace()
    try:
        _call("unshare", CLONE_NEWNET)
        return current_namespace()
    finally:
        enter_namespace(home)
        os.close(home)


def enter_namespace(fd: int) -> None:
    """Like ``nsenter --net``. (``ip netns exec`` would also remount /sys and hide the cgroups.)"""
    _call("setns", fd, CLONE_NEWNET)


@contextmanager
def inside(fd: int) -> Iterator[None]:
    """Move this thread into another network namespace; sockets made there stay there."""
    home = current_namespace()
    try:
        enter_namespace(fd)
        yield
    finally:
        enter_namespace(home)
        os.close(home)


def die_with_parent(parent: int) -> None:
    """For a child before exec: SIGKILL when the parent ends for whatever reason."""
    if hasattr(_libc, "prctl"):
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


@dataclass(frozen=True)
class ProcessStatus:
    """A line of /proc/PID/stat; ``ticks``: CPU time including waited-for children."""

    pid: int
    state: str
    parent: int
    session: int
    kernel: bool
    ticks: int
    start: int


def status(pid: int | str) -> ProcessStatus | None:
    """None if there is no such process (or no /proc)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    words = text[text.rindex(b")") + 2 :].split()
    return ProcessStatus(
        pid=int(text[: text.index(b" ")]),
        state=words[0].decode(),
        parent=int(words[1]),
        session=int(words[3]),
        kernel=bool(int(words[6]) & PF_KTHREAD),
        ticks=sum(map(int, words[11:15])),
        start=int(words[19]),
    )


def all_status() -> list[ProcessStatus]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [process_status for name in names if name.isdigit() and (process_status := status(name)) is not None]


def alive(pid: int, start: int) -> bool:
    """Whether it is still the process that began at ``start`` (clock ticks since boot); zombies are not alive."""
    process_status = status(pid)
    return process_status is not None and process_status.start == start and process_status.state not in "ZX"


def marked() -> dict[int, str]:
    """Processes of all testbeds: pid -> directory of the testbed, from their environment."""
    directory_by_pid = {}
    for entry in all_status():
        if entry.kernel or entry.state in "ZX":
            continue
        try:
            with open(f"/proc/{entry.pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        for word in words:
            if word.startswith(MARK.encode() + b"="):
                directory_by_pid[entry.pid] = os.fsdecode(word.partition(b"=")[2])
    return directory_by_pid


def kill_marked(directory: str, patience: float = 10.0) -> list[int]:
    """Kill every process of the testbed in ``directory``; returns those still alive after ``patience`` seconds."""
    end = time.monotonic() + patience
    while True:
        pids_left = [pid for pid, mark in marked().items() if mark == directory and pid != os.getpid()]
        signal_all(pids_left, signal.SIGKILL)
        if not pids_left or time.monotonic() > end:
            return pids_left
        time.sleep(0.05)


def signal_all(pids: Iterable[int], number: int, group: bool = False) -> None:
    """Signal processes (or their process groups), ignoring those that are gone."""
    for pid in pids:
        try:
            if group:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            pass
