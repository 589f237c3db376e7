"""The connections of a rank's gloo groups, so that they can be cut when the job goes on without these groups: gloo does
not give them back while transfers are under way. Linux only."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


class Sockets:
    """Connections of this process that are younger than this object: those of the groups made since, for stores are
    connected before and nothing else in a rank opens any."""

    def __init__(self) -> None:
        self._older = _open_sockets()

    def cut(self) -> None:
        """End all of them, on both sides: transfers that wait fail, and gloo closes what it had open."""
        for number, name in _open_sockets().items():
            if self._older.get(number) != name:
                with suppress(OSError):
                    _shut(number)


def _shut(number: int) -> None:
    with socket.socket(fileno=os.dup(number)) as one:
        network = one.family in (socket.AF_INET, socket.AF_INET6)
        listens = network and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if network and not listens:  # gloo ends the process where its listener fails
            one.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[int, str]:
    found = {}
    for entry in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(DESCRIPTORS / entry)
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found
