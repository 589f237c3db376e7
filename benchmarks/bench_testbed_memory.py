"""Weights divided by memory against equal shares and none, on emulated clusters whose memory is unlike their speed.

    python benchmarks/bench_testbed_memory.py [--only NAME …] [--links namespaces|paced] [--predict] [--out FILE]

The fast cards are the small ones: 24 beside 48 GiB (and 16), here in MiB beside what the process takes, for a model
whose state takes half of the memory of the cluster. For each cluster, in one run: chips and links are calibrated, and
these plans run: the planner's; the best of those that divide weights by room, and of those that divide them equally, if
any fits; the best of all that do not divide them (pipelines, TP, recompute, shares of the optimizer, activations in
host memory). ``--predict``: plans are chosen at assumed rates of the chips, and none runs. Goals: at least 1.3 x
(geometric mean) over the best equal division and over the best without, never slower than either; predictions within
4 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_memory_job import choose
from benchmarks.testbed_run import emulated_cluster, notes, run_job
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.spec import ModelSpec

MODEL = {
    "name": "bench", "hf_model_type": "llama", "num_layers": 32,
    "hidden_size": 160, "ffn_hidden_size": 432, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 20, "vocab_size": 257, "max_position_embeddings": 2048,
}  # fmt: skip
WORK = {"seq_length": 64, "sizes": [1, 4], "steps": 2, "long_steps": 1, "calibration_steps": 1}
OVERHEAD, MARGIN = 64, 0.06  # MiB of a process, and share of memory that the planner keeps free

# A layer takes about as long to travel, beside what a sequence of it computes, as one of 8B with 4,096 tokens on a 4090
# over PCIe 4 (in a box), over 100 Gbit/s (between boxes), and to the host over PCIe 4.
BOX, NETWORK, HOST = "100 MB/s", "50 MB/s", "50 MB/s"


def cards(*types: tuple[str, int, int, float, int], inter: str) -> dict[str, Any]:
    """Each (name, nodes, chips per node, speed, usable MiB)."""
    rows = [(n, c, k, s, f"{(size + OVERHEAD) / (1 - MARGIN):.1f} MiB") for n, c, k, s, size in types]
    cluster = emulated_cluster(rows, inter)
    for chip in cluster["chips"].values():
        chip["host_bandwidth"] = HOST
    return cluster


@dataclass(frozen=True)
class Case:
    """``batch``: can be divided by speed."""

    cluster: dict[str, Any]
    layers: int = 36
    batch: int = 96


CASES = {
    "4 x 24 + 4 x 48": Case(cards(("small", 4, 1, 0.12, 24), ("large", 4, 1, 0.06, 48), inter=BOX)),
    "two boxes": Case(cards(("small", 1, 4, 0.12, 24), ("large", 1, 4, 0.06, 48), inter=NETWORK)),
    "2 x 16 + 2 x 24 + 2 x 48": Case(
        cards(("small", 2, 1, 0.2, 16), ("middle", 2, 1, 0.1, 24), ("large", 2, 1, 0.05, 48), inter=BOX),
        layers=24, batch=84,
    ),
}  # fmt: skip
OVERS = ("equal shares", "not divided")


def report(name: str, case: Case, found: dict[str, Any]) -> dict[str, float]:
    """Print the table of one cluster; its key figures."""
    print(f"\n### {name} ({case.layers} layers, batch {case.batch}; {notes(found)})\n")
    print("| plan | predicted s | measured s | late | error |\n|---|---|---|---|---|")
    best, errors = dict[str, float](), list[float]()
    for row in found["rows"]:
        error = row["predicted"] / row["measured"] - 1
        errors.append(abs(error))
        best |= dict.fromkeys(row["kinds"], row["measured"])
        times = f"{row['predicted']:.3f} | {row['measured']:.3f} | {row['late']:.1%}"
        print(f"| {', '.join(row['kinds'])}: {row['name']} | {times} | {error:+.1%} |")
    figures = {over: best[over] / best["planner"] for over in OVERS if over in best}
    words = [f"{k} {figures[k]:.2f}x" if k in figures else f"{k}: none fits" for k in OVERS]
    print("\nplanner's plan over " + "; ".join(words), flush=True)
    return {**figures, "mean": sum(errors) / len(errors), "worst": max(errors), "plans": len(errors)}


def predict(name: str, case: Case, work: dict[str, Any]) -> None:
    """Print what is predicted of the plans of one cluster."""
    print(f"\n### {name} ({case.layers} layers, batch {case.batch}; predicted at assumed rates)\n")
    for facts, _ in choose(cluster_from_dict(case.cluster), ModelSpec(**work["model"]), work):
        print(f"| {', '.join(facts['kinds'])}: {facts['name']} | {facts['predicted']:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced"))
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=CASES, help="some of the clusters")
    parser.add_argument("--predict", action="store_true", help="choose plans at assumed rates, and run none")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; chips clock, links {args.links}, {WORK['steps']} steps")
    found, figures = {}, {}
    for name in args.only or CASES:
        case = CASES[name]
        work = {"model": {**MODEL, "num_layers": case.layers}, "batch": case.batch, **WORK}
        if args.predict:
            predict(name, case, work)
            continue
        found[name] = run_job(name, "testbed_memory_job.py", case.cluster, work, "clock", args.links, args.verbose)
        figures[name] = report(name, case, found[name])
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1))
    if args.predict:
        return
    count = sum(f["plans"] for f in figures.values())
    mean = sum(f["mean"] * f["plans"] for f in figures.values()) / count
    worst = max(f["worst"] for f in figures.values())
    print(f"\n{int(count)} plans on {len(figures)} clusters: error mean {mean:.1%}, worst {worst:.1%}")
    for over in OVERS:
        ratios = [f[over] for f in figures.values() if over in f]
        if ratios:
            mean = geometric_mean(ratios)
            print(f"over {over}: {mean:.2f}x (geometric mean of {len(ratios)}), least {min(ratios):.2f}x")


if __name__ == "__main__":
    main()
