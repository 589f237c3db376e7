"""The worker process of ``plugins check`` from outside: started, supervised, killed, replaced.

A plugin may crash, exit, hang, exhaust memory, print, or close descriptors without ending the check itself. This module
and its imports do not load torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero_megatron.plugin_check import LOST_CHANNEL, Event

STDERR_BYTES = 64 << 10  # of one request; what comes after is dropped
LOADING = 120.0  # seconds that loading torch and all plugins may take at least
TICK = 0.2  # seconds between two looks at memory and time
LAST_WORDS = 1.0  # seconds in which a process that hangs may write its stack


@dataclass(frozen=True)
class CheckLimits:
    """Limits of one check: seconds, and bytes by which its process may grow."""

    seconds: float = 300.0
    memory: int = 4 << 30


class Worker:
    """The process and its requests, one after the other.

    Attributes:
        place: the latest [check, dtype, case].
    """

    def __init__(self, limits: CheckLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._events = self._errors = -1
        self.place = ["", "", ""]

    def _start(self) -> None:
        """A new process in a session of its own: a terminal's Ctrl-C reaches the check, not the plugin."""
        self.stop()
        self._events, channel = os.pipe()
        self._errors, errors = os.pipe()
        paths = [os.path.abspath(p) for p in sys.path]  # a plugin is found where this process would find it
        try:
            handles = channel, self._trace.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hetero_megatron.plugin_check.worker", *map(str, (*handles, os.getpid()))],
                stdin=subprocess.PIPE, stdout=errors, stderr=errors, pass_fds=handles,
                start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        finally:
            os.close(channel)
            os.close(errors)
        os.set_blocking(self._events, False)
        os.set_blocking(self._errors, False)

    @property
    def alive(self) -> bool:
        return self._process is not None

    def stop(self) -> None:
        if self._process is None:
            return
        _kill_group(self._process.pid)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        os.close(self._events)
        os.close(self._errors)
        self._process = None

    def close(self) -> None:
        self.stop()
        self._trace.close()

    def request(self, **asked: Any) -> Iterator[Event]:
        """Events of one request. The last is ``done``, ``ready`` or ``refused``, or ``died`` with a ``reason``."""
        if self._process is None:
            self._start()
        call = _Call(self, asked)
        yield from call.events()
        if call.lost:
            self.stop()


