"""The store of a job, and the records that ranks leave in it."""

from __future__ import annotations

import errno
import hmac
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist

from hetero_megatron.comm.group import decode, encode
from hetero_megatron.environment.launcher import (
    SECRET,
    LauncherEnvironment,
    is_loopback,
)
from hetero_megatron.errors import UserError

LOOK_SECONDS = 0.5  # for which an answer is awaited at a time


class JobStore:
    """A TCP store on this host, at ``host``; ranks of round r use keys under ``round/r`` (see ``start_comm``).

    Raises:
        UserError: that is no address of this host.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            listener = socket.create_server((host, 0), backlog=4096)
        except OSError as error:
            problem = f"this host cannot listen there ({(error.strerror or str(error)).split(' (')[0]})"
            raise UserError(problem, field="--address", value=host, accepted="an address of this host") from None
        self.host, self.port = host, int(listener.getsockname()[1])
        self._store = serve(listener, host, timedelta(seconds=30))

    def keys(self, prefix: str) -> dist.Store:
        """For this process's own records."""
        return dist.PrefixStore(prefix, self._store)


def serve(listener: socket.socket, host: str, timeout: timedelta) -> dist.TCPStore:
    """A store in this process on the socket ``listener``, which it takes over; torch's own would listen on all
    interfaces."""
    port = int(listener.getsockname()[1])
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int, timeout: timedelta, prefix: str) -> dist.Store:
    """A client of a store, for keys under ``prefix``.

    Raises:
        RuntimeError: nobody answers there in time.
    """
    return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=timeout))


def await_listener(host: str, port: int, timeout: timedelta) -> None:
    """Until somebody listens there. torch's own client may try for twice its time-out.

    Raises:
        RuntimeError: nobody does in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(f"nobody listens there ({error.strerror or error})") from None
            time.sleep(0.2)


class StoreGone(RuntimeError):
    """Nobody answers where the job's store was."""


class LastingStore:
    """A client of a store whose connection is made anew where it breaks, so that a hiccup of the network is no loss.
    For one thread at a time.

    Args:
        seconds: for which nobody has to answer before the store counts as gone; at once where its host says that nobody
            listens there any more.
    """

    def __init__(self, host: str, port: int, seconds: float, prefix: str) -> None:
        self._host, self._port, self._seconds, self._prefix = host, port, seconds, prefix
        self._connection: _Connection | None = None

    def set(self, key: str, value: str) -> None:
        def write(store: dist.Store) -> None:
            store.set(key, value)
            store.check([key])  # nothing answers a set: what is asked behind it, over one connection, says that it came

        self._ask(write)

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda store: store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(lambda store: store.multi_get(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(lambda store: store.compare_set(key, expected, desired))

    def _ask(self, request: Callable[[dist.Store], Any]) -> Any:
        """Every request may be made twice: what it writes is then there already.

        Raises:
            StoreGone.
        """
        end = time.monotonic() + self._seconds
        while True:
            try:
                self._connection = self._connection or _Connection(self._host, self._port, self._seconds, self._prefix)
                return self._connection.ask(request)
            except (RuntimeError, OSError) as error:
                self._connection = None
                if isinstance(error, ConnectionRefusedError) or time.monotonic() >= end:
                    place, reason = f"{self._host}:{self._port}", str(error).splitlines()[0]
                    raise StoreGone(f"the launcher does not answer at {place} any more ({reason})") from None
            time.sleep(0.2)


class _Connection:
    """To a store. A thread makes the requests: torch's wait for ever where a host is frozen, or its network is lost."""

    def __init__(self, host: str, port: int, seconds: float, prefix: str) -> None:
        self._seconds = seconds
        self._requests, self._answers = SimpleQueue[Any](), SimpleQueue[Any]()
        ends = (self._requests, self._answers)  # not self, which ends the thread when nobody needs it any more
        threading.Thread(target=_serve_requests, args=(host, port, seconds, prefix, *ends), daemon=True).start()

    def ask(self, request: Callable[[dist.Store], Any]) -> Any:
        """What ``request`` gives, or raises; TimeoutError: nobody answers. Then the connection is of no use."""
        self._requests.put(request)
        pauses = max(1, math.ceil(self._seconds / LOOK_SECONDS))
        for _ in range(pauses):  # not by the clock, which goes on while this process is stopped
            with suppress(Empty):
                error, answer = self._answers.get(timeout=min(LOOK_SECONDS, self._seconds))
                if error is not None:
                    raise error
                return answer
        raise TimeoutError(f"no answer for {self._seconds:g} s")

    def __del__(self) -> None:
        self._requests.put(None)


def _serve_requests(
    host: str, port: int, seconds: float, prefix: str, requests: SimpleQueue[Any], answers: SimpleQueue[Any]
) -> None:
    """The thread of a connection: (error, answer) for each request, until the first error, or until one is None."""
    store: dist.Store | None = None
    while (request := requests.get()) is not None:
        try:
            if store is None:  # first a look: torch's own client tries for long, and logs what it sees
                socket.create_connection((host, port), timeout=5.0).close()
                store = connect_store(host, port, timedelta(seconds=seconds), prefix)
            answers.put((None, request(store)))
        except Exception as error:
            answers.put((error, None))
            return


class KeyStore(Protocol):
    """What records need of a store; requests raise RuntimeError where it is gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def open_listener(launcher: LauncherEnvironment) -> socket.socket:
    """The socket of rank 0's store: on the loopback interface if all ranks are on this host, else on all interfaces.

    Raises:
        OSError: the port is taken.
    """
    host, port = launcher.rendezvous_address
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=4096)
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    except (OSError, ValueError) as error:  # a host without IPv6
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=4096)


@dataclass(frozen=True)
class Records:
    """Typed values in a store, by key; ``scope``: what they are valid for, e.g. the round of the job."""

    store: KeyStore
    secret: bytes
    scope: str

    def seal(self, key: str, value: object) -> str:
        """The stored form of a value: authentication code over scope, key and value, a space, JSON."""
        text = encode(value)
        return f"{self._code(key, text)} {text.decode()}"

    def set(self, key: str, value: object) -> None:
        self.store.set(key, self.seal(key, value))

    def open(self, key: str, data: bytes, kind: Any) -> Any:
        """The value stored under ``key``.

        Raises:
            UserError: it was not written by a rank of this job.
        """
        code, _, text = data.partition(b" ")
        if not hmac.compare_digest(code, self._code(key, text).encode()):
            difference = f"was not written with this job's {SECRET}" if self.secret else f"was written with a {SECRET}"
            accepted = f"the same {SECRET} on all ranks, and a rendezvous store that nobody else reaches"
            raise UserError(f"the record {key} {difference}", field="rendezvous store", accepted=accepted)
        return decode(text, kind, f"whoever wrote {key} into the rendezvous store")

    def get(self, keys: Sequence[str], kind: Any) -> list[Any]:
        """The values of keys that exist."""
        values = self.store.multi_get(list(keys)) if keys else []
        return [self.open(key, data, kind) for key, data in zip(keys, values, strict=True)]

    def _code(self, key: str, text: bytes) -> str:
        """Authentication code; without a secret it is keyless, and the record only as trustworthy as the network."""
        if not self.secret:
            return "-"
        return hmac.new(self.secret, b"\0".join((self.scope.encode(), key.encode(), text)), "sha256").hexdigest()
