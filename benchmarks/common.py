"""Shared by the benchmarks: medians, machine description, a subprocess per measured side."""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())
    return f"{datetime.date.today()}, {os.cpu_count()} x {model}, Python {platform.python_version()}"


def timed(step: Callable[[], Any], count: int, warm_up: int = 2) -> list[float]:
    """Seconds of each of ``count`` calls after ``warm_up`` untimed ones."""
    for _ in range(warm_up):
        step()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def timed_with_cpu(step: Callable[[], Any], count: int, warm_up: int = 2) -> tuple[list[float], list[float]]:
    """:func:`timed`, and the CPU seconds of each call."""
    cpu = []

    def watched() -> None:
        start = time.process_time()
        step()
        cpu.append(time.process_time() - start)

    return timed(watched, count, warm_up), cpu[warm_up:]


def import_lazily_loaded() -> None:
    """torch imports its compiler when the first optimizer is made; one that comes before the memory of a side is
    measured must come before that of the other too (70 MiB on the machine where it was found)."""
    import torch._dynamo
    import torch.nn.parallel  # noqa: F401


def peak_rss() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alternate(
    sides: dict[str, list[str]], rounds: int, env: dict[str, str] | None = None, timeout: float | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Run the sides' commands in turn, ``rounds`` times; each prints one JSON object on its last line.

    Alternating shares out the noise of a busy machine between the sides. ``timeout``: seconds that one may take.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in sides.items():
            done = subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", **(env or {})},
            )
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
            results[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return results


def ranks(count: int, file: str, *arguments: str) -> list[str]:
    """A command for :func:`alternate` that starts ``count`` ranks of ``file``; rank 0 prints the result."""
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(count),
    ]
    return [*launch, file, *arguments]


def rank_env() -> dict[str, str]:
    """Ranks share the cores: one thread each, and they talk over the loopback interface."""
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def median(values: list[float]) -> float:
    return statistics.median(values)