class _Call:
    """One request from its line to its end."""

    def __init__(self, worker: Worker, asked: Event) -> None:
        assert worker._process is not None
        self._worker, self._asked, self._process = worker, asked, worker._process
        self._pid = self._process.pid
        self._text, self._stderr = bytearray(), bytearray()
        self._last, self._passed_on, self._base = time.monotonic(), 0, 0
        loads = "without" in asked
        self._seconds = max(worker._limits.seconds, LOADING) if loads else worker._limits.seconds
        self._finished: Event = {}  # what it says of itself; believed when its process has ended well
        self._result: Event = {}
        self.lost = False  # whether the process itself has to be replaced

    def events(self) -> Iterator[Event]:
        self._worker._trace.truncate(0)
        self._worker._trace.seek(0)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self._asked).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone: seen below
        with selectors.DefaultSelector() as selector:
            selector.register(self._worker._events, selectors.EVENT_READ)
            selector.register(self._worker._errors, selectors.EVENT_READ)
            looked = 0.0
            while not self._result:
                ready = {key.fd for key, _ in selector.select(TICK)}
                self._read_errors(ready)
                yield from self._read_events(ready)
                if not self._result and time.monotonic() - looked > TICK:
                    looked = time.monotonic()
                    self._look(bool(ready))
        self._read_errors({self._worker._errors})
        if self._pid != self._process.pid:
            _kill_group(self._pid)  # what it left running
        if self._result["event"] == "died":
            self._result["reason"] += self._where()
        yield self._result

    def _read_events(self, ready: set[int]) -> Iterator[Event]:
        if self._worker._events not in ready:
            return
        chunk = _read(self._worker._events)
        if chunk == b"":
            status = self._end_of_process()
            child = self._pid != self._process.pid
            self._died("it ended the process that started its own" if child else self._exit_reason(status), lost=True)
            return
        self._text += chunk or b""
        *lines, unfinished = bytes(self._text).split(b"\n")
        self._text = bytearray(unfinished)
        for line in lines:
            try:
                event = json.loads(line)
                name = event["event"]
            except (ValueError, TypeError, KeyError):
                self._died("it wrote into a file descriptor that is not its own", lost=True)
                return
            self._last = time.monotonic()
            yield from self._handle(name, event)

    def _handle(self, name: str, event: Event) -> Iterator[Event]:
        if name == "started":
            self._pid = event["pid"]
            self._base = _resident(self._pid)
        elif name == "ended":
            if event["status"] == 0 and self._finished:
                self._result = self._finished
            else:
                self._died(self._exit_reason(event["status"]))
        elif name == "raised":
            self._finished = {"event": "died", "reason": f"raised {event['detail']}", "hung": False, "crashed": False}
        elif name == "done":
            self._finished = event
        elif name in ("ready", "refused"):
            self._result = event
        elif name == "broken":
            self._died(f"the device fails every call after it: {event['detail']}", lost=True)
        else:
            if name == "begin":
                self._worker.place = [event["check"], event["dtype"], event["case"]]
            yield event

    def _look(self, ready: bool) -> None:
        """Kill a worker that hangs, has grown too much, or has lost its parent."""
        limits = self._worker._limits
        if not ready and self._process.poll() is not None:  # and a child of it holds the channel open
            self._died("it ended the process that started its own", lost=True)
        elif time.monotonic() - self._last > self._seconds:
            self._end(f"it did not end within {self._seconds:g} s", hung=True)
        elif self._base and _resident(self._pid) - self._base > limits.memory:
            self._end(f"its process took more than {limits.memory / 2**30:.3g} GiB of memory")

    def _end(self, reason: str, hung: bool = False) -> None:
        """SIGABRT, on which it writes its stack; then SIGKILL."""
        serving = self._pid == self._process.pid  # no child: the process serves requests itself
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGABRT)
        end = time.monotonic() + LAST_WORDS
        while time.monotonic() < end and _alive(self._pid):
            time.sleep(0.02)
        _kill_group(self._pid)
        self._died(reason, lost=serving, hung=hung, crashed=False)
        text = b""
        while not serving and b'"ended"' not in text and self._process.poll() is None:  # until its parent has noticed
            text += _read(self._worker._events) or b""
            time.sleep(0.01)

    def _end_of_process(self) -> int:
        """Exit status of the process; it is killed if it has closed the channel and lives on."""
        try:
            return self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            return LOST_CHANNEL

    def _died(self, reason: str, lost: bool = False, hung: bool = False, crashed: bool = True) -> None:
        self._result = {"event": "died", "reason": reason, "hung": hung, "crashed": crashed}
        self.lost = lost

    def _exit_reason(self, status: int) -> str:
        self._read_errors({self._worker._errors})
        if status == LOST_CHANNEL:
            return "it closed file descriptors that are not its own"
        if status >= 0:
            return f"it ended its process with exit code {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        lines = self._stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        abort_line = lines[-1][:200] if lines and name == "SIGABRT" else ""
        guess = "the system was out of memory, or it did so itself" if name == "SIGKILL" else ""
        return f"it ended its process by {name}" + (f": {abort_line or guess}" if abort_line or guess else "")

    def _where(self) -> str:
        """The innermost frame of the plugin in the stack written at the fatal signal, else of any code."""
        self._worker._trace.seek(0)
        text = self._worker._trace.read(1 << 20).decode("utf-8", "replace")
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text)
        plugin_frames = [f for f in frames if not re.search(r"/(site-packages|python3[^/]*|hetero_megatron)/|<", f[0])]
        if not frames:
            return ""
        file, line, function = (plugin_frames or frames)[0]
        return f" ({function}, {file.rpartition('/')[2]}:{line})"

    def _read_errors(self, ready: set[int]) -> None:
        """What the process prints goes to stderr, up to a bound."""
        while self._worker._errors in ready and (chunk := _read(self._worker._errors)):
            self._stderr = (self._stderr + chunk)[-4096:]
            passed_text = chunk[: max(STDERR_BYTES - self._passed_on, 0)]
            self._passed_on += len(passed_text)
            sys.stderr.write(passed_text.decode("utf-8", "backslashreplace"))
            if len(chunk) == 1 << 16:
                return  # a process that prints without end must not keep the check from looking at the clock
        sys.stderr.flush()


def _read(handle: int) -> bytes | None:
    """What is there; None if nothing is, empty at the end."""
    try:
        return os.read(handle, 1 << 16)
    except BlockingIOError:
        return None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
