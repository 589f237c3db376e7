"""The predictor and the planner against measurement, on clusters emulated by the testbed.

    python benchmarks/bench_testbed.py [--chips clock|soft] [--links namespaces|paced] [--only NAME …] [--out FILE]

For each cluster, in one run: chips and links are calibrated; the planner's plan, the two best uniform plans (of all),
the best plan of each chip type alone, and two plans that nobody chose run for some steps. Prints predicted beside
measured step times, and the planner's plan beside the uniform ones, the ceiling mean(speed) / min(speed), and the sum
of the chip types alone (HETHUB's bound). Under ``clock`` errors are schedule + communication errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job, speed_ceiling

MODEL = {
    "name": "bench", "naming": "llama", "num_layers": 8, "hidden_size": 128, "ffn_hidden_size": 352, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 16, "vocab_size": 257, "max_position_embeddings": 2048,
}  # fmt: skip
SEQ_LENGTH, BATCH = 128, 24


CLUSTERS = {
    "3:1, 2+2": emulated_cluster([("fast", 2, 1, 0.6, "1 GiB"), ("slow", 2, 1, 0.2, "1 GiB")], fast_slow="25 MB/s"),
    "2:1, 1+3": emulated_cluster([("fast", 1, 1, 0.6, "1 GiB"), ("slow", 3, 1, 0.3, "1 GiB")], fast_slow="25 MB/s"),
    "3:1, 2+4": emulated_cluster([("fast", 2, 1, 0.45, "1 GiB"), ("slow", 4, 1, 0.15, "1 GiB")], fast_slow="20 MB/s"),
    "4:2:1, 1+2+2": emulated_cluster(
        [("a", 1, 1, 0.6, "1 GiB"), ("b", 2, 1, 0.3, "1 GiB"), ("c", 2, 1, 0.15, "1 GiB")], a_b="40 MB/s", b_c="20 MB/s"
    ),
    "3:1, nodes of 2": emulated_cluster(
        [("fast", 1, 2, 0.5, "1 GiB"), ("slow", 1, 2, 0.17, "1 GiB")], fast_slow="25 MB/s"
    ),
    "3:1, 2+2, small memory": emulated_cluster(
        [("fast", 2, 1, 0.6, "101 MiB"), ("slow", 2, 1, 0.2, "92 MiB")], fast_slow="25 MB/s"
    ),
    "2:1, 2+6": emulated_cluster([("fast", 2, 1, 0.3, "1 GiB"), ("slow", 6, 1, 0.15, "1 GiB")], fast_slow="25 MB/s"),
}  # fmt: skip


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    work = {
        "model": MODEL, "seq_length": SEQ_LENGTH, "batch": BATCH, "steps": args.steps,
        "calibration_steps": 1 if args.chips == "clock" else 3,
    }  # fmt: skip
    return run_job(name, "testbed_job.py", CLUSTERS[name], work, args.chips, args.links, args.verbose)


def report(name: str, found: dict[str, Any]) -> dict[str, float]:
    """Print the table of one cluster; its key figures."""
    print(f"\n### {name} ({notes(found)})\n\n| plan | predicted s | measured s | spread | error |")
    print("|---|---|---|---|---|")
    errors, best = [], {}
    for row in found["rows"]:
        error = row["predicted"] / row["measured"] - 1
        errors.append(abs(error))
        spread = (max(row["steps"]) - min(row["steps"])) / row["measured"]
        best[row["kind"]] = min(best.get(row["kind"], math.inf), row["measured"])
        print(f"| {row['name']} | {row['predicted']:.3f} | {row['measured']:.3f} | {spread:.1%} | {error:+.1%} |")
    ceiling = speed_ceiling(CLUSTERS[name])
    alone = [row["measured"] for row in found["rows"] if row["kind"] == "alone"]
    figures = {"mean": sum(errors) / len(errors), "worst": max(errors), "plans": len(errors)}
    if "uniform" in best:
        figures["uniform"] = best["uniform"] / best["planner"]
        figures["ceiling"] = figures["uniform"] / ceiling
    if alone:
        figures["type alone"] = min(alone) / best["planner"]
        figures["hethub"] = 1 / best["planner"] / sum(1 / s for s in alone)
    share, total = figures.get("ceiling", 0), len(CLUSTERS[name]["chips"])
    text = {
        "uniform": f"best uniform {figures.get('uniform', 0):.2f}x slower ({share:.0%} of the ceiling {ceiling:.2f})",
        "type alone": f"best type alone {figures.get('type alone', 0):.2f}x slower",
        "hethub": f"{figures.get('hethub', 0):.1%} of the sum of the types alone ({len(alone)} of {total} types can)",
    }
    print("\n" + "; ".join(text[k] for k in text if k in figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="clock", choices=("clock", "soft", "quota"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--only", nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; chips {args.chips}, links {args.links}, {args.steps} steps")
    print(f"model {MODEL['num_layers']} layers x {MODEL['hidden_size']}, {SEQ_LENGTH} tokens, batch {BATCH}")
    found, figures = {}, {}
    for name in args.only:
        found[name] = measure(name, args)
        figures[name] = report(name, found[name])
    count = sum(f["plans"] for f in figures.values())
    mean = sum(f["mean"] * f["plans"] for f in figures.values()) / count
    ratios = [f["uniform"] for f in figures.values() if "uniform" in f]
    geometric = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")
    worst = max(f["worst"] for f in figures.values())
    print(f"\n{int(count)} plans on {len(figures)} clusters: prediction error mean {mean:.1%}, worst {worst:.1%}")
    print(f"planner / best uniform: {geometric:.2f}x (geometric mean)")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
