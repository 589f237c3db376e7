"""Step times of two islands far apart, synchronous and with outer steps, on the testbed.

    python benchmarks/bench_outer_testbed.py [--only RATE …] [--chips clock|soft] [--links …] [--out FILE]

Two unequal islands of a fast and a slow chip (3:1) each, with links of 100 MB/s inside and slow ones between all ranks
of both. For each rate of these, in one run: chips and links are calibrated, and there run the search's plan without
outer steps and with them (``--allow-outer``), the same inner plans with gradients summed over both islands in every
step (straight and in two hops) and with other outer steps, and each island alone. Printed are predicted beside measured
step times (of outer steps the mean over a round of all fragments), and tokens per second beside the sum of the
islands alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job

MODEL = {
    "name": "bench", "hf_model_type": "llama", "num_layers": 8,
    "hidden_size": 128, "ffn_hidden_size": 352, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 16, "vocab_size": 257, "max_position_embeddings": 2048,
}  # fmt: skip
WORK = {
    "model": MODEL, "seq_length": 128, "batch": 20, "fragments": 4, "sizes": [1, 2], "calibration_steps": 1, "steps": 1,
}  # fmt: skip
RATES = ("25 MB/s", "5 MB/s", "1 MB/s")


def far_apart(rate: str) -> dict[str, Any]:
    """Islands a and b, whose speeds are 3:2."""
    speeds = {"af": 0.45, "as": 0.15, "bf": 0.3, "bs": 0.1}
    groups = [(name, 1, 1, speed, "1 GiB") for name, speed in speeds.items()]
    return emulated_cluster(groups, rate, af_as="100 MB/s", bf_bs="100 MB/s")


def report(rate: str, found: dict[str, Any]) -> None:
    """Print the table of one rate."""
    length = WORK["seq_length"]
    for row in found["rows"]:
        row["mean"] = mean(row["steps"]) if row["kind"] == "outer" else median(row["steps"])
        row["speed"] = row["batch"] * length / row["mean"]
    total = sum(row["speed"] for row in found["rows"] if row["kind"] == "alone")
    print(f"\n### {rate} between the islands ({notes(found)})\n")
    print("| plan | predicted s | measured s | late | error | tokens/s | of the islands' sum | MB across per step |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        error = row["predicted"] / row["mean"] - 1
        times = f"{row['predicted']:.3f} | {row['mean']:.3f} | {row['late']:.1%} | {error:+.1%}"
        name = f"**{row['name']}**" if row["chosen"] else row["name"]
        print(f"| {name} | {times} | {row['speed']:.0f} | {row['speed'] / total:.1%} | {row['across'] / 1e6:.3f} |")
    errors = [abs(row["predicted"] / row["mean"] - 1) for row in found["rows"]]
    others = [row for row in found["rows"] if row["kind"] != "alone"]
    best = max(row["speed"] for row in others)
    chosen = next(row for row in others if row["chosen"])
    print(f"\nerror mean {mean(errors):.1%}, worst {max(errors):.1%}; the search's choice (bold) has "
          f"{chosen['speed'] / best:.1%} of the best one's tokens/s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="clock", choices=("clock", "soft"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--only", nargs="*", metavar="RATE", choices=RATES, help="some of the rates: %(choices)s")
    parser.add_argument("--every", type=int, default=32, help="steps between exchanges of a weight, at most")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; chips {args.chips}, links {args.links}; hidden size {MODEL['hidden_size']}, "
          f"{MODEL['num_layers']} layers, {WORK['seq_length']} tokens, batch {WORK['batch']}")  # fmt: skip
    found = {}
    for rate in args.only or RATES:
        how = args.chips, args.links, args.verbose
        found[rate] = run_job(rate, "testbed_outer_job.py", far_apart(rate), {**WORK, "every": args.every}, *how)
        report(rate, found[rate])
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
