"""Testbed: how long actions last against what the emulated chips should take, and speed ratios against those asked.

    python benchmarks/bench_testbed_chips.py [--chips clock soft quota] [--repeats 3]

Every rank runs the same one-stage pipeline. ``clock``: wall seconds of an action against the emulated clock's.
``soft`` and ``quota``: wall seconds times speed, which should be equal on all ranks, against their mean over ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_testbed import CLUSTERS, MODEL, ROOT, SEQ_LENGTH
from benchmarks.common import machine


def measure(name: str, chips: str, repeats: int) -> tuple[list[Any], bool]:
    """Per rank: (kind, wall, emulated seconds) of each repeat; whether others disturbed it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "cluster.json").write_text(json.dumps(CLUSTERS[name]))
        work = {
            "cluster": CLUSTERS[name], "model": MODEL, "seq_length": SEQ_LENGTH, "micro_batches": 8,
            "repeats": repeats, "out": str(path / "out.json"),
        }  # fmt: skip
        (path / "work.json").write_text(json.dumps(work))
        command = [sys.executable, "-m", "hetero_megatron.cli.main", "testbed", "run", "--chips", chips]
        command += ["--links", "none", "--cluster", str(path / "cluster.json"), "--"]
        command += [sys.executable, str(ROOT / "benchmarks" / "testbed_actions.py"), str(path / "work.json")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return json.loads((path / "out.json").read_text()), "DISTURBED" in done.stdout + done.stderr


def errors(name: str, chips: str, rows: list[Any]) -> tuple[float, float]:
    """(largest error over ranks and kinds of the median over repeats, largest spread over repeats)."""
    described = CLUSTERS[name]
    speeds = [
        described["chips"][g["chip"]]["emulate"]["speed"]
        for g in described["nodes"]
        for _ in range(g["count"] * g["chips_per_node"])
    ]
    worst = spread = 0.0
    for kind in ("F", "B"):
        wall = [[w for k, w, _ in rank if k == kind] for rank in rows]
        ideal = [[c for k, _, c in rank if k == kind] for rank in rows]
        spread = max(spread, *((max(w) - min(w)) / median(w) for w in wall))
        if chips == "clock":
            worst = max(worst, *(abs(median(w) / median(i) - 1) for w, i in zip(wall, ideal)))
        else:
            scaled = [median(w) * speed for w, speed in zip(wall, speeds)]
            worst = max(worst, *(abs(s / mean(scaled) - 1) for s in scaled))
    return worst, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="*", default=["clock", "soft", "quota"], choices=("clock", "soft", "quota"))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(machine())
    print("\n| cluster | chips | largest error | largest spread | disturbed |\n|---|---|---|---|---|")
    for chips in args.chips:
        for name in CLUSTERS:
            rows, disturbed = measure(name, chips, args.repeats)
            worst, spread = errors(name, chips, rows)
            print(f"| {name} | {chips} | {worst:.2%} | {spread:.2%} | {'yes' if disturbed else 'no'} |", flush=True)


if __name__ == "__main__":
    main()
