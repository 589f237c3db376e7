"""Error output of commands: one line on standard error, printed once for all ranks of a node with the same error.

torchrun gives each rank a file for its error, which its summary shows (as for functions under ``@record``), in a
directory shared by the node's ranks. Printed lines are recorded there under a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hetero_megatron.environment.launcher import ERROR_FILE

LOCK_SECONDS = 5.0  # that another rank may take to print its line; then this one prints its own


def say_error(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Print ``error: text`` unless another rank of this node has printed the same, and leave it for the launcher."""
    line = f"error: {' '.join(text.split())}"
    record_error(line.removeprefix("error: "), environment)
    name = environment.get(ERROR_FILE)
    if not name or not _say_once(line, Path(name).parent.parent / "said"):
        print(line, file=sys.stderr, flush=True)


def record_error(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write an error to the launcher's error file, if there is one."""
    name = environment.get(ERROR_FILE)
    if not name:
        return
    message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):  # the error itself counts
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"message": message}), encoding="utf-8")


def _say_once(line: str, file: Path) -> bool:
    """Whether a rank of this node has just printed the line; False if unknown.

    A rank records a line after printing it, so none is lost if a rank is killed in between.
    """
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
        digest = hashlib.sha256(line.encode("utf-8", "surrogatepass")).hexdigest().encode()
        if digest not in os.read(handle, 1 << 20).split():
            print(line, file=sys.stderr, flush=True)
            os.write(handle, digest + b"\n")
        return True
    finally:
        os.close(handle)
