"""Transfers between chips without a common communication library: device, host, gloo, host, device.

A message is sent in chunks, so that copying one chunk overlaps with the network transfer of the one before. A gloo
group has one connection and one thread for each pair of ranks, which a fast network outruns: chunks go in turn over
several groups (*stripes*). Every peer has, per direction and stripe, its own thread with ``BUFFERS`` pinned buffers: no
transfer waits for the memory of another one, so concurrent transfers cannot deadlock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hetero_megatron.cluster import BRIDGE_CHUNK, BRIDGE_SMALLEST_CHUNK

STRIPED = 2 << 20  # bytes of a message for each stripe that it is worth using
BUFFERS = 3  # pinned buffers per channel
SMALLEST_BUFFER = 64 << 10


class Event(Protocol):
    """An event of a device stream."""

    def synchronize(self) -> None:
        """Block the host until the event is reached."""


class Copies(Protocol):
    """Copies between a device and host memory on a stream of their own: the interface that a bridge needs from a
    device."""

    def buffer(self, size: int) -> torch.Tensor:
        """[size] uint8 in host memory that the device can copy from and to while the host goes on."""

    def now(self) -> Any:
        """An event after everything enqueued so far on the calling thread's current stream."""

    def join(self, event: Any) -> None:
        """Make the calling thread's current stream wait for ``event``."""

    def stream(self) -> Any:
        """A new stream for the calling thread."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any) -> Event:
        """Start copying on ``stream`` after the event ``after``; returns an event that is reached when the copy is
        done."""


@dataclass(frozen=True)
class _MessageChunk:
    part: torch.Tensor  # [bytes] uint8, on the device
    tag: int
    ready: Any  # event from which on the part may be read, or overwritten
    done: Future[Any] | None  # of the message; for its last chunk


@dataclass
class _UnderWay:
    chunk: _MessageChunk
    slot: int = 0  # of the buffer
    host: torch.Tensor | None = None
    work: dist.Work | None = None


class BridgeWork:
    """A message over the bridge. ``wait`` blocks the host until the network transfer is done; it does not block the
    device. ``done``: of each stripe that carries a part."""

    def __init__(self, done: Sequence[Future[Any]], copies: Copies, timeout: float) -> None:
        self._done, self._copies, self._timeout = done, copies, timeout

    def is_completed(self) -> bool:
        return all(future.done() for future in self._done)

    def wait(self) -> None:
        """Raises RuntimeError if the transfer failed or timed out."""
        end = time.monotonic() + self._timeout
        for future in self._done:
            try:
                event = future.result(max(end - time.monotonic(), 0.0))
            except TimeoutError:
                raise RuntimeError(f"timed out after {self._timeout:g} s on the bridge") from None
            if event is not None:
                self._copies.join(event)


class _Channel:
    """What goes to one peer, or comes from one, over one stripe, in order.

    Args:
        transfer: (host buffer, tag) -> gloo work.
    """

    def __init__(self, copies: Copies, sends: bool, transfer: Callable[[torch.Tensor, int], dist.Work]) -> None:
        self._copies, self._sends, self._transfer = copies, sends, transfer
        self._queue: SimpleQueue[list[_MessageChunk] | None] = SimpleQueue()
        self._pending: deque[_UnderWay] = deque()
        self._failed: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="bridge").start()

    def put(self, message: list[_MessageChunk] | None) -> None:
        """Queue a message; None: stop when the queue is empty."""
        self._queue.put(message)

    def _run(self) -> None:
        self._guard(self._open)
        while (message := self._next()) is not None:
            for chunk in message:
                self._pending.append(_UnderWay(chunk))
                self._guard(self._begin)

    def _guard(self, step: Callable[[], None]) -> None:
        """Run one step. After a failure all waiting and later messages fail: the peer would mistake their bytes for the
        missing ones."""
        if self._failed is None:
            try:
                return step()
            except BaseException as error:
                self._failed = error
        while self._pending:
            future = self._pending.popleft().chunk.done
            if future is not None:
                future.set_exception(RuntimeError(str(self._failed)))

    def _open(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * BUFFERS  # as large as chunks have been
        self._copied: list[Event | None] = [None] * BUFFERS  # received bytes, out of a buffer
        self._stream, self._slot = self._copies.stream(), 0

    def _next(self) -> list[_MessageChunk] | None:
        """The next message; finishes pending chunks while there is none."""
        while self._pending:
            try:
                return self._queue.get_nowait()
            except Empty:
                self._guard(self._finish)
        return self._queue.get()

    def _begin(self) -> None:
        """Start the newest chunk in a free buffer, finishing the oldest chunk first if there is none."""
        new = self._pending[-1]
        while len(self._pending) > BUFFERS:
            self._finish()
        new.slot, self._slot = self._slot, (self._slot + 1) % BUFFERS
        size = new.chunk.part.numel()
        if (copied := self._copied[new.slot]) is not None:
            copied.synchronize()
        if self._buffers[new.slot].numel() < size:
            self._buffers[new.slot] = self._copies.buffer(max(size, SMALLEST_BUFFER))
        new.host = self._buffers[new.slot][:size]
        if self._sends:
            self._copies.copy(new.host, new.chunk.part, self._stream, new.chunk.ready).synchronize()
        new.work = self._transfer(new.host, new.chunk.tag)

    def _finish(self) -> None:
        """Wait for the oldest chunk."""
        old, event = self._pending[0], None
        assert old.work is not None and old.host is not None
        old.work.wait()
        if not self._sends:
            event = self._copies.copy(old.chunk.part, old.host, self._stream, old.chunk.ready)
            self._copied[old.slot] = event
        self._pending.popleft()
        if old.chunk.done is not None:
            old.chunk.done.set_result(event)


class Bridge:
    """Messages between ranks with any chips, over gloo groups.

    Messages of one pair of ranks start in the same order on both sides. Both sides derive the same chunks from the
    message's size, so only the content is transferred.

    Args:
        groups: gloo groups of the same ranks, used by this bridge alone; as many on all ranks.
        copies: of this rank's device; None: tensors are in host memory and go to gloo directly.
        timeout: seconds per message, from the start of waiting for it.
        chunk_bytes: largest chunk; equal on all ranks.
        near_network: context in which threads start, and with them their buffers: on CPUs near the network card.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], copies: Copies | None, timeout: float,
        chunk_bytes: int = BRIDGE_CHUNK, near_network: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._near_network = near_network
        self._groups, self._copies, self._timeout, self._chunk_bytes = tuple(groups), copies, timeout, chunk_bytes
        self._channels: dict[tuple[int, bool, int], _Channel] = {}

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> list[dist.Work | BridgeWork]:
        """Start sending a contiguous tensor, which must not change until the works are complete."""
        return self._start(tensor, dst, tag, True)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> list[dist.Work | BridgeWork]:
        """Start receiving into a contiguous tensor."""
        return self._start(tensor, src, tag, False)

    def _start(self, tensor: torch.Tensor, peer: int, tag: int, sends: bool) -> list[dist.Work | BridgeWork]:
        count = min(len(self._groups), max(tensor.nbytes // STRIPED, 1))
        parts = _chunks(tensor, chunk_of(tensor.nbytes, count, self._chunk_bytes))
        stripes = [parts[i::count] for i in range(count)]
        if not parts:
            return []
        if self._copies is None:
            return [self._transfer(peer, sends, i)(part, tag) for i, stripe in enumerate(stripes) for part in stripe]
        ready, futures = self._copies.now(), [Future[Any]() for _ in stripes]
        for i, stripe in enumerate(stripes):
            ends = [None] * (len(stripe) - 1) + [futures[i]]
            message = [_MessageChunk(part, tag, ready, end) for part, end in zip(stripe, ends, strict=True)]
            self._channel(peer, sends, i).put(message)
        return [BridgeWork(futures, self._copies, self._timeout)]

    def _channel(self, peer: int, sends: bool, stripe: int) -> _Channel:
        key = (peer, sends, stripe)
        if key not in self._channels:
            assert self._copies is not None
            with self._near_network():
                self._channels[key] = _Channel(self._copies, sends, self._transfer(*key))
        return self._channels[key]

    def _transfer(self, peer: int, sends: bool, stripe: int) -> Callable[[torch.Tensor, int], dist.Work]:
        move, group = dist.isend if sends else dist.irecv, self._groups[stripe]

        def start(host: torch.Tensor, tag: int) -> dist.Work:
            work = move(host, peer, group, tag)
            assert work is not None, "this rank is in the group"
            return work

        return start

    def close(self) -> None:
        """Stop the threads when their queues are empty."""
        for channel in self._channels.values():
            channel.put(None)


def chunk_of(size: int, stripes: int, largest: int) -> int:
    """Bytes of the chunks of a message of ``size`` bytes: so small that all stripes carry some and copies overlap with
    transfers, but not smaller than pays."""
    return max(min(largest, -(-size // (2 * stripes))), min(largest, BRIDGE_SMALLEST_CHUNK))


def _chunks(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A contiguous tensor as uint8 views of at most ``size`` bytes."""
    assert tensor.is_contiguous(), f"a message of shape {list(tensor.shape)} is not contiguous"
    flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    return [part for part in flat.split(size) if part.numel()]
