"""SLURM on this machine: a controller and one slurmd per "host", all of them here, with ports and keys of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue")
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing() -> str:
    """Why there can be no SLURM here; empty: there can."""
    lacking = [name for name in NEEDED if not shutil.which(name, path=SBIN)]
    if lacking:
        packages = "apt-get install slurmctld slurmd slurm-client munge"
        return f"{', '.join(lacking)} not installed ({packages})"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """Nodes by partition: ``{"big": ["big-0", "big-1"], "small": ["small"]}``."""

    def __init__(self, folder: Path, partitions: dict[str, Sequence[str]]) -> None:
        self.folder, self.partitions = folder, partitions
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": SBIN}

    def __enter__(self) -> Slurm:
        munge = self.folder / "munge"
        munge.mkdir()
        munge.chmod(0o711)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        files = [f"--{option}={munge / name}" for option, name in (
            ("socket", "socket"), ("key-file", "key"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
        )]  # fmt: skip
        subprocess.run(["munged", "--force", *files], check=True, env=self.environment)
        self.conf.write_text(self._conf())
        (self.folder / "state").mkdir()
        subprocess.run(["slurmctld", "-f", str(self.conf)], check=True, env=self.environment)
        for node in (node for nodes in self.partitions.values() for node in nodes):
            subprocess.run(["slurmd", "-N", node, "-f", str(self.conf)], check=True, env=self.environment)
        self._until_idle()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            self.call("scancel", "--signal=KILL", "--user=root")
            self.call("scontrol", "shutdown")
        time.sleep(1)
        for pid in [*self.folder.glob("*.pid"), self.folder / "munge" / "pid"]:
            with suppress(OSError, ValueError):
                os.kill(int(pid.read_text()), 15)

    def call(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=timeout)

    def until_no_job(self, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while self.call("squeue", "--noheader").stdout.strip():
            assert time.monotonic() < end, self.call("squeue").stdout
            time.sleep(0.3)

    def _until_idle(self) -> None:
        end = time.monotonic() + 60
        count = sum(map(len, self.partitions.values()))
        while self.call("sinfo", "--noheader", "-N", "-o", "%t").stdout.split().count("idle") != count:
            assert time.monotonic() < end, self.call("sinfo").stdout
            time.sleep(0.3)

    def _conf(self) -> str:
        ports = _free_ports(1 + sum(map(len, self.partitions.values())))
        host, folder = socket.gethostname(), self.folder
        lines = [
            "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={ports.pop()}",
            "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge/socket", "SlurmUser=root",
            f"SlurmctldPidFile={folder}/ctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmdSpoolDir={folder}/spool-%n", f"StateSaveLocation={folder}/state",
            f"SlurmctldLogFile={folder}/ctld.log", f"SlurmdLogFile={folder}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core", "MpiDefault=none", "ReturnToService=2", "KillWait=30",
            "SlurmdParameters=config_overrides", "InactiveLimit=0",
        ]  # fmt: skip
        for name, nodes in self.partitions.items():
            for node in nodes:
                address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.pop()}"
                lines.append(f"NodeName={node} {address} CPUs=8 State=UNKNOWN")
            lines.append(f"PartitionName={name} Nodes={','.join(nodes)} MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
