"""Testbed with namespaces: rates of links asked against measured, each way, and the latency that comes with it.

    python benchmarks/bench_testbed_links.py [--repeats 3] [--seconds 0.3]

Ranks exchange plain TCP messages, no torch, one pair at a time. Each repeat is a testbed of its own. Every message
lasts ``seconds`` at the rate asked; a rate is the median of 3 messages, from the receiver's first byte to its last.
Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine, median
from benchmarks.testbed_run import ROOT, run_testbed
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.testbed.machine import examine
from hetero_megatron.testbed.settings import decide, describe_links

MESSAGES = 3
GOAL = 0.05


def cluster(groups: list[tuple[str, int, int]], inter: str, **pairs: str) -> dict[str, Any]:
    """Groups are (name, nodes, chips per node); pairs are a_b="25 MB/s"."""
    return {
        "version": 1,
        "nodes": [{"name": n, "count": c, "chips_per_node": k, "chip": f"chip-{n}"} for n, c, k in groups],
        "chips": {f"chip-{n}": {"memory": "1 GiB"} for n, _, _ in groups},
        "links": {
            "inter_node": {"bandwidth": inter},
            "pairs": [{"between": key.split("_"), "bandwidth": rate} for key, rate in pairs.items()],
        },
    }


CLUSTERS = {
    "2 ranks, one slow link": cluster([("a", 1, 1), ("b", 1, 1)], "5 MB/s"),
    "2 ranks, one fast link": cluster([("a", 1, 1), ("b", 1, 1)], "200 MB/s"),
    "3 ranks, all alike": cluster([("a", 3, 1)], "25 MB/s"),
    "4 ranks, slow between types": cluster([("fast", 2, 1), ("slow", 2, 1)], "50 MB/s", fast_slow="25 MB/s"),
    "4 ranks, 1:20": cluster([("fast", 2, 1), ("slow", 2, 1)], "100 MB/s", fast_slow="5 MB/s"),
    "4 ranks on 2 nodes": cluster([("fast", 1, 2), ("slow", 1, 2)], "40 MB/s"),
    "6 ranks, three types": cluster(
        [("a", 2, 1), ("b", 2, 1), ("c", 2, 1)], "80 MB/s", a_b="40 MB/s", b_c="20 MB/s", a_c="10 MB/s"
    ),
    "8 ranks on 4 nodes": cluster([("fast", 2, 2), ("slow", 2, 2)], "60 MB/s", fast_slow="12 MB/s"),
    "8 ranks on 8 nodes": cluster(
        [("fast", 4, 1), ("slow", 4, 1)], "50 MB/s", fast_slow="25 MB/s", slow_slow="15 MB/s"
    ),
}


def measure(name: str, description: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """One testbed: a row per direction of each pair of groups, and whether something else was running."""
    settings = decide(cluster_from_dict(description), examine(), "none", "namespaces")
    first = {node: rank for rank, node in reversed(list(enumerate(settings.node_of)))}
    links = [found for found in describe_links(settings) if found[3]]
    rows: list[dict[str, Any]] = []
    for link, a, b, rate in links:
        rows += [{"link": link, "from": x, "to": y, "asked": rate} for x, y in ((a, b), (b, a))]
    pairs = [[first[r["from"]], first[r["to"]], r["to"], round(r["asked"] * seconds)] for r in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        program = ROOT / "tests" / "support" / "testbed_job.py"
        job: list[str | Path] = [program, "transfer", json.dumps(pairs), "0", str(MESSAGES), folder]
        result, _ = run_testbed(name, description, "none", "namespaces", job)
        for row, (source, destination, _, _) in zip(rows, pairs):
            measured = json.loads((path / f"rates-{destination}.json").read_text())
            row["measured"] = median(measured[f"{source}-{destination}"])
            row["latency"] = result["latency_seconds"][row["link"]]
    return rows, result["disturbed"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3)
    arguments = parser.parse_args()
    if why := examine().no_namespaces():
        print(f"skipped: {why}")
        return
    print(f"{machine()}; {arguments.repeats} repeats; rates in MB/s of payload")
    print("| cluster | link | asked | measured | spread | error | latency one way |")
    print("|---|---|---|---|---|---|---|")
    disturbed, summary, largest = 0, [], 0.0
    for name, description in CLUSTERS.items():
        repeats = []
        for _ in range(arguments.repeats):
            rows, was_disturbed = measure(name, description, arguments.seconds)
            repeats.append(rows)
            disturbed += was_disturbed
        errors, spreads = [], []
        for same in zip(*repeats):
            rates = [row["measured"] / 1e6 for row in same]
            asked, middle = same[0]["asked"] / 1e6, median(rates)
            errors.append(middle / asked - 1)
            spreads.append((max(rates) - min(rates)) / middle)
            way = f"{same[0]['link']} ({same[0]['from']} to {same[0]['to']})"
            delay = median([row["latency"] for row in same]) * 1e6
            numbers = f"{asked:g} | {middle:.2f} | {spreads[-1]:.1%} | {errors[-1]:+.1%} | {delay:.0f} us"
            print(f"| {name} | {way} | {numbers} |", flush=True)
        asked_rates = ", ".join(f"{rate / 1e6:g}" for rate in sorted({row["asked"] for row in repeats[0]}))
        most = max(errors, key=abs)
        largest = max(largest, abs(most))
        summary.append(f"| {name} | {asked_rates} | {most:+.1%} | {median(spreads):.1%} | {max(spreads):.1%} |")
    print("\n| cluster | MB/s asked | largest error of a median | median spread | largest spread |")
    print("|---|---|---|---|---|")
    print("\n".join(summary))
    print(f"largest error {largest:.1%}, goal {GOAL:.0%}: {'met' if largest <= GOAL else 'missed'}; ", end="")
    print(f"{disturbed} of {arguments.repeats * len(CLUSTERS)} testbeds with foreign load above 0.1 cores")


if __name__ == "__main__":
    main()
