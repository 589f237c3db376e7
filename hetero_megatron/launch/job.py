"""The ranks of one round of a supervised job on the hosts of its cluster file, through ssh or a command like it."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.environment.launcher import SECRET, SUPERVISED
from hetero_megatron.environment.network import address_towards
from hetero_megatron.errors import UserError
from hetero_megatron.launch.checks import CONNECT_SECONDS, check_facts, silent_hosts, wait_for_facts
from hetero_megatron.launch.connection import LEASE, SSH, Connection, prefixed
from hetero_megatron.launch.hosts import Host, directory_of, hosts_of
from hetero_megatron.launch.jobs import Setup, rank_command
from hetero_megatron.launch.remote import ENDED_BY_AGENT

AGENT = "hetero_megatron.launch.elastic"
GONE = -9  # exit code of the ranks of a host that is gone: it lost them as if they had been killed
PATIENCE = 10.0  # seconds that the ranks of other hosts have to end, once a host is gone
_PRINTING = threading.Lock()


@dataclass(frozen=True)
class Access:
    """How the launcher gets to its hosts, and they to it.

    Args:
        address: of this launcher; empty: the one from which the first host is reached.
    """

    ssh: str = SSH
    address: str = ""
    connect_seconds: float = CONNECT_SECONDS
    lease: float = LEASE

    def connect(self, host: Host, cluster: Cluster) -> Connection:
        return Connection(host, cluster, self.ssh, prefixed(host, _PRINTING), self.lease)

    def address_towards(self, host: Host) -> str:
        """Where the ranks find the launcher's store."""
        if self.address:
            return self.address
        try:
            return address_towards(host.address)
        except OSError as error:
            raise UserError(
                f"no way to it: {error.strerror or error}", field=host.node, value=host.address,
                accepted="an address that this host can reach, or --address with this host's own",
            ) from None  # fmt: skip


class HostsJob:
    """
    Args:
        setup: with a cluster file.
        number: of the round.
        diagnoses: where what ranks say of lost peers is collected.

    Raises:
        UserError: in the first round, a host does not answer or does not fit.
    """

    def __init__(
        self, setup: Setup, words: Sequence[str], number: int, access: Access, diagnoses: Path, grace: float
    ) -> None:
        assert setup.cluster is not None, "the command line refuses hosts without a cluster"
        self._diagnoses, self._gone_at = diagnoses, 0.0
        self._codes: dict[int, int] = {}
        cluster = load_cluster(setup.cluster)
        hosts = hosts_of(cluster)
        self.ranks = list(range(len(setup.seats)))
        self._connections: list[Connection] = []
        try:
            store_at = access.address_towards(hosts[0])
            self._connections = [access.connect(host, cluster) for host in hosts]
            missing = self._wait(access, cluster, number)
            if missing:
                for connection in missing:
                    self._lose(connection)
                return
            check_facts({c.host.node: c.facts or {} for c in self._connections}, self._connections, cluster)
            self._start(setup, words, number, cluster, store_at, grace)
        except BaseException:
            self.kill()
            raise

    def _wait(self, access: Access, cluster: Cluster, number: int) -> list[Connection]:
        """Until all hosts answered: those that did not, in a later round than the first."""
        if number == 0:
            wait_for_facts(self._connections, cluster, access.connect_seconds)
            return []
        return silent_hosts(self._connections, access.connect_seconds, patient=True)

    def _start(
        self, setup: Setup, words: Sequence[str], number: int, cluster: Cluster, address: str, grace: float
    ) -> None:
        self._store = JobStore(address)
        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        for connection in self._connections:
            host = connection.host
            settings = {
                "node": host.index, "nodes": len(self._connections), "chips": host.chips, "host": self._store.host,
                "port": self._store.port, "round": number, "run": secrets.token_hex(8),
                "command": _on_host(rank_command(setup, words), host),
            }  # fmt: skip
            environment = {
                "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **host.environment, SUPERVISED: "1", SECRET: secret,
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, int(grace))),
            }  # fmt: skip
            connection.run([host.python, "-m", AGENT, json.dumps(settings)], environment, directory_of(host))

    def poll(self) -> dict[int, int]:
        for connection in self._connections:
            connection.beat()
            self._read(connection)
            if connection.host.first_rank in self._codes:
                continue
            if connection.lost:
                self._lose(connection)
            elif connection.ended:  # an agent that says nothing of its ranks
                self._take(connection.host, connection.exit_code or 1)
        if self._gone_at and time.monotonic() - self._gone_at > PATIENCE:
            for connection in self._connections:
                self._take(connection.host, ENDED_BY_AGENT)
        return dict(self._codes)

    def _read(self, connection: Connection) -> None:
        while connection.messages:
            message = connection.messages.pop(0)
            if "ranks" in message:
                self._codes |= {int(rank): int(code) for rank, code in message["ranks"].items()}
            elif "file" in message and Path(message["file"]).name == message["file"]:
                with suppress(OSError):
                    self._diagnoses.mkdir(parents=True, exist_ok=True)
                    part = self._diagnoses / f".{message['file']}"
                    part.write_text(message["text"], encoding="utf-8")
                    part.replace(self._diagnoses / message["file"])

    def _lose(self, connection: Connection) -> None:
        print(f"launcher: {connection.host.node} is lost: {connection.lost or 'no answer'}", flush=True)
        self._take(connection.host, GONE)
        self._gone_at = self._gone_at or time.monotonic()

    def _take(self, host: Host, code: int) -> None:
        for rank in host.ranks:
            self._codes.setdefault(rank, code)

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None:
        for connection in self._connections:
            connection.send(signal=number)

    def kill(self) -> None:
        for connection in self._connections:
            connection.close()
        for connection in self._connections:
            connection.join()
            self._read(connection)


def _on_host(command: Sequence[str], host: Host) -> list[str]:
    """The command of a rank with the interpreter of its host."""
    return [host.python, *command[1:]]


class Returned:
    """Looks for hosts that were lost and are back: they answer, and every host of the job answers them.

    Args:
        interval: seconds between two looks.
    """

    def __init__(self, access: Access, interval: float) -> None:
        self.access, self.interval = access, interval
        self._next = 0.0
        self._asked: dict[str, Connection] = {}

    def look(self, first: Path, lost: set[str], present: set[str]) -> set[str]:
        """Those of ``lost`` that are back; to be called often.

        Args:
            first: cluster file in which all nodes are.
            present: nodes of the running job.
        """
        now = time.monotonic()
        if not self._asked and now >= self._next:
            cluster = load_cluster(first)
            addresses = [host.address for host in hosts_of(cluster) if host.node in present]
            for host in hosts_of(cluster):
                if host.node in lost:
                    connection = self.access.connect(host, cluster)
                    connection.send(dial=addresses)
                    self._asked[host.node] = connection
            self._next = now + self.interval
        returned = set()
        for node, connection in list(self._asked.items()):
            reached = next((m["reached"] for m in connection.messages if "reached" in m), None)
            if reached is not None and len(reached) == len(present):
                returned.add(node)
            if reached is not None or connection.lost or now > self._next:
                connection.close()
                connection.join(1)
                del self._asked[node]
        return returned

    def close(self) -> None:
        for connection in self._asked.values():
            connection.close()
            connection.join(1)
        self._asked.clear()
