"""Testbed with CPU quotas: the share of a core that each rank gets, asked against measured.

    python benchmarks/bench_testbed_quota.py [--repeats 3] [--seconds 2]

Every rank computes without a pause and compares its CPU time with the clock. Needs root and the cpu cgroup.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine, median
from hetero_megatron.testbed.machine import examine

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.10
CLUSTERS: dict[str, list[tuple[int, float]]] = {  # (chips, speed) by type
    "2 ranks, 3:1": [(1, 0.6), (1, 0.2)],
    "2 ranks, 8:1": [(1, 0.8), (1, 0.1)],
    "3 ranks": [(1, 0.75), (2, 0.3)],
    "4 ranks, 3:1": [(2, 0.6), (2, 0.2)],
    "6 ranks, three types": [(2, 0.4), (2, 0.2), (2, 0.1)],
    "8 ranks": [(4, 0.3), (4, 0.1)],
}


def measure(types: list[tuple[int, float]], seconds: float) -> tuple[list[list[float]], float]:
    """Shares by type, and the foreign load in cores."""
    description: dict[str, Any] = {
        "nodes": [{"name": f"n{i}", "count": count, "chip": f"c{i}"} for i, (count, _) in enumerate(types)],
        "chips": {f"c{i}": {"memory": "1 GiB", "emulate": {"speed": speed}} for i, (_, speed) in enumerate(types)},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "cluster.json").write_text(json.dumps(description))
        run = [sys.executable, "-m", "hetero_megatron.cli.main", "testbed", "run", "--chips", "quota"]
        run += ["--links", "none", "--cluster", str(path / "cluster.json"), "--log-dir", str(path / "log"), "--"]
        run += [sys.executable, str(ROOT / "tests" / "testbed_job.py"), "count", folder, "1", str(seconds)]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        shares: list[list[float]] = []
        rank = 0
        for count, _ in types:
            shares.append([float((path / f"share-{r}-0").read_text()) for r in range(rank, rank + count)])
            rank += count
        return shares, json.loads((path / "log" / "testbed.json").read_text())["foreign_cores"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    if why := examine().no_group("cpu"):
        print(f"skipped: {why}")
        return
    print(f"{machine()}; {arguments.repeats} repeats; shares of a core")
    print("| cluster | speed asked | measured | spread | error | foreign load |")
    print("|---|---|---|---|---|---|")
    largest = 0.0
    for name, types in CLUSTERS.items():
        repeats = [measure(types, arguments.seconds) for _ in range(arguments.repeats)]
        loads = f"{max(load for _, load in repeats):.2f} cores"
        for index, (_, speed) in enumerate(types):
            values = [share for shares, _ in repeats for share in shares[index]]
            middle = median(values)
            spread = (max(values) - min(values)) / middle
            numbers = f"{speed} | {middle:.3f} | {spread:.1%} | {middle / speed - 1:+.1%} | {loads}"
            largest = max(largest, abs(middle / speed - 1))
            print(f"| {name} | {numbers} |", flush=True)
    print(f"largest error {largest:.1%}, goal {GOAL:.0%}: {'met' if largest <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
