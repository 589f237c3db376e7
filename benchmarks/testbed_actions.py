"""What bench_testbed_chips.py runs on every rank: the same pipeline of one stage on each, action by action."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.comm import start_comm, stop_comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.plan import plan_from_dict
from hetero_megatron.plan.buckets import make_buckets, plan_groups
from hetero_megatron.planner.place import renumbered
from hetero_megatron.platform import detect_platform
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.loop import position
from hetero_megatron.training.runtime import Runtime


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    spec, cluster = ModelSpec(**work["model"]), cluster_from_dict(work["cluster"])
    comm = start_comm(detect_platform("gloo"), 300, position(cluster, cluster.world_size))
    everyone = tuple(range(cluster.world_size))
    comm.create_groups([everyone])
    world = comm.group(everyone)
    pipeline = {"micro_batch_size": 1, "num_micro_batches": work["micro_batches"], "stages": [
        {"ranks": [0], "layers": [0, spec.num_layers]}]}  # fmt: skip
    head = {"version": 1, "seq_length": work["seq_length"], "global_batch_size": work["micro_batches"]}
    alone = plan_from_dict({**head, "schedule": "1f1b", "pipelines": [pipeline]}, spec)
    for rank in everyone:  # groups are made by all ranks; each trains its own plan of one rank
        plan = renumbered(alone, {0: rank})
        comm.create_groups(plan_groups(plan, make_buckets(plan, spec)))

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, spec, seed=0)

    def fetch(indices: Any) -> Batch:
        tokens = torch.zeros(len(indices), work["seq_length"], dtype=torch.int64)
        return Batch(tokens, tokens, torch.arange(work["seq_length"]).expand(tokens.shape))

    def build(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.0)

    runtime = Runtime(renumbered(alone, {0: comm.rank}), spec, comm, torch.float32, initialize, build)
    runtime.train_step(fetch, 0, work["micro_batches"], lr=0.0)
    comm.emulation.started()
    rows = []
    for _ in range(work["repeats"]):
        world.gather_vectors(torch.zeros(1))
        stats = runtime.train_step(fetch, 0, work["micro_batches"], lr=0.0)
        for kind in ("F", "B"):
            actions = [t for t in stats.actions if t.action.kind == kind][1:]
            rows.append((kind, median(t.end - t.start for t in actions), median(t.computed for t in actions)))
    every = world.gather_objects(rows)
    if comm.rank == 0:
        Path(work["out"]).write_text(json.dumps(every))
    stop_comm()


if __name__ == "__main__":
    main()
    os._exit(0)
