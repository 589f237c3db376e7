"""More chips are never slower: plans of random clusters of 7 to 20 chips beside those of their parts, by whole nodes.

    python benchmarks/bench_more_chips.py [--first N] [--count N]

A part is the cluster with fewer nodes of some groups. Schedules are left at 1F1B, so that only the division of work is
compared. A cluster with a faster part is named with its parts, worst first; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.spec import ModelSpec, load_model

CHIPS = ("A100-40-SXM", "A100-80-SXM", "H100-SXM", "RTX4090", "V100-32-SXM2", "A10G", "RTX3090", "L40S", "T4")
MODELS = ("llama2-7b", "gpt2", "llama3-8b", "llama2-13b")
FEWEST, MOST = 7, 20  # chips
OPTIONS = SearchOptions(space=SearchSpace(more_schedules="never"))


def seconds(nodes: list[dict[str, Any]], link: dict[str, str], model: ModelSpec, length: int, batch: int) -> float:
    """Of a step under the best plan; infinite where nothing fits."""
    cluster = cluster_from_dict({"nodes": nodes, "links": {"inter_node": link}})
    try:
        return search(PlanningProblem(model, cluster, length, batch, OPTIONS)).best.step_seconds
    except UserError:
        return float("inf")


def compare(seed: int) -> tuple[str, list[tuple[float, str]]] | None:
    """(the case, its faster parts with by how much, worst first); None: no cluster of this size."""
    rng = random.Random(seed)
    sizes = [(rng.choice(CHIPS), rng.randint(1, 3), rng.choice((1, 2, 4))) for _ in range(rng.choice((2, 2, 3)))]
    nodes: list[dict[str, Any]] = [
        {"name": f"n{i}", "chip": chip, "count": count, "chips_per_node": each}
        for i, (chip, count, each) in enumerate(sizes)
    ]
    link = {"bandwidth": f"{rng.choice((1, 12, 25))} GB/s", "latency": "20 us"}
    model, length, batch = load_model(rng.choice(MODELS)), rng.choice((1024, 4096)), rng.choice((16, 32, 48, 128))
    if not FEWEST <= sum(node["count"] * node["chips_per_node"] for node in nodes) <= MOST:
        return None
    whole, faster = seconds(nodes, link, model, length, batch), []
    every = [node["count"] for node in nodes]
    for counts in itertools.product(*(range(n + 1) for n in every)):
        part = [{**node, "count": n} for node, n in zip(nodes, counts) if n]
        if part and list(counts) != every and (took := seconds(part, link, model, length, batch)) < whole * (1 - 1e-9):
            faster.append((whole / took, " + ".join(map(shown, part))))
    case = f"{' + '.join(map(shown, nodes))}, {link['bandwidth']}, {model.name}, {batch} x {length}: {whole:.4g} s"
    return case, sorted(faster, reverse=True)


def shown(node: dict[str, Any]) -> str:
    return f"{node['count']} x {node['chips_per_node']} {node['chip']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="seed of the first cluster (default: 0)")
    parser.add_argument("--count", type=int, default=24, help="seeds (default: 24; some have no cluster of this size)")
    options = parser.parse_args()
    print(machine())
    worst, compared, lost, cpu = 1.0, 0, 0, time.process_time()
    for seed in range(options.first, options.first + options.count):
        if (found := compare(seed)) is None:
            continue
        case, faster = found
        compared, lost = compared + 1, lost + bool(faster)
        worst = max(worst, *(ratio for ratio, _ in faster), 1.0)
        print(f"{seed:>4}  {case}", flush=True)
        for ratio, part in faster[:3]:
            print(f"      {ratio:.4f} x faster: {part}", flush=True)
    cpu = time.process_time() - cpu
    print(f"{lost} of {compared} clusters have a faster part, at worst {worst:.4f} x; {cpu:.0f} CPU s")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
