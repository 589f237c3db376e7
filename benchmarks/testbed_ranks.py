"""What the jobs of testbed benchmarks share: start, calibrate, run each plan for some steps, write what was measured.

One process per rank for everything, because starting ranks is what takes time. Rank 0 writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hetero_megatron.calibration import Calibration, CalibrationOptions, Job, calibrate
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.rates_section import format_rates
from hetero_megatron.comm import Comm, Group, start_comm, stop_comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import read_launcher
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.platform import detect_platform
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.testbed.clocks import worst_clock
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.rank_platform import position
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.train import optimizer_factory

DTYPE = "fp32"
LONG = 5.0  # seconds of a step above which it takes fewer of them (``long_steps``)
WARM_UP = 6  # the step that allocates has so much less to do, on an emulated clock, which does not count that
Work = dict[str, Any]  # of the file that the benchmark wrote
Choice = tuple[dict[str, Any], dict[str, Any]]  # facts about a plan (name, predicted seconds, …), the plan


def measure(
    calibration: Callable[[Work, ModelSpec, Cluster], CalibrationOptions],
    choose: Callable[[Cluster, ModelSpec, Work], list[Choice]],
) -> None:
    """One rank's whole job, on which the process ends.

    Args:
        calibration: what is calibrated.
        choose: on rank 0, the plans for the calibrated cluster.
    """
    work, spec, cluster, comm, world, emulation = begin()
    emulation.started()
    build = optimizer_factory(OptimizerConfig())
    start = time.perf_counter()
    job = Job(comm, torch.float32, build)
    found = calibrate(job, cluster, spec, calibration(work, spec, cluster), lambda _: None)
    took = time.perf_counter() - start
    chosen: Any = None
    if comm.rank == 0:
        print(format_rates(found.rates), flush=True)
        chosen = choose(cluster_from_dict({**work["cluster"], "rates": found.rates}), spec, work)
    rows = []
    for facts, data in world.gather_objects(chosen)[0]:
        count = work["long_steps"] if facts["predicted"] > LONG and "long_steps" in work else work["steps"]
        count = facts.get("count", count)
        warm_up = work.get("warm_up", WARM_UP)
        mine = run(plan_from_dict(data, spec, cluster), spec, comm, build, count, warm_up)
        every = [s for s in world.gather_objects(mine, Steps | None) if s is not None]
        steps = [max(s) for s in zip(*(s.seconds for s in every))]
        rows.append({
            **facts, "plan": data, "steps": steps, "measured": median(steps), "late": max(s.late for s in every),
            "computed": [median(s.computed) for s in every], "losses": every[0].losses,
        })  # fmt: skip
        if comm.rank == 0:
            print(f"{facts['name']}: {facts['predicted']:.3f} s predicted, {median(steps):.3f} s measured", flush=True)
    end(work, comm, world, rows, found, took)
    sys.stdout.flush()
    os._exit(0)


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
    made = make_runtime(CompiledPlan(plan, spec), comm, build)
    if made is None:
        return None
    runtime, fetch = made
    seconds, computed, losses, late = [], [], [], []
    least = sum(p.micro_batch_size for p in plan.pipelines)
    first = max(least, plan.global_batch_size // warm_up)
    if any(p.orders for p in plan.pipelines):  # of whole batches
        first = plan.global_batch_size
    for step in range(steps + 1):
        size = plan.global_batch_size if step else first
        wait_for_all(runtime)
        start, before, behind = time.perf_counter(), comm.clock.computed, seconds_late(comm)
        stats = runtime.train_step(fetch, step * plan.global_batch_size, size, lr=1e-4)
        seconds.append(time.perf_counter() - start)
        computed.append(comm.clock.computed - before)
        late.append(seconds_late(comm) - behind)
        losses.append(stats.loss)
    return Steps(seconds[1:], computed[1:], losses, sum(late[1:]) / sum(seconds[1:]))


def make_runtime(compiled: CompiledPlan, comm: Comm, build: Any) -> tuple[Runtime, Fetch] | None:
    """A rank's runtime, and rows of random tokens; on all ranks of the job, None on those that the plan leaves out."""
    plan, spec = compiled.plan, compiled.spec
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return None

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, spec, seed=0)

    def fetch(indices: Sequence[int]) -> Batch:
        generator = torch.Generator().manual_seed(indices[0])
        tokens = torch.randint(0, spec.vocab_size, (len(indices), plan.seq_length), generator=generator)
        return Batch(tokens, tokens, torch.arange(plan.seq_length).expand(tokens.shape))

    return Runtime(compiled, comm, torch.float32, initialize, build), fetch


def wait_for_all(runtime: Runtime) -> None:
    runtime.world.gather_vectors(torch.zeros(1))


def seconds_late(comm: Comm) -> float:
    """So far, before waiting for a peer; 0 for a chip that is not emulated."""
    report = comm.clock.report()
    return report["late"] * report["emulated"] if report else 0.0
