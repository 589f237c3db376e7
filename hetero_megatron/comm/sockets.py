"""The connections of a rank's gloo groups, so that they can be cut: gloo has no other way to end a transfer whose peer
is alive and waits for somebody else. Linux only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


class Sockets:
    """Connections that were made while groups were created; those of stores and of other libraries are none of them."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}  # by descriptor, the kernel's name of the socket
        self._lock = threading.Lock()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What is connected inside belongs to these."""
        before = _open_sockets()
        try:
            yield
        finally:
            made = {number: name for number, name in _open_sockets().items() if before.get(number) != name}
            with self._lock:
                self._made |= made

    def cut(self) -> None:
        """End all of them, on both sides: every transfer that waits fails at once. From any thread, more than once."""
        with self._lock:
            now = _open_sockets()
            for number, name in self._made.items():
                if now.get(number) == name:
                    with suppress(OSError):
                        _shut(number)


def _shut(number: int) -> None:
    with socket.socket(fileno=os.dup(number)) as one:
        listens = one.family == socket.AF_UNIX or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens:  # gloo ends the process where its listener fails
            one.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[int, str]:
    found = {}
    for entry in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(DESCRIPTORS / entry)
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found
