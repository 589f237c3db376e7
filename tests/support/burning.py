"""Work that takes CPU time and nothing else."""

from __future__ import annotations

import time


def burn(seconds: float) -> None:
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass
