"""What this machine supports for a testbed, and how to fix what is missing. Used by the launcher and by doctor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

from hetero_megatron.testbed import cgroups
from hetero_megatron.testbed.process import inside, new_namespace

_PROBE = {  # what a testbed's network needs of the kernel; each line is tried in a namespace that vanishes at once
    "veth": "ip link add probe0 type veth peer name probe1",
    "bridge": "ip link add probe2 type bridge",
    "htb": "tc qdisc add dev probe1 root handle 1: htb && tc class add dev probe1 parent 1: classid 1:1 htb rate 1mbit",
    "u32": "tc filter add dev probe1 parent 1: protocol ip prio 1 u32 match ip dst 10.0.0.1/32 flowid 1:1",
}
_INSTALL = {"ip": "apt-get install iproute2", "tc": "apt-get install iproute2"}
MODULES = {"veth": "veth", "bridge": "bridge", "htb": "sch_htb", "u32": "cls_u32"}  # of the kernel, with these features


@dataclass(frozen=True)
class Machine:
    """Attributes:
        root: effective user is root.
        tools: missing tools.
        lacks: missing kernel features, in words; None: could not be tried.
        memory_groups: version of the cgroups that can limit memory here; 0: none.
        cores: usable cores."""

    root: bool
    tools: tuple[str, ...]
    lacks: tuple[str, ...] | None
    memory_groups: int
    cores: tuple[int, ...]

    def no_namespaces(self) -> str:
        """Why links cannot use namespaces; empty if they can."""
        if platform.system() != "Linux":
            return "this is not Linux"
        if not self.root:
            return "not root"
        if self.tools:
            return " and ".join(self.tools) + " not installed: " + _INSTALL[self.tools[0]]
        if self.lacks is None:
            return "network namespaces cannot be made here (in a container: start it with --privileged)"
        return f"the kernel lacks {', '.join(self.lacks)}" if self.lacks else ""

    def no_memory_limit(self) -> str:
        """Why memory cannot be limited by cgroups; empty if it can."""
        if not self.root:
            return "not root"
        return "" if self.memory_groups else "no writable cgroup hierarchy with the controller memory"


def examine() -> Machine:
    """Examine the machine, using a scratch namespace; leaves nothing behind."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    tools = tuple(name for name in ("ip", "tc") if shutil.which(name) is None)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    lacks = _probe() if root and not tools else None
    memory = cgroups.memory_hierarchy()
    usable = root and memory is not None and os.access(memory.cgroup, os.W_OK) and not _read_only(memory.cgroup)
    return Machine(root, tools, lacks, memory.version if memory is not None and usable else 0, tuple(sorted(cores)))


def _read_only(path: os.PathLike[str]) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _probe() -> tuple[str, ...] | None:
    script = "\n".join(f"if ! {{ {line}; }} 2>/dev/null; then echo {name}; fi" for name, line in _PROBE.items())
    try:
        namespace = new_namespace()
    except OSError:
        return None
    try:
        with inside(namespace):
            completed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    finally:
        os.close(namespace)
    return tuple(completed.stdout.split())
