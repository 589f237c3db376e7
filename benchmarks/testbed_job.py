"""What bench_testbed.py runs on every rank: calibrate, choose plans, run each for some steps, compare with prediction.

One process per rank for everything, because starting ranks is what takes time. Rank 0 writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_schedules import cuts_by_speed, schedule_plans
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.neighbours import tp_groups
from hetero_megatron.cluster.subset import without
from hetero_megatron.comm import Comm, Group, start_comm, stop_comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.emulation import Emulation
from hetero_megatron.errors import UserError
from hetero_megatron.launcher import read_launcher
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.plan import Plan, plan_from_dict
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.plan.dump import to_dict
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.report.rates import format_rates
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import judge
from hetero_megatron.planner.search.uniform import top_uniform_plans
from hetero_megatron.planner.simulate.step import predict
from hetero_megatron.planner.template.placement import renumbered
from hetero_megatron.platform import detect_platform
from hetero_megatron.spec import LogicalTensor, ModelSpec, from_hf_config
from hetero_megatron.testbed.clocks import worst_clock
from hetero_megatron.training.calibration import Calibration, CalibrationOptions, Job, calibrate
from hetero_megatron.training.calibration.pipelines import degrees
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.loop import optimizer_factory, position
from hetero_megatron.training.runtime import Runtime

DTYPE = "fp32"
LONG = 5.0  # seconds of a step above which it takes fewer of them
WARM_UP = 6  # the step that allocates has so much less to do, on an emulated clock, which does not count that


def main() -> None:
    work, spec, cluster, comm, world, emulation = begin()
    emulation.started()
    build = optimizer_factory(OptimizerConfig())
    length, sizes = work["seq_length"], tuple(work["sizes"])
    options = CalibrationOptions(length, DTYPE, sizes, degrees(cluster, spec), (length,), work["calibration_steps"])
    start = time.perf_counter()
    found = calibrate(Job(comm, torch.float32, build), cluster, spec, options, lambda _: None)
    took = time.perf_counter() - start
    rated = cluster_from_dict({**work["cluster"], "rates": found.rates})
    plans: Any = None
    if comm.rank == 0:
        print(format_rates(found.rates), flush=True)
        plans = choose(rated, spec, work)
    plans = world.gather_objects(plans)[0]
    rows = []
    for name, kind, data in plans:
        plan = plan_from_dict(data, spec, cluster)
        predicted = predict(plan, spec, rated, DTYPE)
        count = work["long_steps" if predicted.step_seconds > LONG else "steps"]
        seconds = run(plan, spec, comm, build, count, work.get("warm_up", WARM_UP))
        every = [s for s in world.gather_objects(seconds, Steps | None) if s]
        if comm.rank == 0:
            steps = [max(s) for s in zip(*(s.seconds for s in every))]
            rows.append(
                {
                    "name": name, "kind": kind, "plan": data, "predicted": predicted.step_seconds, "steps": steps,
                    "measured": median(steps), "parts": dict(predicted.parts), "late": max(s.late for s in every),
                }
            )  # fmt: skip
            print(f"{name}: {predicted.step_seconds:.3f} s predicted, {median(steps):.3f} s measured", flush=True)
    end(work, comm, world, rows, found, took)


def begin() -> tuple[dict[str, Any], ModelSpec, Cluster, Comm, Group, Emulation]:
    """(work from the file named on the command line, model, cluster, communication, all ranks, what is emulated)."""
    work = json.loads(Path(sys.argv[1]).read_text())
    spec = from_hf_config(work["hf_config"]) if "hf_config" in work else ModelSpec(**work["model"])
    cluster = cluster_from_dict(work["cluster"])
    launcher = read_launcher()
    rank = position(cluster, launcher)
    emulation = Emulation.of(launcher, rank, 300)
    comm = start_comm(detect_platform("gloo"), 300, rank, launcher, emulation.hooks())
    everyone = tuple(range(cluster.world_size))
    comm.create_groups([everyone])
    return work, spec, cluster, comm, comm.group(everyone), emulation


def end(work: dict[str, Any], comm: Comm, world: Group, rows: list[Any], found: Calibration, took: float) -> None:
    """Rank 0 writes what was measured, and the worst rank's emulated clock."""
    clock = worst_clock(dict(enumerate(world.gather_objects(comm.clock.report(), dict[str, float]))))
    if comm.rank == 0:
        kept = clock.facts() if clock is not None else {}
        out = {"rows": rows, "clock": kept, "calibration_seconds": took, "rates": found.rates}
        Path(work["out"]).write_text(json.dumps(out))
    stop_comm()


