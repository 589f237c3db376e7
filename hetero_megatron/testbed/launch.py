"""Starts one process per rank of a cluster file, supervises them, and cleans up.

A run ends when all ranks end; when one fails (the rest get a grace time, then SIGTERM, then SIGKILL); by Ctrl-C or
SIGTERM; or when the launcher is killed (its ranks die with it, and the reaper removes the rest).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hetero_megatron
from hetero_megatron.cluster import format_bytes
from hetero_megatron.environment.launcher import ERROR_FILE, SECRET, TESTBED, loopback_interface
from hetero_megatron.errors import UserError
from hetero_megatron.testbed import cgroups, namespaces, shaping
from hetero_megatron.testbed.clocks import Kept, read_clocks
from hetero_megatron.testbed.load import LoadMonitor
from hetero_megatron.testbed.output import Output
from hetero_megatron.testbed.process import (
    MARK,
    die_with_parent,
    enter_namespace,
    kill_marked,
    signal_all,
    status,
)  # fmt: skip
from hetero_megatron.testbed.report import RunOutcome, describe, say, write_report
from hetero_megatron.testbed.settings import Settings, describe_links
from hetero_megatron.testbed.state import CONTROL, ENVIRONMENT, LOAD, READY, clean, new_testbed, write_json
from hetero_megatron.utils.text import plural

POLL_SECONDS = 0.2
LOAD_SECONDS = 2.0
TERM_SECONDS = 3.0  # between SIGTERM and SIGKILL
PORT = 29500  # in namespaces of our own every port is free


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a command on a testbed.

    Args:
        grace: seconds that the other ranks have to end by themselves after one has failed.
        output: ``rank0`` or ``all``.
        log_dir: directory for every rank's output and ``testbed.json``.
    """

    command: tuple[str, ...]
    grace: float = 10.0
    output: str = "rank0"
    log_dir: Path | None = None


def find_command(words: Sequence[str]) -> tuple[str, ...]:
    """The command, with an interpreter in front of a ``.py`` file; UserError if it cannot be run."""
    if not words:
        raise UserError("no command to run", field="testbed run", accepted="-- CMD ... at the end")
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UserError("no such file", field="command", value=words[0])
        return (sys.executable, *words)
    if shutil.which(words[0]) is None:
        raise UserError("no such command", field="command", value=words[0], accepted="a program, or a .py file")
    return tuple(words)


