"""Running the parts of a first run: processes of their own, which print what they have found so far, line after line.

The last whole line counts, whatever becomes of the process. A part that takes too long is ended, with all that it
started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FAILED = "failed"
GRACE = 3.0  # seconds in which a part may end by itself


def emit(found: dict[str, Any]) -> None:
    """What a part has found so far."""
    print(json.dumps(found), flush=True)


def last_line(text: str) -> dict[str, Any]:
    """The last whole line with an object; {} if there is none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def run(words: Sequence[str], environments: Sequence[dict[str, str]], seconds: float, cwd: Path) -> dict[str, Any]:
    """What the first of several equal processes found; ``FAILED``: why one of them did not end well."""
    began, processes = time.monotonic(), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder) / f"out{i}", Path(folder) / f"err{i}") for i in range(len(environments))]
        try:
            for environment, (out, err) in zip(environments, logs, strict=True):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    processes.append(subprocess.Popen(
                        words, stdout=stdout, stderr=stderr, cwd=cwd, env=environment, start_new_session=True
                    ))  # fmt: skip
            late = _wait(processes, began + seconds)
        finally:
            _end(processes)
        found = last_line(logs[0][0].read_text(errors="replace")) | {"seconds": time.monotonic() - began}
        if late:
            return found | {FAILED: f"it did not end in {seconds:.0f} s"}
        for process, (out, err) in zip(processes, logs, strict=True):
            if process.returncode or len(found) == 1:
                text = err.read_text(errors="replace") or out.read_text(errors="replace")
                said = [line for line in text.splitlines() if line.strip()]
                return found | {FAILED: (said or [f"it ended with {process.returncode}"])[-1].strip()[:300]}
        return found


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float) -> bool:
    """Until all have ended, or one has failed; whether it is too late."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(GRACE)
            return False
        if time.monotonic() > end:
            return True
        time.sleep(0.05)
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Each process leads a group, in which all that it started is."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
