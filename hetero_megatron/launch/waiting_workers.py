"""torchrun's workers that are not their host's agent (``launch.torchrun``): they wait for its end. No torch."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from contextlib import suppress

START_SECONDS = 120.0  # that the agent may take to start
LOOK_SECONDS = 0.1


class AgentEnd:
    """Where the other workers of a host hear how its agent ended: a socket of this machine, which is named after the
    torchrun that has started them. They need no network, which may be cut.

    Args:
        others: workers that wait.
    """

    def __init__(self, restarts: int, others: int) -> None:
        self._others = others
        self._waiting: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(_name(restarts))
        self._server.listen(max(1, others))
        threading.Thread(target=self._accept, daemon=True, name="workers").start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._waiting.append(self._server.accept()[0])

    def tell(self, code: int, seconds: float = 30.0) -> None:
        """Once all of them are there, or after so long."""
        end = time.monotonic() + seconds
        while len(self._waiting) < self._others and time.monotonic() < end:
            time.sleep(0.02)
        for connection in list(self._waiting):
            with suppress(OSError):
                connection.sendall(bytes([code & 255]))


def await_agent(restarts: int, lost: int) -> int:
    """A worker that is no agent: until this host's is at its end, which it is told before; ``lost``: exit code where
    the agent was killed, or never came."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # which the agent gets, too
        signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(_name(restarts))
            except OSError:
                time.sleep(LOOK_SECONDS)
                continue
            if _user(connection) != os.getuid():
                break
            with suppress(OSError):
                if code := connection.recv(1):
                    return code[0]
            break
    return lost


def _name(restarts: int) -> str:
    return f"\0hetero-megatron/{os.getuid()}/{os.getppid()}/{restarts}"


def _user(connection: socket.socket) -> int:
    """Of the process at the other end."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