@dataclass
class Launcher:
    """One run; :meth:`run` is called once, from the main thread.

    Attributes:
        codes: exit codes of ranks that ended by themselves (128 + signal if killed).
        latencies: measured one-way seconds, by pair of node groups (links: namespaces).
    """

    settings: Settings
    options: LaunchOptions
    codes: dict[int, int] = field(default_factory=dict)
    latencies: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if MARK in os.environ:
            raise UserError("a testbed inside a testbed", field=MARK, value=os.environ[MARK], accepted="one at a time")
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._groups: dict[int, Path] = {}  # those that limit the memory of ranks
        self._network: namespaces.VirtualNetwork | None = None
        self._signals: list[int] = []
        self._ready: set[int] = set()
        self._load = LoadMonitor(sessions=[])
        self._clock: Kept | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._port = 0  # until the first rank is started
        self._sampled = time.monotonic()
        self._variables: dict[str, str] = {}
        self.secret = os.environ.get(SECRET) or secrets.token_hex(32)

    def run(self) -> int:
        """Returns the exit code: the worst of the ranks, or 128 + signal if interrupted."""
        with self._catch_signals(), self.opened():
            self.start_ranks()
            self._watch()
        code = 128 + self._signals[0] if self._signals else max(self.codes.values(), default=1)
        self.report(code)
        return code

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The testbed without ranks; at the end all of it is removed."""
        self._testbed = new_testbed()
        self._output = Output(self.options.output, self.options.log_dir)
        try:
            self._reaper = self._start_reaper()
            self._make()
            self._load.sample()
            yield
        finally:
            self._close()

    @property
    def network(self) -> namespaces.VirtualNetwork | None:
        """Between nodes; None: links are not namespaces."""
        return self._network

    def start_ranks(self, variables: Mapping[str, str] | None = None) -> None:
        """Args:
        variables: of their environment, beside and instead of the testbed's own.
        """
        self._variables = dict(variables or {})
        for rank in range(self.settings.cluster.world_size):
            self._start(rank)
        self._record()

    def child(self, rank: int) -> subprocess.Popen[bytes]:
        return self._ranks[rank]

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def note(number: int, _: FrameType | None) -> None:
            self._signals.append(number)

        old = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "hetero_megatron.testbed.reaper", str(self._testbed.directory)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/",
            env=_package_environment(),
        )  # fmt: skip

    def _make(self) -> None:
        """Make everything that must exist before the first rank: namespaces, groups, files."""
        settings, directory = self.settings, self._testbed.directory
        self._record()
        if settings.links == "namespaces":
            self._network = namespaces.VirtualNetwork(len(settings.node_names), settings.node_rates)
            try:
                self._network.open()
            except (OSError, RuntimeError) as error:
                problem = f"namespaces cannot be made: {error}"
                raise UserError(problem, field="--links", accepted="--links paced") from None
            for name, a, b, _ in describe_links(settings):
                self.latencies[name] = self._network.latency(a, b)
        write_json(directory / CONTROL, {"speed": {}, "rate": []})
        self._make_groups()
        environment: dict[str, Any] = {
            "testbed": self._testbed.id, "cluster": os.path.abspath(settings.cluster.file), "chips": settings.chips,
            "links": settings.links, "speeds": list(settings.speeds), "cores": list(settings.cores),
            "control": str(directory / CONTROL), "node_of": list(settings.node_of),
            "host_rates": [settings.cluster.chip_of(r).host_bandwidth for r in range(settings.cluster.world_size)],
        }  # fmt: skip
        if settings.links == "paced":
            environment["pace"] = settings.pace()
        write_json(directory / ENVIRONMENT, environment)
        self._record()
        ranks, nodes = plural(settings.cluster.world_size, "rank"), plural(len(settings.node_names), "node")
        say(f"testbed {self._testbed.id}: {ranks} on {nodes}")
        for line in describe(settings, self.latencies):
            say(f"  {line}")

    def _make_groups(self) -> None:
        hierarchy = cgroups.memory_hierarchy() if self.settings.memory else None
        for rank, limit in enumerate(self.settings.memory if hierarchy is not None else ()):
            assert hierarchy is not None
            self._groups[rank] = cgroups.make_group(hierarchy, self._testbed.id, rank)
            cgroups.set_memory(self._groups[rank], limit)

    def _record(self) -> None:
        """Write the record for status, faults and clean-up."""
        settings, network = self.settings, self._network
        reaper = status(self._reaper.pid) if self._reaper else None
        ranks = []
        for rank, place in enumerate(settings.cluster.ranks):
            child = self._ranks.get(rank)
            child_status = status(child.pid) if child else None
            ranks.append({
                "rank": rank, "node": place.node, "chip": place.chip, "speed": settings.speeds[rank],
                "core": settings.cores[rank], "pid": child_status.pid if child_status else None,
                "start": child_status.start if child_status else None,
            })  # fmt: skip
        nodes = []
        for index, name in enumerate(settings.node_names):
            rates = {settings.node_names[b]: rate for (a, b), rate in settings.node_rates.items() if a == index}
            nodes.append({
                "name": name, "address": namespaces.address(index) if network else "127.0.0.1", "rates": rates,
                "namespace": network.path(network.nodes[index]) if network and network.nodes else None,
            })  # fmt: skip
        self._testbed.write_record({
            "cluster": os.path.abspath(settings.cluster.file), "chips": settings.chips, "links": settings.links,
            "command": list(self.options.command), "ranks": ranks, "nodes": nodes,
            "switch": network.path(network.switch) if network and network.switch >= 0 else None,
            "reaper": [reaper.pid, reaper.start] if reaper else None,
        })  # fmt: skip

    def _environment(self, rank: int) -> dict[str, str]:
        """torchrun's variables, and the testbed's."""
        settings, place = self.settings, self.settings.cluster.ranks[rank]
        node = settings.node_of[rank]
        self._port = self._port or (PORT if self._network else _free_port())
        # torch complains, once per rank, that it finds no name for an address of ours; nothing resolves names there
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if self._network else {}
        return {
            **quiet,
            **os.environ,
            "MASTER_ADDR": namespaces.address(0) if self._network else "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "RANK": str(rank),
            "WORLD_SIZE": str(settings.cluster.world_size),
            "LOCAL_RANK": str(place.local),
            "LOCAL_WORLD_SIZE": str(settings.node_of.count(node)),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(settings.node_names)),
            "GLOO_SOCKET_IFNAME": shaping.DEVICE if self._network else loopback_interface(),
            "HETERO_NODE": place.node,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
            TESTBED: str(self._testbed.directory / ENVIRONMENT),
            MARK: str(self._testbed.directory),
            SECRET: self.secret,
            ERROR_FILE: str(self._testbed.directory / "errors" / str(rank) / "error.json"),
            **self._variables,
        }

    def _start(self, rank: int) -> None:
        if self._signals:
            return
        parent, core, group = os.getpid(), self.settings.cores[rank], self._groups.get(rank)
        namespace = self._network.nodes[self.settings.node_of[rank]] if self._network else None

        def prepare() -> None:  # in the child, before the command
            die_with_parent(parent)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {core})
            if group is not None:
                cgroups.attach(group, os.getpid())
            if namespace is not None:
                enter_namespace(namespace)

        child = subprocess.Popen(
            self.options.command, env=self._environment(rank), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, preexec_fn=prepare,
        )  # fmt: skip
        self._ranks[rank] = child
        assert child.stdout is not None and child.stderr is not None
        self._output.add(rank, "out", child.stdout)  # type: ignore[arg-type]
        self._output.add(rank, "err", child.stderr)  # type: ignore[arg-type]
        assert isinstance(self._load.sessions, list)
        self._load.sessions.append(child.pid)

    def _watch(self) -> None:
        """Wait until all ranks have ended, a failure's grace time is over, or a signal came."""
        deadline = float("inf")
        while len(self.codes) < len(self._ranks) and not self._signals and time.monotonic() < deadline:
            poll_start = time.monotonic()
            ended, has_output = self.look(POLL_SECONDS)
            if not has_output:
                time.sleep(max(0.0, POLL_SECONDS - (time.monotonic() - poll_start)))  # ranks that closed their output
            if self._output.unread:
                self._signals.append(signal.SIGPIPE)
            for rank in ended:
                if self.codes[rank] and deadline == float("inf"):
                    deadline = time.monotonic() + self.options.grace
                    say(f"{self._describe_exit(rank)}; the others have {self.options.grace:g} s to end")
        self.measure()

    def look(self, seconds: float) -> tuple[list[int], bool]:
        """Pass on output for up to ``seconds``, and look after everything once: ranks that have ended since the last
        call; and whether any has its output open."""
        has_output = self._output.pump(seconds)
        ended = self._ended()
        self._note_ready()
        if self._reaper is not None and self._reaper.poll() is not None:
            self._reaper = self._start_reaper()
            self._record()
        if time.monotonic() - self._sampled >= LOAD_SECONDS:
            self._sampled = time.monotonic()
            self._load.sample()
            with suppress(OSError):  # for people who ask meanwhile
                write_json(self._testbed.directory / LOAD, self._load.facts())
        return ended, has_output

    def measure(self) -> None:
        """For the last time, before the testbed is removed."""
        self._note_ready()
        self._load.sample()
        self._clock = read_clocks(self._testbed.directory)

    def _ended(self) -> list[int]:
        """The ranks that have ended since the last call; stores their codes."""
        new = [r for r, child in self._ranks.items() if r not in self.codes and child.poll() is not None]
        for rank in new:
            code = self._ranks[rank].returncode
            self.codes[rank] = code if code >= 0 else 128 - code
        return new

    def _describe_exit(self, rank: int) -> str:
        code, place = self._ranks[rank].returncode, self.settings.cluster.ranks[rank]
        how_ended = f"ended with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        if rank in self._groups and cgroups.oom_kills(self._groups[rank]):
            how_ended += f" at its memory limit of {format_bytes(self.settings.memory[rank])}"
        return f"rank {rank} ({place.node}, {place.chip}) {how_ended}"

    def _note_ready(self) -> None:
        """Record the ranks that have finished starting up."""
        self._ready |= {rank for rank in self._ranks if (self._testbed.directory / READY.format(rank)).exists()}

    def _close(self) -> None:
        """Stop running ranks, then let the reaper clean up; done here again in case it cannot."""
        self._stop_ranks()
        end = time.monotonic() + 1.0
        while time.monotonic() < end and self._output.pump(0.05):
            pass
        self._output.close()
        if self._network is not None:
            self._network.close()
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            try:
                self._reaper.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._reaper.kill()
                self._reaper.wait()
        if self._testbed.directory.exists():
            clean(self._testbed)

    def _stop_ranks(self) -> None:
        alive = [child.pid for child in self._ranks.values() if child.poll() is None]
        if alive:
            signal_all(alive, signal.SIGTERM, group=True)
            signal_all(alive, signal.SIGCONT, group=True)  # a frozen one could not hear it
            end, signals_before = time.monotonic() + TERM_SECONDS, len(self._signals)
            while time.monotonic() < end and len(self._signals) < signals_before + 1:
                self._output.pump(0.05)
                if all(child.poll() is not None for child in self._ranks.values()):
                    break
        kill_marked(str(self._testbed.directory))
        for child in self._ranks.values():
            child.wait()

    def report(self, code: int) -> None:
        """What the run was worth; ``code``: exit code."""
        slowed = self.settings.chips != "none" or self.settings.links == "paced"  # by the ranks themselves
        unheard = sorted(set(self._ranks) - self._ready) if slowed else []
        outcome = RunOutcome(code, self.codes, self.latencies, self._load, unheard, self._clock)
        write_report(self.settings, outcome, self.options.log_dir)


def _package_environment() -> dict[str, str]:
    """Makes modules of this package importable in child processes."""
    root = str(Path(hetero_megatron.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
