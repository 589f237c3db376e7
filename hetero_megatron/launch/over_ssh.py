"""``launch --via ssh``: one torchrun per host, watched from here; what one of them ends, ends everywhere."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from hetero_megatron.cluster import Cluster
from hetero_megatron.environment.launcher import SECRET
from hetero_megatron.launch.checks import CONNECT_SECONDS, connect_all, log_files
from hetero_megatron.launch.connection import LEASE, SSH, Connection, prefixed
from hetero_megatron.launch.hosts import directory_of, hosts_of, torchrun
from hetero_megatron.training.exit import ECHO_SECONDS, handled, note_hang_up

LOST = 3  # exit code where a host is gone
TEE = ("--tee", "3")  # what ranks print goes through torchrun, which puts PREFIX before each line
# What they print is passed on at once: torchrun would keep it until a buffer is full.
PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ", "PYTHONUNBUFFERED": "1"}


class SshLaunch:
    """
    Args:
        ssh: the words of ssh with its options, or of a command that takes a host and a shell line like it.
        grace: seconds that the other hosts have to end after one of them ended with an error.
        log_dir: where each host's output goes, beside the terminal.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        ssh: str = SSH,
        max_restarts: int = 0,
        grace: float = 30.0,
        log_dir: str | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        lease: float = LEASE,
    ) -> None:
        self.cluster, self.command, self.ssh, self.max_restarts = cluster, list(command), ssh, max_restarts
        self.grace, self.log_dir, self.connect_seconds, self.lease = grace, log_dir, connect_seconds, lease
        self._signalled: int | None = None
        self._since, self._again = 0.0, False

    def run(self) -> int:
        """Exit code: 0, the first failure's, 3 for a lost host, or 128 + the signal that ended it."""
        old_handlers = {s: signal.signal(s, self._on_signal) for s in handled(("SIGTERM", "SIGINT", "SIGHUP"))}
        try:
            with ExitStack() as stack:
                return self._run(stack)
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        note_hang_up(number)
        if self._signalled is None:
            self._signalled, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ECHO_SECONDS:  # terminals and `timeout` send one signal twice
            self._again = True

    def _run(self, stack: ExitStack) -> int:
        hosts, lock = hosts_of(self.cluster), threading.Lock()
        files = log_files(self.log_dir, [host.node for host in hosts])
        logs = {node: stack.enter_context(path.open("w", encoding="utf-8")) for node, path in files.items()}
        connections = connect_all(
            lambda: [
                Connection(host, self.cluster, self.ssh, prefixed(host, lock, logs.get(host.node)), self.lease)
                for host in hosts
            ],
            self.cluster, self.connect_seconds,
        )  # fmt: skip
        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        try:
            for connection in connections:
                host = connection.host
                words = torchrun(host, hosts, self.cluster, self.command, self.max_restarts, TEE)
                variables = {SECRET: secret, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, int(self.grace)))}
                connection.run(words, {**PREFIX, **host.environment, **variables}, directory_of(host))
            return self._watch(connections)
        finally:
            for connection in connections:
                connection.close()
            for connection in connections:
                connection.join()

    def _watch(self, connections: Sequence[Connection]) -> int:
        code, passed = 0, False
        deadline: float | None = None
        while running := [c for c in connections if not c.ended]:
            if self._again:
                _say("a second signal: all ranks are killed")
                break
            if self._signalled is not None and not passed:
                passed = True
                _say(f"{signal.Signals(self._signalled).name}: to all ranks; a second one kills them")
                for connection in running:
                    connection.send(signal=self._signalled)
            for connection in running:
                connection.beat()
                if reason := connection.lost:
                    _say(f"{connection.host.node} is lost: {reason}")
                    connection.failed, code = reason, code or LOST
            code = code or next((_failure(c) for c in connections if c.ended and _failure(c)), 0)
            if code and deadline is None:
                failed = next((c for c in connections if c.ended and _failure(c)), None)
                if failed is not None:
                    _say(f"{failed.host.node} ended with {failed.failed or f'exit code {failed.exit_code}'}")
                deadline = time.monotonic() + self.grace
            if deadline is not None and time.monotonic() > deadline:
                _say(f"{', '.join(c.host.node for c in running)} did not end in {self.grace:g} s: killed")
                break
            time.sleep(0.05)
        return 128 + self._signalled if self._signalled is not None and (code or self._again) else code


def _failure(connection: Connection) -> int:
    if connection.failed:
        return LOST
    code = connection.exit_code or 0
    return code if code >= 0 else 128 - code


def _say(text: str) -> None:
    print(f"launcher: {text}", file=sys.stderr, flush=True)
