"""Output of the ranks: forwarded with the rank's number, and stored in files."""

from __future__ import annotations

import os
import selectors
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16


@dataclass
class _RankStream:
    rank: int
    name: str  # out | err
    file: BinaryIO | None
    shown: bool
    prefix: bytes
    rest: bytes = b""


class Output:
    """Reads the ranks' pipes.

    Args:
        which: ``rank0``: rank 0's standard output unchanged, and all ranks' standard error with ``[rank]`` before each
            line; ``all``: both streams of all ranks, with the rank.
        directory: for ``rank-N.out`` and ``rank-N.err``; None: not stored.

    Attributes:
        unread: nobody reads our output any more (as after ``| head``).
    """

    def __init__(self, which: str, directory: Path | None) -> None:
        self._which, self._directory = which, directory
        self._selector = selectors.DefaultSelector()
        self.unread = False
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def add(self, rank: int, name: str, pipe: BinaryIO) -> None:
        os.set_blocking(pipe.fileno(), False)
        file = None if self._directory is None else (self._directory / f"rank-{rank}.{name}").open("wb")
        is_shown = self._which == "all" or name == "err" or rank == 0
        bare = self._which == "rank0" and name == "out"
        stream = _RankStream(rank, name, file, is_shown, b"" if bare else f"[{rank}] ".encode())
        self._selector.register(pipe, selectors.EVENT_READ, stream)

    def pump(self, seconds: float) -> bool:
        """Forward output for up to ``seconds``; returns whether any pipe is open."""
        if not self._selector.get_map():
            return False
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            if data:
                self._pass_on(key.data, data)
            else:
                self._end(key)
        return bool(self._selector.get_map())

    def _pass_on(self, stream: _RankStream, data: bytes) -> None:
        if stream.file is not None:
            stream.file.write(data)
            stream.file.flush()
        if not stream.shown:
            return
        target = sys.stdout if stream.name == "out" else sys.stderr
        if not stream.prefix:
            text = data
        else:  # whole lines, so that those of two ranks do not mix
            lines = (stream.rest + data).split(b"\n")
            stream.rest = lines.pop() if data else b""
            text = b"".join(stream.prefix + line + b"\n" for line in lines if data or line)
        try:
            target.buffer.write(text)
            target.buffer.flush()
        except BrokenPipeError:
            self.unread = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, target.fileno())  # else Python complains again when it ends
            os.close(nowhere)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._end(key)
        self._selector.close()

    def _end(self, key: selectors.SelectorKey) -> None:
        self._pass_on(key.data, b"")  # the rest of a line
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
        if key.data.file is not None:
            key.data.file.close()
