"""Transfers that a device graph holds: they are recorded once, and start whenever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.hooks import Clock, TorchWork
from hetero_megatron.comm.work import Works


class CapturedTransfers:
    """Those of one graph. While it is captured nothing moves, and there is nothing to be timed or watched; whenever it
    runs, its bytes count, and the watch looks after it as after a transfer."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._peers: set[int] = set()
        self._bytes: dict[int, int] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Transfers of ``comm`` that are started inside, by any thread, are the graph's."""
        comm = self._comm
        clock, before = comm.clock, dict(comm.sent_bytes)
        comm.clock, comm.capturing = Clock(), self
        try:
            yield
        finally:
            comm.clock, comm.capturing = clock, None
            for peer, size in comm.sent_bytes.items():
                self._bytes[peer] = size - before.get(peer, 0)
                comm.sent_bytes[peer] -= self._bytes[peer]

    def start(self, peers: tuple[int, ...], transfer: Callable[[], TorchWork | None]) -> TorchWork | None:
        """RuntimeError: no graph can hold it."""
        self._peers.update(peers)
        work = transfer()
        if isinstance(work, Works):
            raise RuntimeError(f"messages to ranks {sorted(self._peers)} that the host sends")
        return work

    def started(self) -> None:
        """The graph has been started on the current stream."""
        comm = self._comm
        if not self._peers:
            return
        comm.check()
        for peer, size in self._bytes.items():
            comm.sent_bytes[peer] += size
        if comm.watch is not None and comm.accelerator is not None:
            event = comm.accelerator.event()
            event.record(comm.accelerator.current_stream())
            comm.watch.add(_End(event), tuple(sorted(self._peers)), comm.activity)


class _End:
    """The end of a graph, as a work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()
