"""Muon's update with owners of matrices by speed, beside equal owners, on the testbed.

    python benchmarks/bench_testbed_muon.py [--chips clock|soft] [--links …] [--out FILE]

Two fast chips and two of a third of their speed. Plans: a replica on each chip; two pipelines, each of a fast chip
before a slow one; two TP groups, each of chips of one speed. Each with equal shares of the optimizer's matrices and
with ``optimizer: {share: …}`` by speed, the rest of the plan being the same. Timed is the update (from the end of
backward's sums to when all ranks have the new weights; the slowest rank, median of the steps), and the whole step,
beside predictions by rates that are calibrated in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job

MODEL = {
    "name": "bench", "hf_model_type": "llama", "num_layers": 4,
    "hidden_size": 512, "ffn_hidden_size": 1408, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 64, "vocab_size": 257, "max_position_embeddings": 2048,
}  # fmt: skip
WORK = {"model": MODEL, "seq_length": 128, "batch": 8, "sizes": [1, 2], "calibration_steps": 1, "steps": 3}


def report(found: dict[str, Any]) -> None:
    """A row per plan and choice of owners, and how much faster owners by speed are."""
    print(f"\n{notes(found)}\n")
    kinds = ("update", "step")
    heads = " | ".join(f"{kind}: predicted s | measured s | error" for kind in kinds)
    print(f"| plan | owners | {heads} | late |\n|{'---|' * 9}")
    for row in found["rows"]:
        cells = []
        for kind in kinds:
            error = row[f"predicted_{kind}"] / row[kind] - 1
            cells += [f"{row[f'predicted_{kind}']:.3f}", f"{row[kind]:.3f}", f"{error:+.1%}"]
        print(f"| {row['name']} | {row['owners']} | {' | '.join(cells)} | {row['late']:.1%} |")
    by_plan: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        by_plan.setdefault(row["name"], {})[row["owners"]] = row
    for name, rows in by_plan.items():
        (equal, by_speed) = rows["equal"], rows["by speed"]
        print(f"{name}: update {equal['update'] / by_speed['update']:.2f} x as fast, "
              f"step {equal['step'] / by_speed['step']:.2f} x")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="clock", choices=("clock", "soft"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; chips {args.chips}, links {args.links}; hidden size {MODEL['hidden_size']}, "
          f"{MODEL['num_layers']} layers, {WORK['seq_length']} tokens, batch {WORK['batch']}, fp32")  # fmt: skip
    cluster = emulated_cluster([("fast", 1, 2, 0.45, "1 GiB"), ("slow", 1, 2, 0.15, "1 GiB")], "100 MB/s")
    found = run_job("muon", "testbed_muon_job.py", cluster, WORK, args.chips, args.links, args.verbose)
    report(found)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
