"""Runs code that came with a model, its chat template and its tokenizer, in a process with limits of time and memory.

A template is a program, and the normaliser and the patterns of a tokenizer.json are one, too. What they do in C or Rust
cannot be interrupted in this process: 10**10**8, a text that grows tenfold at each step. So a child that is forked here
(it has all that the work needs, and starts at once) does the work on batches, and the kernel ends it when a call takes
too long or too much memory. Batches are read here while the child works on the one before.

The child never touches a device, keeps no file or socket of its parent open, and ends with it. It is not trusted: what
it answers is JSON and arrays of numbers.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hetero_megatron.errors import UserError

RENDER, TOKENIZE = "the chat template", "the tokenizer"  # kinds of calls


class CallLimits(Protocol):
    """Told of by the work that they limit."""

    def begin(self, what: str) -> None:
        """A call begins that may take as long and as much memory as the limits say; ``what``: its kind."""
        ...

    def end(self) -> None:
        """It ended."""
        ...


class _Unlimited:
    def begin(self, what: str) -> None:
        """Nothing is limited here."""

    def end(self) -> None:
        """Nothing is limited here."""


UNLIMITED: CallLimits = _Unlimited()

Item = TypeVar("Item")
Result = TypeVar("Result")

SECONDS, SECONDS_PER_MB = 2.0, 20.0  # of CPU time, of one call: to begin with, and by the size of what it is given
MEMORY, MEMORY_PER_BYTE = 1 << 30, 512  # bytes beyond what this process has
SILENCE = 600.0  # seconds that a child may say nothing without using its CPU time: it waits for something
DEPTH = 1000  # calls within each other
BATCH_BYTES, BATCH_ITEMS = 1 << 18, 256
_STATE = struct.Struct("<qB")  # of the call under way: number of the item in its batch, place in _CALLS
_CALLS = ("", RENDER, TOKENIZE)
_LENGTH, _ARRAY = struct.Struct("<q"), "array"
_DTYPES = {name: np.dtype(name) for name in ("bool", "uint8", "uint16", "int32", "int64")}


class Guard(Generic[Item, Result]):
    """A child that does ``work`` on items.

    Args:
        work: gets an item, which is JSON (tuples arrive as lists), and the limits to tell of its calls; gives JSON and
            arrays, in lists. Raises nothing but UserError.
        refuse: the error for an item whose call was ended, from its kind (empty: there was none) and what to say of it.
    """

    def __init__(
        self, work: Callable[[Item, CallLimits], Result], refuse: Callable[[Item, str, str], UserError],
        seconds: float = SECONDS, memory: int = MEMORY,
    ) -> None:  # fmt: skip
        self._work, self._refuse, self._seconds, self._memory = work, refuse, seconds, memory
        self._state = mmap.mmap(-1, _STATE.size)  # shared with the child
        self._pid = 0
        self._pipe: Connection | None = None

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Each item and its result, in order. UserError of the work, of ``items``, or for what exceeds the limits."""
        batches = _batches(items)
        try:
            batch, last = next(batches)
            while batch:
                self._send(batch)
                following, next_last = next(batches) if last is None else ([], last)
                yield from self._receive(batch)
                batch, last = following, next_last
            if last is not None and not isinstance(last, StopIteration):
                raise last
        finally:
            self.close()

    def run(self, items: list[Item]) -> list[Result | UserError]:
        """The results of a few items, or the errors in their place."""
        self._send(items)
        return list(self._answers(items))

    def close(self) -> None:
        """End the child."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def _send(self, batch: list[Item]) -> None:
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        with suppress(BrokenPipeError):  # it ended: what it says, or does not, tells why
            self._pipe.send_bytes(self._written(batch))

    def _written(self, batch: list[Item]) -> bytes:
        for part in (batch, *([item] for item in batch)):
            try:
                blob = json.dumps(part).encode()
            except RecursionError:
                if len(part) == 1:
                    raise self._refuse(part[0], "", "is nested too deeply") from None
                continue
            if part is batch:
                return blob
        raise AssertionError("a batch is nested more deeply than each of its items")

    def _receive(self, batch: list[Item]) -> Iterator[tuple[Item, Result]]:
        for item, outcome in zip(batch, self._answers(batch)):  # an error is the last answer
            if isinstance(outcome, UserError):
                raise outcome
            yield item, outcome

    def _answers(self, batch: list[Item]) -> Iterator[Result | UserError]:
        assert self._pipe is not None
        try:
            if not self._waited():
                raise EOFError
            answers = _read(self._pipe.recv_bytes())
        except (EOFError, OSError, ValueError, TypeError, LookupError):
            yield self._ended(batch)
            return
        if isinstance(answers, str):
            raise RuntimeError(f"in the process that encodes: {answers}")
        for failed, text in answers:
            yield UserError(text) if failed else text

    def _waited(self) -> bool:
        """Whether the child says something; False: it stands still."""
        assert self._pipe is not None
        last, cpu_seconds = time.monotonic(), -1.0
        while not self._pipe.poll(1.0):
            spent = _cpu_seconds(self._pid)
            if spent != cpu_seconds:
                last, cpu_seconds = time.monotonic(), spent
            elif time.monotonic() - last > SILENCE:
                return False
        return True

    def _ended(self, batch: list[Item]) -> UserError:
        number, call = _STATE.unpack(self._state[:])
        pid, self._pid = self._pid, 0
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = 0
        with suppress(ChildProcessError):  # somebody else in this process waits for all children
            _, status = os.waitpid(pid, 0)
        self.close()
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if signum == signal.SIGPROF:
            reason = f"takes more than {self._seconds:g} s of CPU time"
        elif signum in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
            reason = f"needs more than {self._memory >> 20:,} MiB of memory, or crashes ({signal.Signals(signum).name})"
        else:
            reason = (
                f"ends its process ({signal.Signals(signum).name if signum else f'exit code {os.WEXITSTATUS(status)}'})"
            )
        return self._refuse(batch[min(number, len(batch) - 1)], _CALLS[call], reason)

    def _start(self) -> None:
        self._pipe, child_pipe = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: see the module's text
            pid = os.fork()
        if pid == 0:
            try:
                _Child(child_pipe, self._state, self._work, self._seconds, self._memory).serve()
            finally:
                os._exit(1)
        self._pid = pid
        child_pipe.close()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._pid = 0


class _Child:
    """The other side: tells the kernel what each call may take."""

    def __init__(
        self, pipe: Connection, state: mmap.mmap, work: Callable[[Any, CallLimits], Any], seconds: float, memory: int
    ) -> None:
        self._pipe, self._state, self._work = pipe, state, work
        self._seconds, self._memory = seconds, memory
        self._number, self._size = 0, 0

    def serve(self) -> None:
        """Until the parent is gone."""
        self._become_a_child()
        base = _data_bytes()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        with suppress(EOFError, OSError):
            while True:
                blob = self._pipe.recv_bytes()
                self._size = len(blob)
                limit = base + self._memory + MEMORY_PER_BYTE * self._size
                if hard == resource.RLIM_INFINITY or limit < hard:
                    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
                self._pipe.send_bytes(self._answer(blob))
        os._exit(0)

    def begin(self, what: str) -> None:
        """See :class:`CallLimits`."""
        self._state[:] = _STATE.pack(self._number, _CALLS.index(what))
        signal.setitimer(signal.ITIMER_PROF, self._seconds + SECONDS_PER_MB * self._size / 2**20)

    def end(self) -> None:
        """See :class:`CallLimits`."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _answer(self, blob: bytes) -> bytes:
        answers: list[tuple[bool, Any]] = []
        try:
            for self._number, item in enumerate(json.loads(blob)):
                self._state[:] = _STATE.pack(self._number, 0)
                try:
                    answers.append((False, self._work(item, self)))
                except UserError as error:
                    answers.append((True, str(error)))
                    break
            return _written(answers)
        except MemoryError:
            os.abort()
        except BaseException:  # a fault of ours: shown by the parent
            return _written(traceback.format_exc())

    def _become_a_child(self) -> None:
        for name in (signal.SIGTERM, signal.SIGPROF, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM):
            signal.signal(name, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.set_wakeup_fd(-1)
        faulthandler.disable()
        gc.freeze()
        sys.setrecursionlimit(_depth() + DEPTH)  # libraries raise the parent's: PyTorch's compiler, for one
        null_handle = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # libraries write there when they fail
            os.dup2(null_handle, number)
        kept_numbers = {0, 1, 2, self._pipe.fileno()}
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept_numbers:
                with suppress(OSError):
                    os.close(number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _written(value: Any) -> bytes:
    """JSON, and behind it the bytes of the arrays that are in it."""
    arrays: list[np.ndarray] = []

    def plain(one: Any) -> Any:
        if isinstance(one, np.ndarray):
            arrays.append(one)
            return {_ARRAY: [one.dtype.name, one.size]}
        return [plain(inner) for inner in one] if isinstance(one, (list, tuple)) else one

    text = json.dumps(plain(value)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)])


