"""What bench_context_testbed.py runs on every rank: calibrate, schedule, run the asymmetric and the equal layouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.context_equal import few_equal, kind_of
from benchmarks.testbed_ranks import DTYPE, Choice, Work, measure
from hetero_megatron.calibration import CalibrationOptions
from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.problem import ContextOptions, one_stage_plan
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec


def calibration(work: Work, spec: ModelSpec, cluster: Cluster) -> CalibrationOptions:
    """Pipelines and attention much shorter than what is planned then."""
    lengths = tuple(work["attention_lengths"])
    return CalibrationOptions(work["calibration_length"], DTYPE, (1,), (1,), lengths, work["calibration_steps"])


def choose(cluster: Cluster, spec: ModelSpec, work: Work) -> list[Choice]:
    """(description, plan): the scheduler's, then the best equal ones of every kind by its model.

    The scheduler knows the cluster by what was calibrated, and ranks layouts by seconds of a micro-batch; predicted
    seconds are of the whole step, with exchange of gradients and update.
    """
    options, batch = ContextOptions(recompute="none"), work["batch"]
    problem = problem_from_cluster(spec, cluster, work["seq_length"], dtype=DTYPE, options=options)
    choice = schedule_context(problem)
    equal, legal = few_equal(problem, work["each"])
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
    measure(calibration, choose)
