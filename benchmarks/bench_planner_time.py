"""Time and memory of the planner's search on large clusters, and of planning again after a loss.

First the simulation of one long pipeline. Each size runs in a process of its own, with the options that the ``plan``
command has by default (``--top``: another number of candidates to predict). All but the first column are CPU seconds
of one thread: search; exact prediction where the search did not wait for it; the comparisons of the command's report,
and their share of the search's seconds; planning again after two nodes were lost (nothing prepared for that), preparing
for the loss of any one node, and planning again after that loss; the comparisons of ``plan --compare``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine, peak_rss

CHIPS = ("A100-80-SXM", "H100-SXM", "MI300X", "Ascend-910B", "Gaudi2", "L40S")
# name: (chip types, nodes of 8 per type, model, sequences per step, seconds allowed)
SIZES: dict[str, tuple[int, int, str, int, float]] = {
    "128 chips of 2 types": (2, 8, "llama2-13b", 512, 0.5),
    "1,024 chips of 4 types": (4, 32, "llama2-70b", 1024, 5.0),
    "768 chips of 6 types": (6, 16, "llama2-70b", 1024, 10.0),
    "10,240 chips of 4 types": (4, 320, "llama2-70b", 4096, 30.0),
}


STAGES, MICRO_BATCHES, SIMULATED, REPLANNED = 64, 1024, 0.5, 0.1  # the last two: seconds allowed


def run(name: str, top: int | None) -> dict[str, Any]:
    """Search one cluster; seconds without imports."""
    from hetero_megatron.cluster import cluster_from_dict
    from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
    from hetero_megatron.planner.report.comparison import Comparisons, summarize, text_of
    from hetero_megatron.planner.whatif.replan import WarmPlanner
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
    options = SearchOptions() if top is None else SearchOptions(top=top)
    spec = load_model(model)
    wall, cpu = time.perf_counter(), time.process_time()
    planner = WarmPlanner(PlanningProblem(spec, cluster, 4096, batch, options))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rss = peak_rss()
    best = planner.result.best
    predict_cpu = time.process_time()
    mfu = best.prediction.mfu  # on very large clusters predicted only now
    predict_cpu = time.process_time() - predict_cpu
    rss_predicted = peak_rss()
    report_cpu = time.process_time()
    summarize(planner.result, PlanningProblem(spec, cluster, 4096, batch, options))
    report_cpu = time.process_time() - report_cpu
    again_cpu = time.process_time()
    planner.without([cluster.ranks[0].node, cluster.ranks[-1].node])  # nothing was prepared for this
    again_cpu = time.process_time() - again_cpu
    prepare_cpu = time.process_time()
    planner.prepare()
    prepare_cpu = time.process_time() - prepare_cpu
    prepared_cpu = time.process_time()
    _, _, step = planner.without([cluster.ranks[0].node])
    prepared_cpu = time.process_time() - prepared_cpu
    compare_cpu = time.process_time()
    summarize(planner.result, PlanningProblem(spec, cluster, 4096, batch, options), Comparisons(every=True))
    compare_cpu = time.process_time() - compare_cpu
    return {
        "predicted": 1 + len(planner.result.others), "report_cpu": report_cpu, "compare_cpu": compare_cpu,
        "wall": wall, "cpu": cpu, "rss": rss, "rss_predicted": rss_predicted, "step": best.step_seconds,
        "again_cpu": again_cpu, "prepare_cpu": prepare_cpu, "prepared_cpu": prepared_cpu, "again_step": step,
        "predict_cpu": predict_cpu, "mfu": mfu,
        "plan": text_of(best.template, [g.chip for g in planner.result.pool.groups]),
    }  # fmt: skip


def simulation() -> tuple[float, float]:
    """(median, worst) wall seconds of five simulations of a long pipeline, its schedule included."""
    from hetero_megatron.schedule import Costs, lowered, simulate

    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        simulate(lowered("1f1b", STAGES, MICRO_BATCHES), Costs([1.0] * STAGES, [2.0] * STAGES, [0.1] * (STAGES - 1)))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), max(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SIZES, help="one size")
    parser.add_argument("--top", type=int, metavar="N", help="candidates predicted at most; default: as the command")
    parser.add_argument("--inside", choices=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(run(args.inside, args.top)))
        return
    print(machine())
    median, worst = simulation()
    print(
        f"simulation of {STAGES} stages and {MICRO_BATCHES:,} micro-batches: median of 5 {median:.3f} s, worst "
        f"{worst:.3f} s (goal < {SIMULATED} s)",
        flush=True,
    )
    again: list[tuple[float, float]] = []
    heads = (
        "wall s", "CPU s", "allowed", "peak MB", "judged", "predict", "peak MB", "report", "of it",
        "lost 2", "prepare", "lost 1", "compare",
    )  # fmt: skip
    print(f"{'cluster':<26}" + "".join(f"{head:>9}" for head in heads) + "   plan")
    for name in [args.only] if args.only else SIZES:
        words = [sys.executable, __file__, "--inside", name, *(("--top", str(args.top)) if args.top else ())]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        r = json.loads(done.stdout.strip().splitlines()[-1])
        again.append((r["prepared_cpu"], r["again_cpu"]))
        row: tuple[Any, ...] = (r["wall"], r["cpu"], SIZES[name][4], r["rss"] / 1e6, r["predicted"], r["predict_cpu"])
        row += (r["rss_predicted"] / 1e6, r["report_cpu"], r["report_cpu"] / r["cpu"], r["again_cpu"], r["prepare_cpu"])
        row += (r["prepared_cpu"], r["compare_cpu"])
        print(
            f"{name:<26}"
            + "".join(f"{x:>9.0f}" if x > 99 or isinstance(x, int) else f"{x:>9.3f}" for x in row)
            + f"   {r['step']:.3f} s, MFU {r['mfu'] or 0:.1%}: {r['plan']}",
            flush=True,
        )
    one, two = (max(column) for column in zip(*again))
    print(f"planning again from a warm state, a node lost: worst {one:.3f} s (goal < {REPLANNED} s); two: {two:.3f} s")


if __name__ == "__main__":
    main()
