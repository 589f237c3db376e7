"""Time and memory of the planner's search on large clusters (issue 4, proof 6), and of planning again after a loss.

Each size runs in a process of its own. Wall-clock and CPU seconds are both printed: on a busy machine they differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from common import machine, peak_rss

CHIPS = ("A100-80-SXM", "H100-SXM", "MI300X", "Ascend-910B", "Gaudi2", "L40S")
# name: (chip types, nodes of 8 per type, model, sequences per step, seconds allowed)
SIZES: dict[str, tuple[int, int, str, int, float]] = {
    "128 chips of 2 types": (2, 8, "llama2-13b", 512, 0.5),
    "1,024 chips of 4 types": (4, 32, "llama2-70b", 1024, 5.0),
    "768 chips of 6 types": (6, 16, "llama2-70b", 1024, 10.0),
    "10,240 chips of 4 types": (4, 320, "llama2-70b", 4096, 30.0),
}


def run(name: str) -> dict[str, Any]:
    """Search one cluster; seconds without imports."""
    from hetero_megatron.cluster import cluster_from_dict
    from hetero_megatron.planner.replan import Planner
    from hetero_megatron.planner.search import SearchOptions
    from hetero_megatron.planner.summary import text_of
    from hetero_megatron.spec import load_model

    types, nodes, model, batch, _ = SIZES[name]
    cluster = cluster_from_dict(
        {
            "nodes": [
                {"name": f"n{i}", "chip": c, "count": nodes, "chips_per_node": 8} for i, c in enumerate(CHIPS[:types])
            ],
            "links": {"inter_node": {"bandwidth": "200 GB/s", "latency": "10 us"}},
        }
    )
    wall, cpu = time.perf_counter(), time.process_time()
    planner = Planner(load_model(model), cluster, 4096, batch, SearchOptions(top=2))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    again, again_cpu = time.perf_counter(), time.process_time()
    _, _, step = planner.without([cluster.ranks[0].node])
    again, again_cpu = time.perf_counter() - again, time.process_time() - again_cpu
    best = planner.result.best
    return {
        "wall": wall, "cpu": cpu, "rss": peak_rss(), "step": best.step_seconds, "again": again, "again_cpu": again_cpu,
        "again_step": step, "mfu": best.prediction.mfu,
        "plan": text_of(best.candidate, [g.chip for g in planner.result.pool.groups]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SIZES, help="one size")
    parser.add_argument("--inside", choices=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(run(args.inside)))
        return
    print(machine())
    print(f"{'cluster':<26}{'wall s':>8}{'CPU s':>8}{'allowed':>9}{'peak MB':>9}{'again s':>9}{'CPU s':>7}   plan")
    for name in [args.only] if args.only else SIZES:
        done = subprocess.run([sys.executable, __file__, "--inside", name], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        r = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"{name:<26}{r['wall']:>8.2f}{r['cpu']:>8.2f}{SIZES[name][4]:>9.1f}{r['rss'] / 1e6:>9.0f}{r['again']:>9.3f}"
            f"{r['again_cpu']:>7.3f}   {r['step']:.3f} s, MFU {r['mfu'] or 0:.1%}: {r['plan']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
