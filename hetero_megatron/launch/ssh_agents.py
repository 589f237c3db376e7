"""The agents of an elastic job on the hosts of its cluster file, started through ssh or a command like it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hetero_megatron.cluster import Cluster
from hetero_megatron.environment.launcher import SECRET
from hetero_megatron.launch.attached import Attached
from hetero_megatron.launch.checks import connect_all
from hetero_megatron.launch.connection import Connection
from hetero_megatron.launch.hosts import directory_of, hosts_of
from hetero_megatron.launch.job import GONE, Access
from hetero_megatron.launch.jobs import Seat
from hetero_megatron.launch.joining import JobFile

AGENT = "hetero_megatron.launch.joining"
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
LAST_WORD_SECONDS = 1.0  # after an agent's end: how its ranks ended, it has told the job's store before


class SshAgents:
    """See :class:`~hetero_megatron.launch.attached.Agents`.

    Args:
        plan, cluster_file: as the hosts find them from where their commands start.
        words: flags of pretrain_gpt.py.
        program: what starts a rank here; there it is begun by the host's interpreter.

    Raises:
        UserError: there is no way to the first host.
    """

    def __init__(
        self, access: Access, cluster: Cluster, plan: Path, cluster_file: Path, words: Sequence[str],
        program: Sequence[str],
    ) -> None:  # fmt: skip
        self._access, self._cluster, self._program = access, cluster, program
        self._job = JobFile("", 0, "", str(plan), str(cluster_file), list(words), "")
        self.address: str | None = access.address_towards(hosts_of(cluster)[0])
        self._connections: list[Connection] = []
        self._codes: dict[str, int] = {}
        self._ended_at: dict[str, float] = {}

    def open(self, host: str, port: int, secret: str) -> None:
        """UserError: a host does not answer, or does not fit."""
        hosts, access, cluster = hosts_of(self._cluster), self._access, self._cluster
        self._connections = connect_all(
            lambda: [access.connect(each, cluster) for each in hosts], cluster, access.connect_seconds
        )
        for connection in self._connections:
            there = connection.host
            directory = directory_of(there)
            settings = asdict(replace(self._job, host=host, port=port, folder=directory))
            del settings["secret"]  # not on a command line
            program = [there.python, *self._program[1:]]
            argument = json.dumps({"job": settings, "node": there.node, "chips": there.chips, "program": program})
            environment = {**_VARIABLES, **there.environment, SECRET: secret}
            connection.run([there.python, "-m", AGENT, argument], environment, directory)

    def lost(self) -> dict[str, int]:
        for connection in self._connections:
            connection.beat()
            node = connection.host.node
            if node in self._codes:
                continue
            if reason := connection.lost:
                print(f"launcher: {node} is lost: {reason}", flush=True)
                self._codes[node] = GONE
            elif connection.ended:
                ended_at = self._ended_at.setdefault(node, time.monotonic())
                if time.monotonic() - ended_at > LAST_WORD_SECONDS:
                    self._codes[node] = connection.exit_code or (1 if connection.failed else 0)
        return dict(self._codes)

    def close(self, problem: str = "") -> None:
        end = time.monotonic() + LAST_WORD_SECONDS  # agents hear from the store that the job is over
        while any(c.facts and not c.ended and not c.lost for c in self._connections) and time.monotonic() < end:
            time.sleep(0.02)
        for connection in self._connections:
            connection.close()
        for connection in self._connections:
            connection.join()


def attach(
    access: Access, cluster: Cluster, plan: Path, cluster_file: Path, words: Sequence[str], program: Sequence[str]
) -> Attached:
    """All hosts of the cluster file; the launcher, which may be one of them, starts no ranks itself."""
    seats = tuple(Seat(rank.node, rank.local) for rank in cluster.ranks)
    return Attached(seats, range(0), SshAgents(access, cluster, plan, cluster_file, words, program))
