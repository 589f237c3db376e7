"""Samples from another process of the same host, over a Unix socket: one rank reads a stream, the others ask it.

A client asks for a sample when it needs it, and a thread per client answers, so neither takes part in collectives. A
request is two numbers (which data set, which sample); the answer is arrays or a message, and nothing received is
executed. The socket is in a directory of this user's own, and gone once the clients are connected.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np

from hetero_megatron.comm.group import Refusal, decode, encode
from hetero_megatron.data.sample import Dataset, Sample
from hetero_megatron.errors import UserError

WHERE = "environment"
LONGEST_SOCKET_PATH = 100  # bytes; Linux takes 107, others a little less
_REQUEST = struct.Struct("<Bq")  # number of the data set, index of the sample
_SAMPLE = struct.Struct("<qq?")  # tokens, documents, whether there is a loss mask
_FOUND, _REFUSED, _FAILED, _FAREWELL = b"s", b"r", b"f", b"x"  # first byte of an answer
_FAREWELL_SECONDS = 1  # that a client which does not read may hold up the end of the server


def socket_folder() -> str:
    """Where sockets can be made: the folder for temporary files, or /tmp if its path is too long for one."""
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise _no_folder(error) from None
    return temporary if len(temporary.encode()) + len("/samples-12345678/socket") <= LONGEST_SOCKET_PATH else "/tmp"


def _no_folder(error: OSError) -> UserError:
    problem = f"the rank that reads a stream cannot make a socket for the others of its node: {error.strerror or error}"
    return UserError(problem, field="TMPDIR", accepted="a folder on a local disk that can be written", where=WHERE)


class SampleServer:
    """Gives samples of ``datasets`` (by number), which must be thread-safe, to processes on this host.

    Attributes:
        path: of the socket, for clients; they can connect from now on.

    Raises:
        UserError: no socket can be made in the folder for temporary files.
    """

    def __init__(self, datasets: Mapping[int, Dataset], clients: int) -> None:
        self._datasets = datasets
        self._count = clients
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="samples-", dir=socket_folder())
            self.path = str(Path(self._folder.name) / "socket")
            self._listener = Listener(self.path, "AF_UNIX", backlog=clients)
        except OSError as error:
            raise _no_folder(error) from None
        self._clients: list[tuple[Connection, threading.Lock]] = []

    def start(self) -> None:
        """Serve all clients, which have connected before, in threads; remove the socket."""
        try:
            for _ in range(self._count):
                connection, lock = self._listener.accept(), threading.Lock()
                self._clients.append((connection, lock))
                threading.Thread(target=self._serve, args=(connection, lock), daemon=True, name="samples").start()
        finally:
            self._listener.close()
            self._folder.cleanup()

    def _serve(self, connection: Connection, lock: threading.Lock) -> None:
        with suppress(OSError, EOFError), connection:  # which end when the client does
            while True:
                reply = self._answer(*_REQUEST.unpack(connection.recv_bytes(_REQUEST.size)))
                with lock:
                    connection.send_bytes(reply)

    def _answer(self, which: int, index: int) -> bytes:
        try:
            return _FOUND + _packed(self._datasets[which][index])
        except UserError as error:
            return _REFUSED + encode(Refusal.of(error))
        except Exception as error:  # a defect; the client ends with it, and not with a request without an answer
            return _FAILED + f"{type(error).__name__}: {error}".encode()

    def close(self, problem: UserError | None = None) -> None:
        """End; ``problem`` is what clients raise that ask for another sample."""
        for connection, lock in self._clients:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:  # if it is still open
                if problem is not None and lock.acquire(timeout=_FAREWELL_SECONDS):
                    _say_farewell(connection, end, problem)
                    lock.release()
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the connection


def _say_farewell(connection: Connection, end: socket.socket, problem: UserError) -> None:
    limit = struct.pack("@ll", _FAREWELL_SECONDS, 0)  # a client that does not read must not hold this process
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.send_bytes(_FAREWELL + encode(Refusal.of(problem)))


class SampleClient:
    """Samples of a :class:`SampleServer`. Thread-safe.

    Args:
        timeout: seconds for an answer.
        lost: (seconds waited, error) -> what is raised when the server has gone or does not answer.
    """

    def __init__(self, path: str, timeout: float, lost: Callable[[float, Exception], Exception]) -> None:
        self._timeout, self._lost, self._lock = timeout, lost, threading.Lock()
        self._over: Exception | None = None
        try:
            self._connection = Client(path, "AF_UNIX")
        except OSError as error:
            raise lost(0.0, error) from error

    def fetch(self, which: int, index: int) -> Sample:
        """Sample ``index`` of data set ``which``.

        Raises:
            UserError: what the server's data set raised, or why the server ended.
        """
        with self._lock:
            if self._over is not None:
                raise self._over
            start = time.monotonic()
            try:
                reply = self._ask(which, index)
            except (OSError, EOFError) as error:
                self._over = self._lost(time.monotonic() - start, error)  # a late answer must not be the next one's
                raise self._over from error
            if reply[:1] == _FAREWELL:
                self._over = _refusal(reply)
                raise self._over
        if reply[:1] == _REFUSED:
            raise _refusal(reply)
        if reply[:1] == _FAILED:
            raise self._lost(time.monotonic() - start, RuntimeError(reply[1:].decode()))
        return _unpacked(reply)

    def _ask(self, which: int, index: int) -> bytes:
        with suppress(BrokenPipeError):  # what the server said at its end can still be read
            self._connection.send_bytes(_REQUEST.pack(which, index))
        if not self._connection.poll(self._timeout):
            raise TimeoutError("no sample came")
        return self._connection.recv_bytes()

    def close(self) -> None:
        self._connection.close()


class ServedDataset:
    """A data set that another process reads; it has no state of its own to save."""

    def __init__(self, client: SampleClient, which: int) -> None:
        self._client, self._which = client, which

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        return self._client.fetch(self._which, index)


def _refusal(answer: bytes) -> UserError:
    refusal = decode(answer[1:], Refusal, "the rank that reads the data")
    assert isinstance(refusal, Refusal)
    return refusal.error()


def _packed(sample: Sample) -> bytes:
    tokens, documents, mask = sample[:3]  # no stream has more
    parts = [tokens.astype("<i8"), documents.astype("<i4"), *([] if mask is None else [mask.astype(bool)])]
    return _SAMPLE.pack(len(tokens), len(documents), mask is not None) + b"".join(part.tobytes() for part in parts)


def _unpacked(answer: bytes) -> Sample:
    count, documents, masked = _SAMPLE.unpack_from(answer, 1)
    offset = 1 + _SAMPLE.size
    tokens = np.frombuffer(answer, "<i8", count, offset)
    starts = np.frombuffer(answer, "<i4", documents, offset + tokens.nbytes)
    mask = np.frombuffer(answer, bool, count - 1, offset + tokens.nbytes + starts.nbytes) if masked else None
    return Sample(tokens, starts, mask)
