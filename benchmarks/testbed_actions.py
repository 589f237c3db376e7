"""What bench_testbed_chips.py runs on every rank: the same pipeline of one stage on each, action by action.

Every rank gets micro-batches in proportion to its speed, so that all compute for the same time: a fast one that has
finished would leave the core to the others. From one repeat to the next all that share a core move to the next core:
those of a virtual machine are not equally fast all the time, by up to a tenth.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_ranks import begin
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Comm, stop_comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.planner.template.plan_template import renumbered
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.runtime import Runtime


def main() -> None:
    work, spec, cluster, comm, world, emulation = begin()
    runtime, fetch, count = alone(work, spec, cluster, comm)
    runtime.train_step(fetch, 0, 2, lr=0.0)  # allocations, lazy imports
    emulation.started()
    pinned = json.loads(Path(os.environ["HETERO_TESTBED"]).read_text())["cores"]
    mine, cores = pinned[comm.rank], sorted(set(pinned))
    rows = []
    for repeat in range(work["repeats"] + 1):
        world.gather_vectors(torch.zeros(1))
        os.sched_setaffinity(0, {cores[(cores.index(mine) + repeat) % len(cores)]})
        stats = runtime.train_step(fetch, 0, count, lr=0.0)
        actions = [t for t in stats.actions if t.action.kind in ("F", "B")][2:]  # the first pair waits for the rest
        if repeat:  # in the first one caches fill
            rows.append([(t.action.kind, t.end - t.start, t.computed) for t in actions])
    found = [{"rows": r, "clock": c} for r, c in world.gather_objects((rows, comm.clock.report()))]
    if comm.rank == 0:
        Path(work["out"]).write_text(json.dumps({"ranks": found}))
    stop_comm()


def alone(work: dict[str, Any], spec: ModelSpec, cluster: Cluster, comm: Comm) -> tuple[Runtime, Any, int]:
    """A pipeline of one stage on this rank alone, its data, and how many micro-batches keep it busy as long as all."""
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [
        {"ranks": [0], "layers": [0, spec.num_layers]}]}  # fmt: skip
    head = {"version": 1, "seq_length": work["seq_length"], "global_batch_size": 1}
    plan = plan_from_dict({**head, "schedule": "1f1b", "pipelines": [pipeline]}, spec)
    for rank in range(cluster.world_size):  # groups are made by all ranks; each trains its own plan of one rank
        mine = renumbered(plan, {0: rank})
        comm.create_groups(CompiledPlan(mine, spec).groups)

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, spec, seed=0)

    def fetch(indices: Any) -> Batch:
        tokens = torch.zeros(len(indices), work["seq_length"], dtype=torch.int64)
        return Batch(tokens, tokens, torch.arange(work["seq_length"]).expand(tokens.shape))

    def build(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.0)

    speeds = [cluster.chip_of(r).speed or 1.0 for r in range(cluster.world_size)]
    count = round(work["micro_batches"] * speeds[comm.rank] / min(speeds))
    compiled = CompiledPlan(renumbered(plan, {0: comm.rank}), spec)
    return Runtime(compiled, comm, torch.float32, initialize, build), fetch, count


if __name__ == "__main__":
    main()
    os._exit(0)
