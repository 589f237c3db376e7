"""What a launcher starts on each host, e.g. through ssh: it runs one command, and leaves nothing behind.

It prints one line about the host at once. Then it reads lines of JSON on standard input:

    {"run": [words], "environment": {…}, "directory": "…", "lease": seconds}
    {"signal": number}                                        to the ranks
    {"beat": true}

A launcher that is gone (end of input), or cut off (nothing for ``lease`` seconds), ends the command, with everything it
started. What the command prints is passed on; lines for the launcher begin with ``MARK``. No torch.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_megatron import __version__
from hetero_megatron.testbed.process import all_status, die_with_parent

MARK = "\x1e"  # record separator: of the lines for the launcher
BEATS = 4  # per lease
KILLED = 128 + signal.SIGKILL
ENDED_BY_AGENT = 128 + signal.SIGTERM  # exit code of ranks that were ended because another one had failed
_SUBREAPER = 36  # prctl: processes whose parent ended become ours


def facts() -> dict[str, Any]:
    """What the launcher compares between hosts."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {
        "hostname": socket.gethostname(), "version": __version__, "torch": torch,
        "python": platform.python_version(), "interfaces": [name for _, name in socket.if_nameindex()],
        "identity": _identity(), "directory": os.getcwd(),
    }  # fmt: skip


def _identity() -> str:
    """The same for two names of one host: its boot, and its network namespace."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def say(**message: Any) -> None:
    """A line for the launcher; a launcher that is gone is noticed elsewhere."""
    with suppress(OSError):
        sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
        sys.stdout.flush()


def reachable(addresses: Sequence[str], seconds: float = 3.0) -> list[str]:
    """Those that answer, if only to say that nothing listens there."""
    answering = []
    for address in addresses:
        try:
            socket.create_connection((address, 9), timeout=seconds).close()  # discard
        except ConnectionRefusedError:
            pass
        except OSError:
            continue
        answering.append(address)
    return answering


def _pump(stream: Any) -> None:
    for line in stream:
        with suppress(OSError):
            sys.stdout.buffer.write(line if line.endswith(b"\n") else line + b"\n")
            sys.stdout.buffer.flush()


def descendants(root: int) -> list[int]:
    """Pids below ``root``, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in all_status():
        if entry.state not in "ZX":
            children.setdefault(entry.parent, []).append(entry.pid)
    pids, parents = [], list(children.get(root, ()))
    while parents:
        pid = parents.pop()
        pids.append(pid)
        parents += children.get(pid, ())
    return pids


def kill_all(patience: float = 10.0) -> None:
    """Everything that this process started, however it hides."""
    end = time.monotonic() + patience
    while (pids := descendants(os.getpid())) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _start(message: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    own_pid = os.getpid()
    environment = {**os.environ, **message.get("environment", {})}
    process = subprocess.Popen(
        message["run"], env=environment, cwd=message.get("directory") or None, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, start_new_session=True, preexec_fn=lambda: die_with_parent(own_pid),
    )  # fmt: skip
    threading.Thread(target=_pump, args=(process.stdout,), daemon=True, name="output").start()
    return process


def _to_ranks(process: subprocess.Popen[bytes], number: int) -> None:
    """To the children of the command, which torchrun's are ranks; to the command itself, if it has none."""
    ranks = [entry.pid for entry in all_status() if entry.parent == process.pid and entry.state not in "ZX"]
    for pid in ranks or [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(KILLED))
    say(facts=facts())
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            messages.put(line)
        messages.put("")

    threading.Thread(target=read, daemon=True, name="input").start()
    try:
        return _serve(messages)
    finally:
        kill_all()


def _serve(messages: queue.SimpleQueue[str]) -> int:
    process: subprocess.Popen[bytes] | None = None
    lease, heard, last_beat = 60.0, time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        if process is not None and (code := process.poll()) is not None:
            time.sleep(0.1)  # what it printed last
            say(exit=code)
            return 0
        if now - heard > lease:
            return KILLED
        if now - last_beat > lease / BEATS:
            say(beat=True)
            last_beat = now
        with suppress(queue.Empty):
            line = messages.get(timeout=0.05)
            heard = time.monotonic()
            if not line:
                return KILLED
            message = json.loads(line)
            if "run" in message:
                lease = float(message.get("lease", lease))
                try:
                    process = _start(message)
                except OSError as error:
                    say(failed=f"{message['run'][0]}: {error.strerror}")
                    return 1
            elif "dial" in message:
                say(reached=reachable(message["dial"]))
            elif "signal" in message and process is not None:
                _to_ranks(process, int(message["signal"]))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