def _read(blob: bytes) -> Any:
    """The value that was written. ValueError and others: it was none."""
    (length,) = _LENGTH.unpack_from(blob)
    at = _LENGTH.size + length

    def decoded(one: Any) -> Any:
        nonlocal at
        if isinstance(one, list):
            return [decoded(inner) for inner in one]
        if not isinstance(one, dict):
            return one
        kind, size = one[_ARRAY]
        array = np.frombuffer(blob, _DTYPES[kind], size, at)
        at += array.nbytes
        return array

    return decoded(json.loads(blob[_LENGTH.size : at]))


def _batches(items: Iterable[Item]) -> Iterator[tuple[list[Item], Exception | None]]:
    """(items, what ended them: an error or StopIteration; None: they go on), small ones first."""
    reader, count = iter(items), 1
    while True:
        batch: list[Item] = []
        size = 0
        while len(batch) < count and size < BATCH_BYTES:
            try:
                batch.append(next(reader))
            except StopIteration as end:
                yield batch, end
                return
            except UserError as error:  # what was read before it is used first
                yield batch, error
                return
            size += size_of(batch[-1])
        yield batch, None
        count = min(BATCH_ITEMS, 2 * count)


def size_of(item: Any) -> int:
    """About the number of characters in lists, tuples and dictionaries."""
    size, level = 0, [item]
    while level:
        value = level.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            level.extend(value.values())
        elif isinstance(value, (list, tuple)):
            level.extend(value)
    return size


def _data_bytes() -> int:
    """Memory of this process as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _depth() -> int:
    """Calls that are under way in this thread."""
    return sum(1 for _ in traceback.walk_stack(None))


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(words[11]) + float(words[12])
    return 0.0
