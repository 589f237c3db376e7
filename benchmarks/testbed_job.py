"""What bench_testbed.py runs on every rank: calibrate, choose plans, run each, compare with prediction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_ranks import DTYPE, Choice, Work, measure
from benchmarks.testbed_schedules import cuts_by_speed, schedule_plans
from hetero_megatron.calibration import CalibrationOptions
from hetero_megatron.calibration.pipelines import degrees
from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import tp_groups, without
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import simulate_best
from hetero_megatron.planner.search.uniform import top_uniform_plans
from hetero_megatron.planner.template.plan_template import renumbered
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec


def calibration(work: Work, spec: ModelSpec, cluster: Cluster) -> CalibrationOptions:
    length, sizes = work["seq_length"], tuple(work["sizes"])
    return CalibrationOptions(length, DTYPE, sizes, degrees(cluster, spec), (length,), work["calibration_steps"])


def choose(cluster: Cluster, spec: ModelSpec, work: Work) -> list[Choice]:
    """Plans of the kinds that are asked for: the planner's, the two best uniform ones, the best on each
    chip type alone, and plans that the planner would not choose; or one pipeline under each schedule."""
    seq_length, batch = work["seq_length"], work["batch"]
    if "schedules" in work["kinds"]:
        found = schedule_plans(cluster, spec, seq_length, batch, DTYPE)
        return [predicted(*plan, spec, cluster) for plan in found]
    options = SearchOptions(dtype=DTYPE, time_limit=15.0)
    plans: list[tuple[str, str, Plan]] = []
    problem = PlanningProblem(spec, cluster, seq_length, batch, options)
    best = search(problem)
    plans.append(("planner", "planner", best.best.plan))
    scorer = make_scorer(problem)
    uniform = []
    for shape, candidate in top_uniform_plans(problem, scorer, 12)[0] if "uniform" in work["kinds"] else ():
        choices = simulate_best([(0.0, 0, candidate)], problem, scorer)
        uniform += [(shape, choice) for choice in choices]
    uniform.sort(key=lambda item: item[1].step_seconds)
    plans += [(f"uniform: {u.text()}", "uniform", c.plan) for u, c in uniform[:2]]  # type: ignore[attr-defined]
    for chip in cluster.chips:
        ranks = [r.rank for r in cluster.ranks if r.chip == chip]
        part = without(cluster, [g.name for g in cluster.nodes if g.chip != chip])
        if work.get("alone_memory"):  # a model that must be cut across types: the bound lends each type memory
            part = replace(part, chips={c: replace(k, memory=work["alone_memory"]) for c, k in part.chips.items()})
        try:
            alone = search(PlanningProblem(spec, part, seq_length, batch, options))
        except UserError:  # too little memory alone
            continue
        plans.append((f"{chip} alone", "alone", renumbered(alone.best.plan, dict(enumerate(ranks)))))
    for kind, name, data in others(cluster, spec, seq_length, batch):
        if kind not in work["kinds"]:
            continue
        try:
            plan = plan_from_dict(data, spec, cluster)
            predict(plan, spec, cluster, DTYPE).require_fit()
        except UserError as error:
            print(f"{name}: left out, {error}", flush=True)
            continue
        plans.append((name, kind, plan))
    return [predicted(name, kind, to_dict(plan), spec, cluster) for name, kind, plan in plans]


def predicted(name: str, kind: str, data: dict[str, Any], spec: ModelSpec, cluster: Cluster) -> Choice:
    """A plan with its name and what is predicted for it."""
    found = predict(plan_from_dict(data, spec, cluster), spec, cluster, DTYPE)
    return {"name": name, "kind": kind, "predicted": found.step_seconds, "parts": dict(found.parts)}, data


def others(cluster: Cluster, spec: ModelSpec, seq_length: int, batch: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(kind, name, plan) of one pipeline of all ranks with layers by speed, alone and in TP groups of two of a type;
    one replica per rank with shares by speed; one pipeline of all ranks with equal numbers of layers."""
    everyone = range(cluster.world_size)
    pairs = [pair for found in tp_groups(cluster, 2).values() for pair in found]
    alone = set(everyone) - {r for pair in pairs for r in pair}
    speeds = [cluster.chip_of(r).speed or 1.0 for r in everyone]
    shares = [max(1, round(batch * s / sum(speeds))) for s in speeds]
    shares[0] += batch - sum(shares)
    whole = [0, spec.num_layers]
    replicas = [
        {"micro_batch_size": 1, "num_micro_batches": n, "stages": [{"ranks": [r], "layers": whole}]}
        for r, n in enumerate(shares)
    ]
    kinds = {
        "one pipeline": [_pipeline(cluster, spec, batch, [(r,) for r in everyone])],
        "one pipeline, TP 2": [_pipeline(cluster, spec, batch, sorted([*pairs, *((r,) for r in alone)]))],
        "replicas": replicas,
    }
    head = {"version": 1, "seq_length": seq_length, "global_batch_size": batch, "schedule": "1f1b"}
    equal = _pipeline(cluster, spec, batch, [(r,) for r in everyone], by_speed=False)
    return [
        *(("tp" if "TP" in name else "other", name, {**head, "pipelines": rows}) for name, rows in kinds.items()),
        ("equal", "one pipeline, equal layers", {**head, "pipelines": [equal]}),
    ]


def _pipeline(
    cluster: Cluster, spec: ModelSpec, batch: int, groups: Sequence[tuple[int, ...]], by_speed: bool = True
) -> dict[str, Any]:
    """A stage on each TP group, with layers by speed or equally many."""
    speeds = [sum(cluster.chip_of(r).speed or 1.0 for r in group) if by_speed else 1.0 for group in groups]
    cuts = cuts_by_speed(spec.num_layers, speeds)
    stages: list[dict[str, Any]] = [
        {"ranks": list(group), "tp": len(group), "layers": [a, b]}
        for group, a, b in zip(groups, cuts, cuts[1:])
        if b > a
    ]
    stages[0]["embed"], stages[-1]["head"] = True, True
    return {"micro_batch_size": 1, "num_micro_batches": batch, "stages": stages}


if __name__ == "__main__":
    measure(calibration, choose)
