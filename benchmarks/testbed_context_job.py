"""What bench_context_testbed.py runs on every rank: calibrate, schedule, run the asymmetric and the equal layouts.

One process per rank for everything, because starting ranks is what takes time. Rank 0 writes the result.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.context_equal import few_equal, kind_of
from benchmarks.testbed_job import DTYPE, Steps, begin, end, run
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.plan import plan_from_dict
from hetero_megatron.plan.dump import to_dict
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.io import one_stage_plan
from hetero_megatron.planner.context.problem import ContextOptions
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.planner.report.rates import format_rates
from hetero_megatron.planner.simulate.step import predict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.calibration import CalibrationOptions, Job, calibrate
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.loop import optimizer_factory


def main() -> None:
    work, spec, cluster, comm, world, emulation = begin()
    emulation.started()
    build = optimizer_factory(OptimizerConfig())
    # Calibrated on pipelines and attention much shorter than what is planned then.
    options = CalibrationOptions(
        work["calibration_length"], DTYPE, (1,), (1,), tuple(work["attention_lengths"]), work["calibration_steps"]
    )
    start = time.perf_counter()
    found = calibrate(Job(comm, torch.float32, build), cluster, spec, options, lambda _: None)
    took = time.perf_counter() - start
    chosen: Any = None
    if comm.rank == 0:
        print(format_rates(found.rates), flush=True)
        rated = cluster_from_dict({**work["cluster"], "rates": found.rates})
        chosen = choose(rated, spec, work["seq_length"], work["batch"], work["each"])
    rows, plans = [], world.gather_objects(chosen)[0]
    for row, data in plans:
        mine = run(plan_from_dict(data, spec, cluster), spec, comm, build, work["steps"])
        every = [s for s in world.gather_objects(mine, Steps | None) if s is not None]
        seconds = [max(s) for s in zip(*(one.seconds for one in every))]
        computed = [median(one.computed) for one in every]
        rows.append(
            {
                **row,
                "plan": data,
                "computed": computed,
                "steps": seconds,
                "measured": median(seconds),
                "losses": every[0].losses,
            }
        )
        if comm.rank == 0:
            print(
                f"{row['name']}: {row['predicted']:.3f} s predicted, {median(seconds):.3f} s measured; computed "
                + " ".join(f"{x:.3f}" for x in computed),
                flush=True,
            )
    end(work, comm, world, rows, found, took)


def choose(
    cluster: Cluster, spec: ModelSpec, seq_length: int, batch: int, each: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(description, plan): the scheduler's, then the best equal ones of every kind by its model.

    The scheduler knows the cluster by what was calibrated, and ranks layouts by seconds of a micro-batch; predicted
    seconds are of the whole step, with exchange of gradients and update.
    """
    options = ContextOptions(recompute="none")
    problem = problem_from_cluster(spec, cluster, seq_length, dtype=DTYPE, options=options)
    choice = schedule_context(problem)
    equal, legal = few_equal(problem, each)
    layouts = [("asymmetric", choice.layout, choice.seconds)]
    layouts += [(kind_of(layout), layout, cost.seconds) for layout, cost in equal]
    rows = []
    for kind, layout, seconds in layouts:
        plan = one_stage_plan(problem, layout, batch)
        found = predict(plan, spec, cluster, DTYPE)
        row = {
            "kind": kind, "predicted": found.step_seconds, "scheduled": seconds * batch, "parts": dict(found.parts),
            "legal": legal, "name": describe(layout), "bound": choice.bound * batch,
        }  # fmt: skip
        rows.append((row, to_dict(plan)))
    return rows


def describe(layout: Any) -> str:
    if layout.name:
        text = layout.name
    else:
        text = "; ".join(" ".join(f"{t}t{h}h" for t, h in zip(g.tokens, g.heads, strict=True)) for g in layout.groups)
    if layout.transport == "a2a":
        return text
    return f"{text}, {layout.transport}" + (f" {layout.block}" if layout.block else "")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
