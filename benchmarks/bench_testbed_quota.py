"""Testbed with CPU quotas: the share of a core that each rank gets, asked against measured.

    python benchmarks/bench_testbed_quota.py [--repeats 3] [--seconds 2]

Every rank computes without a pause and compares its CPU time with the clock. Needs root and the cpu cgroup.
A repeat that others disturbed is measured again, up to three times; if it still is, the verdict leaves its rows out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine, median
from benchmarks.testbed_run import ROOT, run_testbed, undisturbed
from hetero_megatron.testbed.machine import examine

GOAL = 0.10
CLUSTERS: dict[str, list[tuple[int, float]]] = {  # (chips, speed) by type
    "2 ranks, 3:1": [(1, 0.6), (1, 0.2)],
    "2 ranks, 8:1": [(1, 0.8), (1, 0.1)],
    "3 ranks": [(1, 0.75), (2, 0.3)],
    "4 ranks, 3:1": [(2, 0.6), (2, 0.2)],
    "6 ranks, three types": [(2, 0.4), (2, 0.2), (2, 0.1)],
    "8 ranks": [(4, 0.3), (4, 0.1)],
}


def measure(name: str, types: list[tuple[int, float]], seconds: float) -> tuple[tuple[list[list[float]], float], bool]:
    """(shares by type, foreign load in cores), and whether that is too much."""
    description: dict[str, Any] = {
        "nodes": [{"name": f"n{i}", "count": count, "chip": f"c{i}"} for i, (count, _) in enumerate(types)],
        "chips": {f"c{i}": {"memory": "1 GiB", "emulate": {"speed": speed}} for i, (_, speed) in enumerate(types)},
    }
    with tempfile.TemporaryDirectory() as folder:
        job = [ROOT / "tests" / "testbed_job.py", "count", folder, "1", str(seconds)]
        testbed, _ = run_testbed(name, description, "quota", "none", job)
        shares: list[list[float]] = []
        rank = 0
        for count, _ in types:
            shares.append([float(Path(folder, f"share-{r}-0").read_text()) for r in range(rank, rank + count)])
            rank += count
        return (shares, testbed["foreign_cores"]), testbed["disturbed"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    if why := examine().no_group("cpu"):
        print(f"skipped: {why}")
        return
    print(f"{machine()}; {arguments.repeats} repeats; shares of a core")
    print("| cluster | speed asked | measured | spread | error | foreign load | disturbed |")
    print("|---|---|---|---|---|---|---|")
    judged: list[float] = []  # errors of rows that nobody disturbed
    left_out = 0
    for name, types in CLUSTERS.items():
        once = partial(measure, name, types, arguments.seconds)
        tries = [undisturbed(once) for _ in range(arguments.repeats)]
        disturbed = sum(was for _, was in tries)
        marked = f"{disturbed} of {len(tries)} repeats" if disturbed else "no"
        loads = f"{max(load for (_, load), _ in tries):.2f} cores"
        for index, (_, speed) in enumerate(types):
            values = [share for (shares, _), _ in tries for share in shares[index]]
            middle = median(values)
            spread = (max(values) - min(values)) / middle
            numbers = f"{speed} | {middle:.3f} | {spread:.1%} | {middle / speed - 1:+.1%} | {loads}"
            judged += [] if disturbed else [abs(middle / speed - 1)]
            left_out += bool(disturbed)
            print(f"| {name} | {numbers} | {marked} |", flush=True)
    if left_out:
        print(f"left out of the verdict: {left_out} rows with disturbed repeats")
    if judged:
        print(f"largest error {max(judged):.1%}, goal {GOAL:.0%}: {'met' if max(judged) <= GOAL else 'missed'}")
    else:
        print("no verdict: every row was disturbed")


if __name__ == "__main__":
    main()
