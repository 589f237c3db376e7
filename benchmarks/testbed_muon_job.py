"""What bench_testbed_muon.py runs on every rank: calibrate, and run each plan with equal owners and by speed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_job import calibration
from benchmarks.testbed_ranks import DTYPE, begin, end, make_runtime, seconds_late, wait_for_all
from hetero_megatron.calibration import Job, calibrate
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.comm import Comm
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.muon import MuonRates
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.train import optimizer_factory

OWNERS = {"equal": 1, "by speed": 3}  # share of a fast chip beside a slow one's


def plans(work: dict[str, Any], fast_share: int) -> dict[str, dict[str, Any]]:
    """Ranks 0 and 1 are fast, 2 and 3 slow."""
    layers, batch = work["model"]["num_layers"], work["batch"]
    early = round(0.7 * layers)

    def stage(ranks: list[int], first: int, last: int) -> dict[str, Any]:
        share = fast_share if ranks[0] < 2 else 1
        return {"ranks": ranks, "layers": [first, last], "tp": len(ranks), "optimizer": {"share": share}}

    def pipeline(count: int, *stages: dict[str, Any]) -> dict[str, Any]:
        return {"micro_batch_size": 1, "num_micro_batches": count, "stages": list(stages)}

    kinds = {
        "four replicas": [pipeline(batch * n // 8, stage([r], 0, layers)) for r, n in enumerate((3, 3, 1, 1))],
        "two pipelines": [pipeline(batch // 2, stage([r], 0, early), stage([r + 2], early, layers)) for r in (0, 1)],
        "two TP groups": [
            pipeline(batch * n // 4, stage(ranks, 0, layers)) for ranks, n in (([0, 1], 3), ([2, 3], 1))
        ],
    }  # fmt: skip
    head = {"version": 1, "seq_length": work["seq_length"], "global_batch_size": batch, "schedule": "1f1b"}
    return {name: {**head, "pipelines": rows} for name, rows in kinds.items()}


def main() -> None:
    work, spec, cluster, comm, world, emulation = begin()
    emulation.started()
    build, start = optimizer_factory(OptimizerConfig("muon", muon=MuonRates())), time.perf_counter()
    rates = calibrate(Job(comm, torch.float32, build), cluster, spec, calibration(work, spec, cluster), lambda _: None)
    took, rows = time.perf_counter() - start, []
    for owners, share in OWNERS.items():
        for name, data in plans(work, share).items():
            mine = run(data, spec, cluster, comm, build, work["steps"])
            every = world.gather_objects(mine, tuple[list[float], list[float], float])
            updates, steps = ([max(s) for s in zip(*(row[i] for row in every))] for i in (0, 1))
            row = {"name": name, "owners": owners, "update": median(updates), "step": median(steps),
                   "late": max(row[2] for row in every)}  # fmt: skip
            rows.append({**row, **predicted(data, spec, {**work["cluster"], "rates": rates.rates})})
            if comm.rank == 0:
                print(rows[-1], flush=True)
    end(work, comm, world, rows, rates, took)


def predicted(data: dict[str, Any], spec: ModelSpec, cluster_data: dict[str, Any]) -> dict[str, float]:
    """Seconds of the update, with the parameters' way, and of the step."""
    cluster = cluster_from_dict(cluster_data)
    found = predict(plan_from_dict(data, spec, cluster), spec, cluster, DTYPE, options=CostOptions(muon=True))
    update = found.parts["optimizer"] + found.parts["parameters"]
    return {"predicted_update": update, "predicted_step": found.step_seconds}


def run(
    data: dict[str, Any], spec: ModelSpec, cluster: Cluster, comm: Comm, build: Any, steps: int
) -> tuple[list[float], list[float], float]:
    """(seconds of updates, of whole steps, how far the rank was behind its emulated chip as a share of these)."""
    made = make_runtime(CompiledPlan(plan_from_dict(data, spec, cluster), spec, muon=True), comm, build)
    assert made is not None, "all ranks have a stage"
    runtime, fetch = made
    assert runtime.optimizer is not None
    updates, whole, late = list[float](), list[float](), 0.0
    for step in range(steps + 1):
        wait_for_all(runtime)
        start, behind = time.perf_counter(), seconds_late(comm)
        with comm.clock.counting():
            _, grads = runtime.forward_backward(fetch, step, data["global_batch_size"])
            wait_for_all(runtime)
            between = time.perf_counter()
            runtime.optimizer.step(grads, 1e-4)
            wait_for_all(runtime)
        ended = time.perf_counter()
        if step:  # the first one allocates
            updates.append(ended - between)
            whole.append(ended - start)
            late += seconds_late(comm) - behind
    return updates, whole, late / sum(whole)


if __name__ == "__main__":
    main()
