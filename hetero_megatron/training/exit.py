"""When to stop: a signal, a time limit, an interval. One rank's wish becomes everyone's at the next step."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from hetero_megatron.errors import INTERRUPTED

ECHO_SECONDS = 1.0  # torchrun sends on to its ranks the Ctrl-C that the terminal has sent them already


@contextmanager
def at_once(first: bool = True) -> Iterator[None]:
    """Here Ctrl-C ends the process without an exception, which libraries that are being imported may swallow, or show
    with a traceback. For work that leaves nothing half written.

    Args:
        first: whether it is this one of a job's processes that says so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.getsignal(signal.SIGINT)
    if old_handler is signal.default_int_handler:  # not where it is ignored, as in a background job of a shell
        signal.signal(signal.SIGINT, lambda number, frame: _end(first))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)


def import_torch() -> None:
    """Where a command needs it: an exception in the middle of it can end the process with a signal."""
    with at_once():
        import_module("torch")


def _end(first: bool) -> None:
    if first:
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


def end_process(code: int) -> NoReturn:
    """For processes whose threads may be in torch's C++ code, as those of gloo and of a store's clients: while sys.exit
    shuts the interpreter down, one that asks for its lock aborts the process ("terminate called without an active
    exception")."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def end_with_parent() -> None:
    """Linux: SIGKILL to this process when the one that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


class LastingStream:
    """A text stream that outlives its terminal: what cannot be written there any more is dropped.

    Attributes:
        hung_up: SIGHUP came; then a pipe that nobody reads is no error either (``| tee log`` ends by it, too).
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.hung_up = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno != errno.EIO and not (error.errno == errno.EPIPE and self.hung_up):
            raise error


def outlive_terminal() -> None:
    """From now on what this process prints outlives its terminal."""
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)


def handled(names: Iterable[str]) -> set[signal.Signals]:
    """The signals with these names but SIGHUP where it is ignored (``nohup``)."""
    numbers = {signal.Signals[name] for name in names}
    return {n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN}


def note_hang_up(number: int) -> None:
    """To be called by whoever handles SIGHUP."""
    for stream in (sys.stdout, sys.stderr):
        if number == signal.SIGHUP and isinstance(stream, LastingStream):
            stream.hung_up = True


class StopSignals:
    """Signals to a launcher: the first one stops the job in good order, another one ends it at once. Catches SIGTERM,
    SIGINT and SIGHUP while it is entered.

    Args:
        first: called with the number of the first one, in the signal's handler.

    Attributes:
        number: of the first one; None: none came.
        again: whether another came after it, and was no echo of it (terminals and ``timeout`` send one signal twice).
    """

    def __init__(self, first: Callable[[int], None]) -> None:
        self._first, self._at = first, 0.0
        self.number: int | None = None
        self.again = False

    def __enter__(self) -> StopSignals:
        numbers = handled(("SIGTERM", "SIGINT", "SIGHUP"))
        self._old_handlers = {number: signal.signal(number, self._received) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _received(self, number: int, _: FrameType | None) -> None:
        note_hang_up(number)
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            self._first(number)
        elif time.monotonic() - self._at > ECHO_SECONDS:
            self.again = True


class ExitConditions:
    """
    Args:
        first: whether it is this rank that says that Ctrl-C came.
        file: its appearance is a notice that this host is going away.

    Attributes:
        reason: why this rank wants to stop; empty while it does not.
        leaves: the reason is this host's alone (SIGTERM, the file): where ranks may leave, the others go on.
    """

    def __init__(
        self,
        minutes: float | None = None,
        interval: int | None = None,
        signals: Iterable[str] = (),
        first: bool = True,
        file: str | None = None,
    ) -> None:
        self._file, self.leaves = file, False
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._interval, self._first = minutes, interval, first
        self.reason = ""
        self._interrupted: float | None = None
        for number in handled(signals):
            signal.signal(number, self._received)

    def _received(self, number: int, _: FrameType | None) -> None:
        self._stop(f"received {signal.Signals(number).name}", leaves=number == signal.SIGTERM)
        note_hang_up(number)
        if number == signal.SIGINT:
            now, first = time.monotonic(), self._interrupted
            if first is None:
                self._interrupted = now
                if self._first:
                    os.write(2, b"interrupted: stopping after this step; Ctrl-C again ends the run at once\n")
            elif now - first > ECHO_SECONDS:
                os._exit(INTERRUPTED)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C came."""
        return self._interrupted is not None

    def check(self, step: int) -> bool:
        """Whether to stop after ``step`` completed steps."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop(f"--exit-duration-in-mins {self._minutes:g} are over")
        if self._interval and step and step % self._interval == 0:
            self._stop(f"step {step} is a multiple of --exit-interval {self._interval}")
        if not self.reason and self._file is not None and os.path.lexists(self._file):
            self._stop(f"--exit-file {self._file} appeared", leaves=True)
        return bool(self.reason)

    def go_on_from(self, earlier: ExitConditions) -> None:
        """Where nothing has come since, ``earlier``'s wish is this one's."""
        if not self.reason:
            self.reason, self.leaves = earlier.reason, earlier.leaves

    def ask(self, reason: str) -> None:
        """Another rank wants to stop."""
        if not self.reason:
            self._stop(reason)

    def _stop(self, reason: str, leaves: bool = False) -> None:
        self.reason, self.leaves = reason, leaves
