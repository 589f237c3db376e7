"""A launcher that goes on when ranks fail: restart, or drop what was lost and resume under another plan.

One process per rank on this host (a node is a label, as with ``HETERO_NODE``). The rendezvous store lives here,
outside the nodes that may be lost. Which plan fits what is left is asked of a ``Planner``: a list of fallback plans, or
any callable. Checkpoints do the rest: they are read under any plan.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hetero_megatron.errors import UserError

USER_ERROR, PEER_ERROR = 2, 3  # exit codes of a rank: its own refusal; a peer that died or does not answer
_PROGRAM = "import os, sys; from hetero_megatron.cli.pretrain import main; c = main(sys.argv[1:]); "
_PROGRAM += "sys.stdout.flush(); sys.stderr.flush(); os._exit(c)"


@dataclass(frozen=True)
class Seat:
    """Where one rank runs."""

    node: str
    local: int


@dataclass(frozen=True)
class Setup:
    """A plan on seats; ``cluster``: the file that names them, if there is one."""

    plan: Path
    seats: tuple[Seat, ...]
    cluster: Path | None = None


# (seats that are left, cluster file of them or None) -> a plan file for them, or None if there is none.
Planner = Callable[[Sequence[Seat], Path | None], Path | None]


@dataclass
class Round:
    """How one round of the job ended: exit codes by rank, ranks that had to be killed because they hung."""

    codes: dict[int, int] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    stopped: bool = False

    def lost(self, seats: Sequence[Seat]) -> set[str]:
        """Nodes of ranks that died by a signal, or hung while their peers gave up."""
        dead = {r for r, code in self.codes.items() if code < 0} | self.hung
        return {seats[r].node for r in dead}


class Supervisor:
    """Runs a job to its end.

    Args:
        words: of ``pretrain_gpt.py``, without --plan and --cluster; with --save and --load.
        policy: ``stop``, ``restart`` (the same plan) or ``replan`` (drop the nodes of ranks that died or hung).
        max_restarts: rounds after the first.
        grace: seconds for the other ranks to say what they saw and end, after the first one failed.
        scratch: folder for the cluster files of what is left.
    """

    def __init__(
        self,
        setup: Setup,
        words: Sequence[str],
        policy: str,
        planner: Planner,
        max_restarts: int,
        grace: float,
        scratch: Path,
        log: Callable[[str], None] = print,
    ) -> None:
        self.setup, self.words, self.policy, self.planner = setup, list(words), policy, planner
        self.max_restarts, self.grace, self.scratch, self.log = max_restarts, grace, scratch, log
        self._signalled: int | None = None

    def run(self) -> int:
        """Exit code of the job: 0, or that of the round that could not be mended."""
        from hetero_megatron.comm.store import JobStore

        store = JobStore()
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in range(self.max_restarts + 1):
                ended = self._round(store.host, store.port, number)
                code = _code(ended)
                if code in (0, USER_ERROR) or ended.stopped or self.policy == "stop":
                    return code
                if number < self.max_restarts:
                    self._mend(ended, number + 1)
            self.log(f"launcher: gave up after {self.max_restarts} restarts")
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        self._signalled = number

    def _round(self, host: str, port: int, number: int) -> Round:
        job = _Job(self.setup, self.words, host, port, number)
        ended, passed = Round(), False
        first_failure: float | None = None
        try:
            while len(ended.codes) < len(job.ranks):
                if self._signalled is not None and not passed:  # the ranks save, and end with 0
                    job.signal(self._signalled)
                    ended.stopped = passed = True
                for rank, code in job.poll().items():
                    ended.codes[rank] = code
                    if code and first_failure is None:
                        first_failure = time.monotonic()
                        self.log(f"launcher: rank {rank} ({self._where(rank)}) ended with {_say(code)}")
                if first_failure is not None and time.monotonic() - first_failure > self.grace:
                    ended.hung |= set(job.ranks) - ended.codes.keys()
                    for rank in sorted(ended.hung):
                        self.log(f"launcher: rank {rank} ({self._where(rank)}) did not end in {self.grace:g} s: killed")
                    break
                time.sleep(0.05)
        finally:
            job.kill()
        return ended

    def _where(self, rank: int) -> str:
        seat = self.setup.seats[rank]
        return f"{seat.node}, chip {seat.local}"

    def _mend(self, ended: Round, number: int) -> None:
        """Choose what the next round runs."""
        lost = ended.lost(self.setup.seats) if self.policy == "replan" else set()
        if not lost:
            self.log(f"launcher: round {number}: the same plan again, from the latest checkpoint")
            return
        seats, cluster = self._left(lost, number)
        plan = self.planner(seats, cluster) if seats else None
        if plan is None:
            raise UserError(
                f"no plan for the {len(seats)} ranks that are left without {', '.join(sorted(lost))}",
                field="--fallback-plan", accepted=f"a plan for at most {len(seats)} ranks",
            )  # fmt: skip
        self.setup = Setup(plan, tuple(seats), cluster)
        self.log(f"launcher: round {number}: without {', '.join(sorted(lost))}, {len(seats)} ranks left, plan {plan}")

    def _left(self, lost: set[str], number: int) -> tuple[list[Seat], Path | None]:
        seats = [s for s in self.setup.seats if s.node not in lost]
        if self.setup.cluster is None or not seats:
            return seats, None
        document = without_nodes(yaml.safe_load(self.setup.cluster.read_text()), lost)
        path = self.scratch / f"cluster-round-{number}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return seats, path


def _code(ended: Round) -> int:
    """A refusal wins over what it did to the peers; then whatever a rank itself died of."""
    codes = set(ended.codes.values())
    if not codes - {0} and not ended.hung:
        return 0
    own = sorted(c if c > 0 else 128 - c for c in codes - {0, PEER_ERROR})
    return USER_ERROR if USER_ERROR in own else own[0] if own else PEER_ERROR


def _say(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


class _Job:
    """The processes of one round. They die with the launcher."""

    def __init__(self, setup: Setup, words: Sequence[str], host: str, port: int, number: int) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        command = [sys.executable, "-c", _PROGRAM, "--plan", str(setup.plan), *words]
        command += ["--cluster", str(setup.cluster)] if setup.cluster is not None else []
        try:
            for rank, seat in enumerate(setup.seats):
                environment = {**os.environ, **_environment(setup, rank, seat, host, port, number)}
                self._processes[rank] = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)
        except BaseException:
            self.kill()
            raise

    @property
    def ranks(self) -> list[int]:
        return list(self._processes)

    def poll(self) -> dict[int, int]:
        found = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in found.items() if code is not None}

    def signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()


def _environment(setup: Setup, rank: int, seat: Seat, host: str, port: int, number: int) -> dict[str, str]:
    """What torchrun would set. The store is the launcher's, so ranks do not start one."""
    together = sum(s.node == seat.node for s in setup.seats)
    values = {
        "RANK": rank, "WORLD_SIZE": len(setup.seats), "LOCAL_RANK": seat.local, "LOCAL_WORLD_SIZE": together,
        "MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": number, "HETERO_NODE": seat.node,
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()} | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")
    }


def _die_with_parent() -> None:
    """Linux: SIGKILL to this process when the launcher dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def without_nodes(document: Mapping[str, Any], lost: set[str]) -> dict[str, Any]:
    """A cluster file's content without some nodes; the others keep their names, chips and links."""
    nodes: list[dict[str, Any]] = []
    names: dict[str, list[str]] = {}
    for group in document["nodes"]:
        count = int(group.get("count", 1))
        members = [group["name"]] if count == 1 else [f"{group['name']}-{i}" for i in range(count)]
        kept = [m for m in members if m not in lost]
        if kept == members:
            nodes.append(dict(group))
            names[group["name"]] = [group["name"]]
            continue
        nodes += [{**group, "name": m, "count": 1} for m in kept]
        names[group["name"]] = kept
    out = {**document, "nodes": nodes}
    if document.get("chips"):
        used = {node["chip"] for node in nodes}
        out["chips"] = {name: chip for name, chip in document["chips"].items() if name in used}
    links = document.get("links") or {}
    if links.get("pairs"):
        pairs = [
            {**pair, "between": [a, b]}
            for pair in links["pairs"]
            for a in names[pair["between"][0]]
            for b in names[pair["between"][1]]
        ]
        out["links"] = {**links, "pairs": pairs}
    return out
