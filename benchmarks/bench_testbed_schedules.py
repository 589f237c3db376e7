"""Pipeline schedules, measured on clusters of 3 to 6 unlike chips that the testbed emulates.

    python benchmarks/bench_testbed_schedules.py [--chips clock|soft] [--links namespaces|paced] [--only NAME …]
                                                 [--slower N] [--out FILE]

For each cluster, in one run: chips and links are calibrated, then one pipeline over all chips runs for some steps under
1F1B, interleaved, zero-bubble and adaptive schedules, the last two over one range of layers per stage and over several
chunks, each with the layers that are best for it. Prints predicted beside measured step times, and the adaptive
schedule that is predicted to be faster over 1F1B and over the best of the others. ``--slower``: chips and links are
all so many times as slow, for machines whose cores have other work and so could not keep up with the chips.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_testbed import MODEL, MODES, error_of
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job

SPEEDS = {
    "3 stages": (0.6, 0.4, 0.25),
    "4 stages": (0.5, 0.5, 0.25, 0.2),
    "6 stages": (0.35, 0.35, 0.25, 0.2, 0.15, 0.15),
}
LINKS = {"fast links": 100, "slow links": 15}  # MB/s
LAYERS = 3  # per stage, in the mean


def cases(slower: float = 1.0) -> dict[str, dict[str, Any]]:
    """Name to ``cluster``, ``layers`` and ``batch``: as many micro-batches as stages, and twice as many."""
    found = {}
    for stages, speeds in SPEEDS.items():
        for links, rate in LINKS.items():
            groups = [(f"c{i}", 1, 1, speed / slower, "1 GiB") for i, speed in enumerate(speeds)]
            for times in (1, 2):
                name = f"{stages}, m = {'' if times == 1 else times}p, {links}"
                found[name] = {
                    "cluster": emulated_cluster(groups, f"{rate / slower:g} MB/s"), "layers": LAYERS * len(speeds),
                    "batch": times * len(speeds),
                }  # fmt: skip
    return found


def measure(case: dict[str, Any], name: str, args: argparse.Namespace) -> dict[str, Any]:
    work = {
        **MODES[args.chips], "model": {**MODEL, "num_layers": case["layers"]}, "batch": case["batch"],
        "kinds": ["schedules"], "sizes": [1], "steps": 3, "long_steps": 3, "warm_up": 1,
    }  # fmt: skip
    return run_job(name, "testbed_job.py", case["cluster"], work, args.chips, args.links, args.verbose)


def report(case: dict[str, Any], name: str, found: dict[str, Any], chips: str) -> tuple[float, float, list[float]]:
    """Print the table of a cluster: (1F1B / adaptive, best other / adaptive, errors of predictions)."""
    print(f"\n### {name} ({case['layers']} layers, batch {case['batch']}; {notes(found)})\n")
    print(f"| schedule | layers | predicted s | measured s | spread | late | {error_of(chips)} | over 1F1B |")
    print("|---|---|---|---|---|---|---|---|")
    measured = {row["kind"]: row["measured"] for row in found["rows"]}
    errors = []
    for row in found["rows"]:
        errors.append(row["predicted"] / row["measured"] - 1)
        spread = (max(row["steps"]) - min(row["steps"])) / row["measured"]
        layers = " ".join(_length(stage["layers"]) for stage in row["plan"]["pipelines"][0]["stages"])
        times = f"{row['predicted']:.3f} | {row['measured']:.3f} | {spread:.1%} | {row['late']:.1%}"
        ratio = measured["1f1b"] / row["measured"]
        print(f"| {row['name']} | {layers} | {times} | {errors[-1]:+.1%} | {ratio:.3f}x |", flush=True)
    made = [row for row in found["rows"] if row["kind"].startswith("adaptive")]
    # Where none beats 1F1B it is 1F1B.
    adaptive = min(made, key=lambda row: row["predicted"])["measured"] if made else measured["1f1b"]
    others = min(seconds for kind, seconds in measured.items() if not kind.startswith("adaptive"))
    return measured["1f1b"] / adaptive, others / adaptive, errors


def _length(layers: list[Any]) -> str:
    runs = layers if isinstance(layers[0], list) else [layers]
    return "+".join(str(b - a) for a, b in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="clock", choices=("clock", "soft"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--only", nargs="*", metavar="NAME", default=list(cases()), choices=list(cases()))
    parser.add_argument("--slower", type=float, default=1.0, metavar="N")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; chips {args.chips}, links {args.links}, {args.slower:g} times as slow, 3 steps")
    found, rows = {}, []
    for name in args.only:
        case = cases(args.slower)[name]
        found[name] = measure(case, name, args)
        rows.append(report(case, name, found[name], args.chips))
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1))
    over, others, errors = zip(*rows)
    every = [abs(error) for row in errors for error in row]
    mean = geometric_mean(over)
    print(f"\n{len(rows)} clusters: adaptive over 1F1B {mean:.3f}x (geometric mean), lowest {min(over):.3f}x; over the "
          f"best other lowest {min(others):.3f}x; {error_of(args.chips)} mean {sum(every) / len(every):.1%}, worst "
          f"{max(every):.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
