"""How cold caches become while a core pauses: why a CPU quota costs work more than its share of a core says.

    python benchmarks/bench_caches.py [--core 0]

CPU time of reading one byte of each line of so many MiB in random order, after a pause, against the same right after
the last time; medians. ``asleep``: the core is idle meanwhile; ``awake``: it spins, and touches no memory. What both
show alike was taken by others: on a virtual machine, people whom nobody here sees. A row without memory shows whether
pauses cost anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine

LINE = 64  # bytes
SIZES = (0, 2, 8, 32)  # MiB
PAUSES = (0.001, 0.01, 0.02, 0.1)  # seconds
REPEATS = 25


def reader(size: int) -> Callable[[], float]:
    """Reads ``size`` MiB, in CPU seconds; without any, it adds."""
    lines = (size << 20) // LINE
    values = np.ones((lines, LINE), np.uint8)
    order = np.random.default_rng(0).permutation(lines)
    out = np.empty(lines, np.uint8)

    def read() -> float:
        start = time.thread_time()
        if size:
            np.take(values[:, 0], order, out=out, mode="clip")
        else:
            sum(range(50_000))
        return time.thread_time() - start

    return read


def pause(seconds: float, awake: bool) -> None:
    end = time.monotonic() + seconds
    if not awake:
        time.sleep(seconds)
    while time.monotonic() < end:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    print(f"{machine()}; core {args.core}")
    print("\n| MiB | core | right after | " + " | ".join(f"after {1e3 * p:g} ms" for p in PAUSES) + " |")
    print("|---|---|---|" + "---|" * len(PAUSES))
    for size in SIZES:
        read = reader(size)
        for awake in (False, True):
            found: dict[float, list[tuple[float, float]]] = {p: [] for p in PAUSES}
            for seconds in PAUSES * REPEATS:
                read()
                warm = read()
                pause(seconds, awake)
                found[seconds].append((warm, read()))
            usual = median(warm for pairs in found.values() for warm, _ in pairs)
            times = [median(cold / warm for warm, cold in found[p]) for p in PAUSES]
            cells = " | ".join(f"{ratio:.2f}x" for ratio in times)
            print(f"| {size} | {'awake' if awake else 'asleep'} | {1e3 * usual:.3f} ms | {cells} |", flush=True)


if __name__ == "__main__":
    main()
