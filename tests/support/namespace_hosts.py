"""Network namespaces as hosts: each with an address, reached from one more by sshd or by a stand-in for ssh.

A host can lose its power (all its processes die, its link goes down), two can be cut off from each other, and both can
come back. Processes are told apart by the namespace that they are in.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hetero_megatron.testbed.namespaces import BRIDGE, VirtualNetwork, address, port, tool
from hetero_megatron.testbed.process import inside, new_namespace

LAUNCHER = "10.77.1.1"


def missing(sshd: bool = False) -> str:
    """Why there can be no such hosts here; empty: there can."""
    for name in ("ip", "tc", "nsenter", *(("sshd", "ssh", "ssh-keygen") if sshd else ())):
        if not shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
            return f"{name} is not installed" + (" (apt-get install openssh-server)" if "ssh" in name else "")
    try:
        os.close(new_namespace())
    except OSError as error:
        return f"network namespaces are not permitted here: {error.strerror}"
    return ""


class NamespaceHosts:
    """``count`` hosts at 10.77.0.1, … and a namespace for launchers at ``LAUNCHER``.

    Args:
        sshd: one daemon per host; else ``ssh`` is a script that enters the namespace.
    """

    def __init__(self, folder: Path, count: int, sshd: bool = False) -> None:
        self.folder, self.count, self.sshd = folder, count, sshd
        self.network = VirtualNetwork(count, {})
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> NamespaceHosts:
        self.network.open()
        switch = self.network.switch
        tool("ip", ["link set lo up", f"addr add {LAUNCHER}/16 dev {BRIDGE}"], switch)
        self._prepare_sshd() if self.sshd else self._prepare_script()
        for index in range(self.count):
            self.boot(index)
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(self.count):
            self._kill(index)
        for daemon in self._daemons.values():
            daemon.wait()
        self._kill(None)
        self.network.close()

    def cluster(self, chips: Sequence[int], links: str = "{inter_node: {bandwidth: 1 GB/s}}") -> Path:
        """A cluster file of nodes host0, host1, … with so many chips each."""
        lines = ["version: 1", "nodes:"]
        for index, number in enumerate(chips):
            lines.append(
                f"  - {{name: host{index}, chip: core, chips_per_node: {number}, hosts: [{address(index)}], "
                "interface: eth0}"
            )
        lines += ["chips: {core: {memory: 2 GiB, tflops: {fp32: 0.01, fp64: 0.01}, memory_bandwidth: 5 GB/s}}"]
        lines += [f"links: {links}"]
        path = self.folder / "cluster.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self, words: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """A process in the launcher's namespace."""
        command = ["nsenter", f"--net={self.network.path(self.network.switch)}", *words]
        return subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
        )

    # What happens to hosts.

    def boot(self, index: int) -> None:
        tool("ip", [f"link set {port(index)} up"], self.network.switch)
        if self.sshd:
            with inside(self.network.nodes[index]):
                self._daemons[index] = subprocess.Popen(
                    [_sshd(), "-D", "-e", "-f", str(self.folder / "sshd_config")], stderr=subprocess.DEVNULL
                )
            self._until_heard(index)
        else:
            (self.folder / f"off-{address(index)}").unlink(missing_ok=True)

    def power_off(self, index: int) -> None:
        tool("ip", [f"link set {port(index)} down"], self.network.switch)
        if not self.sshd:
            (self.folder / f"off-{address(index)}").touch()
        self._kill(index)

    def cut(self, one: int, other: int) -> None:
        """Nothing goes between the two any more; the launcher reaches both."""
        for a, b in ((one, other), (other, one)):
            tool("ip", [f"route add blackhole {address(b)}/32"], self.network.nodes[a])

    def mend(self, one: int, other: int) -> None:
        for a, b in ((one, other), (other, one)):
            tool("ip", [f"route del blackhole {address(b)}/32"], self.network.nodes[a])

    def cut_from_launcher(self, index: int) -> None:
        tool("ip", [f"route add blackhole {LAUNCHER}/32"], self.network.nodes[index])

    def unplug(self, index: int) -> None:
        """Its processes go on, and nothing goes between it and any other, nor the launcher."""
        tool("ip", [f"link set {port(index)} down"], self.network.switch)

    def plug(self, index: int) -> None:
        tool("ip", [f"link set {port(index)} up"], self.network.switch)

    def processes(self, index: int) -> list[str]:
        """Command lines on a host, without its daemon's."""
        found = []
        for pid in self._pids(index):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and "sshd" not in words:
                    found.append(words)
        return found

    def no_orphans(self, seconds: float = 20.0) -> list[str]:
        """What still runs on any host after at most so long."""
        end = time.monotonic() + seconds
        while True:
            left = [line for index in range(self.count) for line in self.processes(index)]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    # How they are made.

    @property
    def ssh(self) -> str:
        """For --ssh-command."""
        if not self.sshd:
            return f"{sys.executable} {self.folder / 'ssh.py'}"
        return (
            f"ssh -i {self.folder / 'key'} -o BatchMode=yes -o StrictHostKeyChecking=no "
            "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ConnectTimeout=5 -o ServerAliveInterval=1 "
            "-o ServerAliveCountMax=3"
        )

    def _prepare_script(self) -> None:
        names = {address(i): self.network.path(fd) for i, fd in enumerate(self.network.nodes)}
        (self.folder / "ssh.py").write_text(
            "import os, sys\n"
            f"host, line = sys.argv[1:]\nname = {names!r}.get(host)\n"
            f"if name is None or os.path.exists({str(self.folder)!r} + '/off-' + host):\n"
            "    sys.exit(f'ssh: connect to host {host} port 22: No route to host')\n"
            "os.execvp('nsenter', ['nsenter', f'--net={name}', 'sh', '-c', line])\n"
        )

    def _prepare_sshd(self) -> None:
        for name in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        (self.folder / "sshd_config").write_text(
            f"Port 22\nHostKey {self.folder / 'host_key'}\nAuthorizedKeysFile {self.folder / 'authorized_keys'}\n"
            "StrictModes no\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\nMaxStartups 100\nUseDNS no\n"
        )

    def _until_heard(self, index: int) -> None:
        import socket

        end = time.monotonic() + 20
        while True:
            with inside(self.network.nodes[index]), suppress(OSError):
                socket.create_connection((address(index), 22), timeout=1).close()
                return
            assert time.monotonic() < end, "sshd does not listen"
            time.sleep(0.05)

    def _pids(self, index: int | None) -> list[int]:
        fd = self.network.switch if index is None else self.network.nodes[index]
        if fd < 0:
            return []
        inode, found = os.fstat(fd).st_ino, []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.stat(f"/proc/{name}/ns/net").st_ino == inode:
                    found.append(int(name))
        return found

    def _kill(self, index: int | None) -> None:
        end = time.monotonic() + 20
        while (pids := [p for p in self._pids(index) if _lives(p)]) and time.monotonic() < end:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _sshd() -> str:
    """sshd wants to be called by its absolute path."""
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found is not None
    return found


