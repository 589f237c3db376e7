"""What a member of an elastic job hears of its epoch, over connections that break."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from hetero_megatron.comm.epochs import SCOPE, EpochStore, EpochWatch
from hetero_megatron.comm.job_store import JobStore, LastingStore, StoreGone


class Wire:
    """A port that leads to another one, until it is cut; ``close``: nobody listens any more; ``still``: nothing passes,
    and nobody is told."""

    def __init__(self, port: int) -> None:
        self._to, self._ends, self.still = port, list[socket.socket](), False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()
        except OSError:
            return

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                if not self.still:
                    other.sendall(data)
        except OSError:
            pass
        other.close()

    def cut(self) -> None:
        for end in self._ends:
            end.close() if end.fileno() < 0 else end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_hiccup_of_the_network_is_no_loss_and_a_lost_launcher_is_noticed() -> None:
    server = JobStore()
    launcher, wire = EpochStore(server.keys(SCOPE), b""), Wire(server.port)
    member = EpochStore(LastingStore("127.0.0.1", wire.port, 10.0, SCOPE), b"")
    watch = EpochWatch(EpochStore(LastingStore("127.0.0.1", wire.port, 10.0, SCOPE), b""))
    for number in range(1, 3):
        watch.begin(number)
        wire.cut()
        launcher.pause(number)
        until(lambda: watch.paused)
        assert not watch.broken()
        wire.cut()
        launcher.break_off(number)
        until(watch.broken)
        wire.cut()
        member.stopped(number, 0, by_failure=True)
        assert launcher.has_stopped(number, [0]) == {0: True} and not watch.gone
    watch.begin(3)
    wire.close()
    until(watch.broken)
    assert f"the launcher does not answer at 127.0.0.1:{wire.port} any more" in watch.gone and "\n" not in watch.gone
    with pytest.raises(StoreGone):
        member.called_off()


def test_a_store_that_is_silent_counts_as_gone_in_time() -> None:
    """With its connection there before, and with one that is made while nobody answers."""
    server = JobStore()
    wire = Wire(server.port)
    ready, late = (LastingStore("127.0.0.1", wire.port, 1.0, SCOPE) for _ in range(2))
    ready.set("key", "value")
    wire.still = True
    for store in (ready, late):
        with pytest.raises(StoreGone, match=r"no answer for 1 s"):
            store.check(["key"])
    wire.still = False
    assert ready.check(["key"]) and ready.compare_set("key", "", "other") == b"value"
