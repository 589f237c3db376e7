"""A connection from the launcher to one host: ssh (or a command like it) with ``launch.remote`` at the other end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import printable
from hetero_megatron.launch.hosts import Host
from hetero_megatron.launch.remote import BEATS, MARK

# BatchMode: no password is asked for. The keep-alive ends ssh 15 s after a host is gone.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
LEASE = 30.0  # seconds without a word after which either side takes the other for lost
REMOTE = "hetero_megatron.launch.remote"

Show = Callable[[str, bool], None]  # (line, whether it is of standard error)


def ssh_words(ssh: str, host: Host, cluster: Cluster, remote: str) -> list[str]:
    """The command that runs ``remote``, a shell line, on a host. ``--`` ends the options of ssh, also where it is
    started by another program (``sshpass -e ssh``); commands like it are given the host and the line alone."""
    launch, words = cluster.launch, shlex.split(ssh)
    port = ["-p", str(launch.port)] if launch.port else []
    target = f"{launch.user}@{host.address}" if launch.user else host.address
    is_ssh = any(os.path.basename(word) in ("ssh", "slogin", "autossh") for word in words)
    return [*words, *port, *(["--"] if is_ssh else []), target, remote]


def remote_line(python: str, module: str = REMOTE) -> str:
    """The shell line that starts a module on a host with its interpreter."""
    return f"exec {shlex.quote(python)} -m {module}"


class Connection:
    """To one host. Everything that it says arrives in threads; the caller polls.

    Args:
        show: is given every line that the command prints.
        lease: see ``LEASE``.

    Attributes:
        facts: what the host said of itself; None: nothing yet.
        messages: further lines for the launcher, in order.
        exit_code: of the command; None: it has not ended, or the connection ended before it did.
        errors: the last lines of standard error, before the command was started (ssh's own, or the shell's).
    """

    def __init__(self, host: Host, cluster: Cluster, ssh: str, show: Show, lease: float = LEASE) -> None:
        self.host, self._show, self.lease = host, show, lease
        self.facts: dict[str, Any] | None = None
        self.messages: list[dict[str, Any]] = []
        self.exit_code: int | None = None
        self.failed = ""
        self.errors: list[str] = []
        self._started = False
        self._heard = self._beat = time.monotonic()
        self._process = subprocess.Popen(
            ssh_words(ssh, host, cluster, remote_line(host.python)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        streams = ((self._process.stdout, False), (self._process.stderr, True))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for thread in self._readers:
            thread.start()

    def _read(self, stream: IO[bytes], error: bool) -> None:
        for raw in stream:
            self._heard = time.monotonic()
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if line.startswith(MARK) and not error:
                with suppress(ValueError):
                    self._take(json.loads(line.removeprefix(MARK)))
                    continue
            if not self._started and error:
                self.errors = [*self.errors[-9:], line]
            else:
                self._show(printable(line), error)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "facts" in message:
            self.facts = dict(message["facts"])
        elif "exit" in message:
            self.exit_code = int(message["exit"])
        elif "failed" in message:
            self.failed = str(message["failed"])
        elif "beat" not in message:
            self.messages.append(dict(message))

    def run(self, words: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        """Start the command."""
        self._started = True
        self.send(run=list(words), environment=dict(environment), directory=directory, lease=self.lease)

    def send(self, **message: Any) -> None:
        with suppress(OSError, ValueError):  # a host that is gone is noticed by ``lost``
            assert self._process.stdin is not None
            self._process.stdin.write((json.dumps(message) + "\n").encode())
            self._process.stdin.flush()

    def beat(self) -> None:
        """To be called often: tells the host now and then that this launcher lives."""
        now = time.monotonic()
        if now - self._beat > self.lease / BEATS:
            self._beat = now
            self.send(beat=True)

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or bool(self.failed)

    @property
    def lost(self) -> str:
        """Why nothing more will come from this host; empty while something may."""
        if self.ended:
            return ""
        code = self._process.poll()
        if code is not None:
            for thread in self._readers:
                thread.join(timeout=2)
            if self.ended:
                return ""
            last_error = self.errors[-1] if self.errors else ""
            return last_error or (f"the connection ended with exit code {code}" if code else "the connection ended")
        if time.monotonic() - self._heard > self.lease:
            return f"no word for {self.lease:g} s"
        return ""

    def close(self) -> None:
        """The host ends whatever still runs there."""
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def join(self, seconds: float = 15.0) -> None:
        """After :meth:`close`: wait until the host has done so; then the connection itself is ended."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._readers:
            thread.join(timeout=2)


def prefixed(host: Host, lock: threading.Lock, log: IO[str] | None = None) -> Show:
    """Prints lines with the host's name before them, whole, and into ``log`` without it."""

    def show(line: str, error: bool) -> None:
        with lock, suppress(OSError):
            stream = sys.stderr if error else sys.stdout
            stream.write(f"[{host.node}] {line}{os.linesep}")
            stream.flush()
            if log is not None:
                log.write(line + "\n")
                log.flush()

    return show
