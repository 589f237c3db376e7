"""Why a rank does not answer: each rank listens, and a rank that waited in vain connects to it.

A timeout looks the same whether a process died, hangs, or is cut off. A TCP connection tells them apart: refused: the
node is up and the process is gone; accepted without a greeting: the process hangs (the kernel accepts for it); no
connection: the node or the network is down.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ANSWERS, HANGS, GONE, UNREACHABLE = "answers", "hangs", "is gone", "cannot be reached"
PATIENCE = 5.0  # seconds for a connection, and for an answer on it: a lost first packet is sent again after 1 and 3 s
AT_MOST = 64  # most ranks that are contacted, concurrently
# Errors of connect when packets are lost; other errors (e.g. no file descriptors left) say nothing about the peer.
_NO_WAY = {
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN,
    errno.EINVAL,  # Linux, for a route that is a black hole
    errno.EACCES, errno.EPERM,  # prohibited by a route or a filter
}  # fmt: skip


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and the greeting by which it is recognised."""

    host: str
    port: int
    greeting: str


class Beacon:
    """Greets every connection, in a daemon thread; never reads.

    Raises:
        OSError: it cannot listen at ``host``.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=256)
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_hex(8))
        threading.Thread(target=self._serve, daemon=True, name="beacon").start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with suppress(OSError), peer:
                peer.sendall(self.address.greeting.encode())

    def close(self) -> None:
        with suppress(OSError):  # shutdown wakes accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def own_address(towards: str) -> str:
    """This host's address towards another host (nothing is sent). OSError: no route, or no such host."""
    problem = OSError(f"no address of {towards}")
    for family, kind, protocol, _, target in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:  # a name may have an IPv6 address where there is no IPv6
            problem = error
    raise problem


def dial(address: Address, patience: float = PATIENCE) -> str | None:
    """State of the rank that listened at the address; None: unknown."""
    expected = address.greeting.encode()
    try:
        peer = socket.create_connection((address.host, address.port), timeout=patience)
    except TimeoutError:
        return UNREACHABLE
    except (ConnectionRefusedError, ConnectionResetError):
        return GONE
    except OSError as error:
        return UNREACHABLE if error.errno in _NO_WAY else None
    received = b""
    with peer:
        try:
            while len(received) < len(expected) and (received_part := peer.recv(len(expected) - len(received))):
                received += received_part
        except TimeoutError:
            return HANGS
        except OSError:  # it ended while we spoke
            return GONE
    return ANSWERS if hmac.compare_digest(received, expected) else GONE  # another program has its port now


class Connectivity:
    """All ranks' addresses, exchanged at the start, because after a failure there may be nobody to ask.

    Args:
        addresses: by rank; None where a rank does not listen.
        beacon: this rank's own, kept alive.
        cut: ranks that are currently unreachable by emulation.
    """

    def __init__(
        self,
        rank: int = 0,
        addresses: Sequence[Address | None] = (),
        beacon: Beacon | None = None,
        cut: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self.rank, self.beacon, self.cut = rank, beacon, cut
        self._addresses = {r: a for r, a in enumerate(addresses) if a is not None and r != rank}

    def look(self, peers: Iterable[int], patience: float = PATIENCE) -> dict[int, str]:
        """State of ``peers`` and of some other ranks, so that the launcher learns who can reach whom."""
        dialled = self._choose([p for p in peers if p in self._addresses], self._addresses)
        if not dialled:
            return {}
        return {**self._dial(dialled, patience), **dict.fromkeys(set(self.cut()) & self._addresses.keys(), UNREACHABLE)}

    def gone(self, peers: Sequence[int], turn: int) -> list[int]:
        """Those of ``peers``, of which this rank is none, whose processes have ended: of ``AT_MOST`` of them, others in
        every turn (0, 1, 2, …) and on every rank."""
        start = (self.rank + turn * AT_MOST) % len(peers)
        peers_dialled = [*peers[start:], *peers[:start]][:AT_MOST]
        answers = self._dial([p for p in peers_dialled if p in self._addresses], PATIENCE)
        return [peer for peer, word in answers.items() if word == GONE]

    def _dial(self, ranks: Sequence[int], patience: float) -> dict[int, str]:
        """State of ranks with known addresses, as far as it can be found out."""
        if not ranks:
            return {}
        with ThreadPoolExecutor(len(ranks)) as pool:
            states = pool.map(lambda r: dial(self._addresses[r], patience), ranks)
            return {rank: word for rank, word in zip(ranks, states, strict=True) if word is not None}

    @staticmethod
    def _choose(peers: list[int], addresses: dict[int, Address]) -> list[int]:
        """The peers, then one rank of every host, then the rest."""
        hosts = {address.host: rank for rank, address in reversed(addresses.items())}
        return list(dict.fromkeys([*peers, *hosts.values(), *addresses]))[:AT_MOST]


def listen(towards: str, one_host: bool = False) -> Beacon | None:
    """A beacon at an address that peers can reach; None: not possible, which must not stop training.

    Args:
        towards: the rendezvous host; one_host: all ranks are on this one.
    """
    try:
        return Beacon("127.0.0.1" if one_host else own_address(towards))
    except OSError:
        return None


def explain(peers: Sequence[int], states: Mapping[int, str]) -> str:
    """A clause on the state of the ranks that were waited for; others are only mentioned if they are cut off."""
    by_word: dict[str, list[int]] = {}
    for rank, word in sorted(states.items()):
        if rank in peers or word == UNREACHABLE:
            by_word.setdefault(word, []).append(rank)
    if not by_word:
        return "the peer died, hangs, or runs another plan"
    parts = [f"rank {_listed(by_word[w])} {w}" for w in (UNREACHABLE, GONE, HANGS, ANSWERS) if w in by_word]
    if by_word.keys() == {ANSWERS}:
        parts.append("it waits for somebody else, is busy, or runs another plan")
    return "; ".join(parts)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")

DESCRIPTORS = Path("/proc/self/fd")


class Sockets:
    """Connections of this process that are younger than this object: those of the groups made since, for stores are
    connected before and nothing else in a rank opens any."""

    def __init__(self) -> None:
        self._older = _open_sockets()

    def connections(self) -> dict[int, str]:
        """Those that are open now, by file descriptor, as ``/proc`` names them; none that only listens."""
        return {n: name for n, name in _open_sockets().items() if self._older.get(n) != name and _connects(n)}

    def cut(self) -> None:
        """End all of them, on both sides: transfers that wait fail, and gloo closes what it had open."""
        for number in self.connections():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connects(number: int) -> bool:
    """Whether a socket is one end of a connection over the network: gloo ends the process where its listener fails."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
        network = found.family in (socket.AF_INET, socket.AF_INET6)
        return network and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return False


def _open_sockets() -> dict[int, str]:
    sockets = {}
    for entry in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(DESCRIPTORS / entry)
            if name.startswith("socket:"):
                sockets[int(entry)] = name
    return sockets
