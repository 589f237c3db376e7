"""Asymmetric context x head plans against equal Ring, Ulysses and USP, on clusters emulated by the testbed.

    python benchmarks/bench_context_testbed.py [--clusters NAME …] [--links namespaces|paced] [--out FILE]

For each cluster, in one run: chips and links are calibrated; the context scheduler's plan and the best equal-share
layouts of every kind (all legal ones are enumerated and ranked by the scheduler's model; ``--each`` of every kind run)
train some steps, all by the same runtime, with the same loss. Prints step times, the ratio of the best equal one to
ours, and the ceiling mean(speed) / min(speed).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job, speed_ceiling

MODEL = {
    "name": "long", "hf_model_type": "llama", "num_layers": 1,
    "hidden_size": 128, "ffn_hidden_size": 256, "num_heads": 12,
    "num_kv_heads": 4, "head_dim": 16, "vocab_size": 257, "max_position_embeddings": 1 << 16,
}  # fmt: skip
SAME_LOSS = 1e-5  # relative; all layouts start from the same weights, in fp32

CLUSTERS = {
    "3:1, 2+2": emulated_cluster([("fast", 2, 1, 0.6, "1 GiB"), ("slow", 2, 1, 0.2, "1 GiB")], fast_slow="25 MB/s"),
    "2:1, 1+3": emulated_cluster([("fast", 1, 1, 0.6, "1 GiB"), ("slow", 3, 1, 0.3, "1 GiB")], fast_slow="25 MB/s"),
    "2:1, 2+4": emulated_cluster([("fast", 2, 1, 0.4, "1 GiB"), ("slow", 4, 1, 0.2, "1 GiB")], fast_slow="25 MB/s"),
    "3:1, nodes of 2": emulated_cluster(
        [("fast", 1, 2, 0.6, "1 GiB"), ("slow", 1, 2, 0.2, "1 GiB")], fast_slow="25 MB/s"
    ),
    "2:1, nodes of 3": emulated_cluster(
        [("fast", 1, 3, 0.34, "1 GiB"), ("slow", 1, 3, 0.17, "1 GiB")], fast_slow="25 MB/s"
    ),
    "3:2, 3+2": emulated_cluster([("fast", 3, 1, 0.36, "1 GiB"), ("slow", 2, 1, 0.24, "1 GiB")], fast_slow="20 MB/s"),
}  # fmt: skip


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    world = sum(g["count"] * g["chips_per_node"] for g in CLUSTERS[name]["nodes"])
    work = {
        "model": MODEL, "seq_length": args.seq_length, "batch": args.batch, "steps": args.steps, "each": args.each,
        "calibration_steps": 1, "calibration_length": args.seq_length // (2 * world),
        "attention_lengths": [args.seq_length // 8, args.seq_length // 4],
    }  # fmt: skip
    return run_job(name, "testbed_context_job.py", CLUSTERS[name], work, args.chips, args.links, args.verbose)


def report(name: str, found: dict[str, Any]) -> dict[str, float]:
    """Print the table of one cluster; its key figures."""
    rows = found["rows"]
    print(f"\n### {name} ({notes(found)}; {rows[0]['legal']} equal layouts are legal)\n")
    print(
        "| kind | layout | predicted s | measured s | spread | computed s, least to most | loss |\n" + "|---" * 7 + "|"
    )
    for row in rows:
        spread = (max(row["steps"]) - min(row["steps"])) / row["measured"]
        print(
            f"| {row['kind']} | {row['name']} | {row['predicted']:.3f} | {row['measured']:.3f} | {spread:.1%} | "
            f"{min(row['computed']):.3f} to {max(row['computed']):.3f} | {row['losses'][0]:.6f} |"
        )
        for got, want in zip(row["losses"], rows[0]["losses"], strict=True):
            if not math.isclose(got, want, rel_tol=SAME_LOSS):
                raise SystemExit(f"{name}: {row['name']} has loss {got}, {rows[0]['name']} {want}")
    ours, *equal = rows
    best = min(equal, key=lambda row: row["measured"])
    ratio, ceiling = best["measured"] / ours["measured"], speed_ceiling(CLUSTERS[name])
    # What chips computed does not depend on other work on the machine, nor on how long messages took.
    computed = min(max(row["computed"]) for row in equal) / max(ours["computed"])
    print(
        f"\nbest equal ({best['name']}) / asymmetric: {ratio:.3f}x; ceiling {ceiling:.2f}, share {ratio / ceiling:.1%} "
        f"(by what the busiest chip computed alone: {computed:.3f}x, {computed / ceiling:.1%})",
        flush=True,
    )
    return {"ratio": ratio, "ceiling": ceiling, "share": ratio / ceiling, "computed": computed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--chips", default="clock", choices=("clock", "soft"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--steps", type=int, default=2, help="measured per layout, after a first one")
    parser.add_argument("--each", type=int, default=2, help="equal layouts of every kind that run")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    print(f"{machine()}; chips {args.chips}, links {args.links}, {args.steps} steps")
    print(f"model {MODEL['num_layers']} layers x {MODEL['hidden_size']}, {MODEL['num_heads']} heads, "
          f"{MODEL['num_kv_heads']} key-value heads of {MODEL['head_dim']}; {args.seq_length} tokens")  # fmt: skip
    found, figures = {}, {}
    for name in args.clusters:
        found[name] = measure(name, args)
        figures[name] = report(name, found[name])
    ratios = [f["ratio"] for f in figures.values()]
    geometric = geometric_mean(ratios)
    shares = [f["share"] for f in figures.values()]
    print(
        f"\n{len(ratios)} clusters: best equal / asymmetric {geometric:.3f}x geometric mean (arithmetic "
        f"{sum(ratios) / len(ratios):.3f}x), worst {min(ratios):.3f}x; share of the ceiling "
        f"{sum(shares) / len(shares):.1%} mean, {min(shares):.1%} worst; losses equal to {SAME_LOSS:g}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