def choose(cluster: Cluster, spec: ModelSpec, work: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, kind, plan) of the kinds that are asked for: the planner's, the two best uniform ones, the best on each
    chip type alone, and plans that the planner would not choose; or one pipeline under each schedule."""
    seq_length, batch = work["seq_length"], work["batch"]
    if "schedules" in work["kinds"]:
        return schedule_plans(cluster, spec, seq_length, batch, DTYPE)
    options = SearchOptions(dtype=DTYPE, time_limit=15.0)
    plans: list[tuple[str, str, Plan]] = []
    problem = PlanningProblem(spec, cluster, seq_length, batch, options)
    best = search(problem)
    plans.append(("planner", "planner", best.best.plan))
    scorer = make_scorer(problem)
    uniform = []
    for shape, candidate in top_uniform_plans(problem, scorer, 12)[0] if "uniform" in work["kinds"] else ():
        choices = judge([(0.0, 0, candidate)], problem, scorer)
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
    for name, data in others(cluster, spec, seq_length, batch) if "other" in work["kinds"] else ():
        try:
            plan = plan_from_dict(data, spec, cluster)
            predict(plan, spec, cluster, DTYPE).require_fit()
        except UserError as error:
            print(f"{name}: left out, {error}", flush=True)
            continue
        plans.append((name, "other", plan))
    return [(name, kind, to_dict(plan)) for name, kind, plan in plans]


def others(cluster: Cluster, spec: ModelSpec, seq_length: int, batch: int) -> list[tuple[str, dict[str, Any]]]:
    """One pipeline of all ranks with layers by speed, alone and in TP groups of two of a type; one replica per rank
    with shares by speed."""
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
    return [(name, {**head, "pipelines": pipelines}) for name, pipelines in kinds.items()]


def _pipeline(cluster: Cluster, spec: ModelSpec, batch: int, groups: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """A stage on each TP group, with layers by speed."""
    speeds = [sum(cluster.chip_of(r).speed or 1.0 for r in group) for group in groups]
    cuts = cuts_by_speed(spec.num_layers, speeds)
    stages: list[dict[str, Any]] = [
        {"ranks": list(group), "tp": len(group), "layers": [a, b]}
        for group, a, b in zip(groups, cuts, cuts[1:])
        if b > a
    ]
    stages[0]["embed"], stages[-1]["head"] = True, True
    return {"micro_batch_size": 1, "num_micro_batches": batch, "stages": stages}


@dataclass(frozen=True)
class Steps:
    """``seconds`` of the measured steps on one rank, ``computed``: of these by its chip's own clock; ``losses`` of all
    steps, also of the first one; ``late``: how far the rank was behind an emulated chip, as a share of the steps."""

    seconds: list[float]
    computed: list[float]
    losses: list[float]
    late: float


def run(
    plan: Plan, spec: ModelSpec, comm: Comm, build: Any, steps: int, warm_up: int = WARM_UP
) -> Steps | None:
    """``steps`` steps after one that allocates, of ``1 / warm_up`` of the batch; None on ranks that the plan leaves
    out."""
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return None

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, spec, seed=0)

    def fetch(indices: Sequence[int]) -> Batch:
        generator = torch.Generator().manual_seed(indices[0])
        tokens = torch.randint(0, spec.vocab_size, (len(indices), plan.seq_length), generator=generator)
        return Batch(tokens, tokens, torch.arange(plan.seq_length).expand(tokens.shape))

    runtime = Runtime(compiled, comm, torch.float32, initialize, build)
    seconds, computed, losses, late = [], [], [], []
    least = sum(p.micro_batch_size for p in plan.pipelines)
    for step in range(steps + 1):
        size = plan.global_batch_size if step else max(least, plan.global_batch_size // warm_up)
        runtime.world.gather_vectors(torch.zeros(1))
        start, before, behind = time.perf_counter(), comm.clock.computed, seconds_late(comm)
        stats = runtime.train_step(fetch, step * plan.global_batch_size, size, lr=1e-4)
        seconds.append(time.perf_counter() - start)
        computed.append(comm.clock.computed - before)
        late.append(seconds_late(comm) - behind)
        losses.append(stats.loss)
    return Steps(seconds[1:], computed[1:], losses, sum(late[1:]) / sum(seconds[1:]))


def seconds_late(comm: Comm) -> float:
    """So far, before waiting for a peer; 0 for a chip that is not emulated."""
    report = comm.clock.report()
    return report["late"] * report["emulated"] if report else 0.0


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
