"""Uneven expert parallelism against equal one, on clusters of two chip types that the testbed emulates.

    python benchmarks/bench_testbed_experts.py [--only NAME …] [--chips clock|soft] [--links …] [--out FILE]

For each cluster, in one run: chips, links and experts are calibrated, routing is measured, and these plans run: the
planner's; the best that divides the experts of all layers over all chips by speed, the same with equal experts, and
with equal sequences too; the two best uniform plans. Goals: uneven over equal experts at least 1.3 x (geometric mean),
predictions within 4 % (mean).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job

HF_CONFIG = {
    "model_type": "mixtral", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 1024, "num_local_experts": 16,
    "num_experts_per_tok": 2, "vocab_size": 257, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
WORK = {"hf_config": HF_CONFIG, "seq_length": 128, "batch": 16, "sizes": [4, 16], "steps": 2, "warm_up": 2}


def two_types(fast: tuple[int, int, float], slow: tuple[int, int, float], between: str) -> dict[str, Any]:
    """Each (nodes, chips per node, speed)."""
    return emulated_cluster([("fast", *fast, "1 GiB"), ("slow", *slow, "1 GiB")], between, fast_slow=between)


CLUSTERS = {
    "3:1, 2+2": two_types((2, 1, 0.24), (2, 1, 0.08), "200 MB/s"),
    "3:1, 1+1": two_types((1, 1, 0.3), (1, 1, 0.1), "200 MB/s"),
    "3:1, 1+2": two_types((1, 1, 0.3), (2, 1, 0.1), "200 MB/s"),
    "3:1, nodes of 2": two_types((1, 2, 0.24), (1, 2, 0.08), "100 MB/s"),
}


def report(name: str, found: dict[str, Any]) -> dict[str, float]:
    """Print the table of one cluster; its key figures."""
    print(f"\n### {name} ({notes(found)})\n")
    print("| plan | predicted s | measured s | spread | late | error |\n|---|---|---|---|---|---|")
    best: dict[str, float] = {}
    errors = []
    for row in found["rows"]:
        error = row["predicted"] / row["measured"] - 1
        errors.append(abs(error))
        best[row["kind"]] = min(best.get(row["kind"], math.inf), row["measured"])
        spread = (max(row["steps"]) - min(row["steps"])) / row["measured"]
        times = f"{row['predicted']:.3f} | {row['measured']:.3f} | {spread:.1%} | {row['late']:.1%}"
        print(f"| {row['name']} | {times} | {error:+.1%} |")
    figures = {"error": sum(errors) / len(errors), "plans": len(errors)}
    for key, kind, over in (
        ("over equal", "uneven", "equal"),
        ("over all equal", "uneven", "all equal"),
        ("over uniform", "planner", "uniform"),
    ):
        if kind in best and over in best:
            figures[key] = best[over] / best[kind]
    print("\n" + "; ".join(f"{k} {v:.2f}x" for k, v in figures.items() if k.startswith("over")), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="clock", choices=("clock", "soft"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=CLUSTERS, help="some of the clusters")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; chips {args.chips}, links {args.links}, {WORK['steps']} steps")
    found, figures = {}, {}
    for name in args.only or CLUSTERS:
        how = args.chips, args.links, args.verbose
        found[name] = run_job(name, "testbed_experts_job.py", CLUSTERS[name], WORK, *how)
        figures[name] = report(name, found[name])
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1))
    count = sum(f["plans"] for f in figures.values())
    mean = sum(f["error"] * f["plans"] for f in figures.values()) / count
    print(f"\n{int(count)} plans on {len(figures)} clusters: error mean {mean:.1%}")
    for key in ("over equal", "over all equal", "over uniform"):
        ratios = [f[key] for f in figures.values() if key in f]
        if ratios:
            print(f"{key}: {geometric_mean(ratios):.2f}x (geometric mean of {len(ratios)})")


if __name__ == "__main__":
    main()
