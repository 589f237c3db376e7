"""The processes of one round of a job: one per rank, on this host or on a testbed of this host. They die with us."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetero_megatron.environment.launcher import DIAGNOSES, ERROR_FILE, SECRET, SUPERVISED
from hetero_megatron.monitoring.log_fields import integer, numbered, record, require
from hetero_megatron.testbed.process import all_status
from hetero_megatron.training.exit import end_with_parent
from hetero_megatron.utils.files import read_json_object

_REPORT = record({"exit_codes": numbered(integer(-128, 255))})


@dataclass(frozen=True)
class Seat:
    """Where one rank runs: ``local``, its index on ``node``. ``device``: index on this host, where that is another one
    (without a cluster every rank counts as a node, but all share the host's devices)."""

    node: str
    local: int
    device: int | None = None


@dataclass(frozen=True)
class Setup:
    """A plan on seats; ``cluster``: the file that names them, if there is one; ``program``: what starts a rank;
    ``together``: nodes of which none is of use without the others."""

    plan: Path
    seats: tuple[Seat, ...]
    cluster: Path | None = None
    program: tuple[str, ...] = ()
    together: tuple[frozenset[str], ...] = ()

    def lost_with(self, nodes: set[str]) -> set[str]:
        """These nodes, and those that are of no use without them."""
        return nodes.union(*(others for others in self.together if others & nodes))


class SupervisedJob(Protocol):
    """What a supervisor needs of a round."""

    @property
    def ranks(self) -> list[int]: ...

    def poll(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended, -N for signal N."""

    def hung(self) -> set[int]:
        """Ranks that the job itself had to kill because they did not end."""

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


def rank_command(setup: Setup, words: Sequence[str]) -> list[str]:
    """What starts a rank of the setup."""
    command = [*setup.program, "--plan", str(setup.plan), *words]
    return command + (["--cluster", str(setup.cluster)] if setup.cluster is not None else [])


class LocalJob:
    """Ranks on this host, whose rendezvous store is elsewhere: a node is only a label.

    Args:
        diagnoses: where ranks that lose a peer say so; None: nowhere.
        first: number of the first one.
        more: further variables of their environment.
        secret: of the job; None: the environment's, or a new one.
        world: ranks of the job, where some are elsewhere.
        apart: signals to this process's group, as torchrun sends them, do not reach the ranks.

    Attributes:
        secret: of the job.
    """

    def __init__(
        self, setup: Setup, words: Sequence[str], host: str, port: int, number: int, diagnoses: Path | None,
        first: int = 0, more: Mapping[str, str] | None = None, secret: str | None = None, world: int = 0,
        apart: bool = False,
    ) -> None:  # fmt: skip
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._errors = Path(tempfile.mkdtemp(prefix="hetero-megatron-"))  # what ranks say as they end, by rank
        secret = secret or os.environ.get(SECRET) or secrets.token_hex(32)
        self.secret = secret.encode()
        command = rank_command(setup, words)
        try:
            for rank, seat in enumerate(setup.seats, first):
                variables = _environment(setup, rank, world or first + len(setup.seats), seat, host, port, number)
                environment = {**os.environ, **variables, **(more or {})}
                if diagnoses is not None:
                    environment[DIAGNOSES] = str(diagnoses.absolute())
                environment |= {SECRET: secret, ERROR_FILE: str(self._errors / str(rank) / "error.json")}
                self._processes[rank] = subprocess.Popen(
                    command, env=environment, preexec_fn=end_with_parent, start_new_session=apart
                )
        except BaseException:
            self.kill()
            raise

    @property
    def ranks(self) -> list[int]:
        return list(self._processes)

    def poll(self) -> dict[int, int]:
        polled = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in polled.items() if code is not None}

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def end(self, rank: int) -> None:
        """SIGKILL to one rank."""
        if self._processes[rank].poll() is None:
            self._processes[rank].kill()

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self._errors, ignore_errors=True)


class TestbedJob:
    """Ranks on a testbed: a new one for every round, of the nodes that are left.

    Args:
        launcher: ``hetero-megatron testbed run`` with further flags.
        logs: where its logs go; it says there how every rank ended.
        diagnoses: where ranks that lose a peer say so.
    """

    __test__ = False  # not a test, whatever pytest thinks of its name

    def __init__(
        self,
        setup: Setup,
        words: Sequence[str],
        number: int,
        grace: float,
        launcher: Sequence[str],
        logs: Path,
        diagnoses: Path,
    ) -> None:
        assert setup.cluster is not None, "the command line refuses a testbed without a cluster"
        self.ranks = list(range(len(setup.seats)))
        self._report = logs / "testbed.json"
        self._report.unlink(missing_ok=True)
        command = [*launcher, "--cluster", str(setup.cluster), "--grace", str(grace), "--log-dir", str(logs)]
        command += ["--", *rank_command(setup, words)]
        environment = {**os.environ, SUPERVISED: "1", "TORCHELASTIC_RESTART_COUNT": str(number)}
        environment[DIAGNOSES] = str(diagnoses.absolute())
        self._process = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)

    def poll(self) -> dict[int, int]:
        code = self._process.poll()
        if code is None:
            return {}
        if not self._report.exists():  # refused, or died
            return dict.fromkeys(self.ranks, code or 1)
        report = read_json_object(self._report)
        require(report, _REPORT, "what a testbed writes", str(self._report))
        codes = report["exit_codes"]
        return {int(rank): c if c < 128 else 128 - c for rank, c in codes.items()}

    def hung(self) -> set[int]:
        return set() if self._process.poll() is None else set(self.ranks) - self.poll().keys()

    def signal(self, number: int) -> None:
        """To the ranks: the testbed's launcher would not leave them the time to save."""
        for entry in all_status():
            if entry.parent == self._process.pid and b"testbed.reaper" not in _arguments(entry.pid):
                os.kill(entry.pid, number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # it takes the namespaces and groups with it
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def _arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _environment(
    setup: Setup, rank: int, world: int, seat: Seat, host: str, port: int, number: int
) -> dict[str, str]:
    """What torchrun would set. The store is the launcher's, so ranks do not start one."""
    if seat.device is None:
        local = {"LOCAL_RANK": seat.local, "LOCAL_WORLD_SIZE": sum(s.node == seat.node for s in setup.seats)}
    else:  # devices of lost ranks stay unused, so the index may be above the number of ranks
        local = {"LOCAL_RANK": seat.device}
    values = {
        "RANK": rank, "WORLD_SIZE": world, **local,
        "MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": number, "HETERO_NODE": seat.node, SUPERVISED: 1,
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()} | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")
    }
