"""One rank of bench_memory.py: build a plan's part of the model, train some steps, write how much the process grew."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hetero_megatron.comm import start_comm, stop_comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.platform import detect_platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.train import optimizer_factory


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key + ":")).split()[1]) << 10


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    spec = ModelSpec(**work["model"])
    plan = plan_from_dict(work["plan"], spec)
    comm = start_comm(detect_platform("gloo"), 600)

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, spec, seed=0)

    def fetch(indices: Sequence[int]) -> Batch:
        tokens = torch.zeros(len(indices), plan.seq_length, dtype=torch.long)
        return Batch(tokens, tokens, torch.arange(plan.seq_length).expand(tokens.shape))

    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    tracker = MemoryTracker() if work["live"] else None
    with tracker or nullcontext():
        factory = optimizer_factory(OptimizerConfig())
        compiled = CompiledPlan(plan, spec)
        comm.create_groups(compiled.groups)
        runtime = Runtime(compiled, comm, DTYPES[work["dtype"]], initialize, factory)
        if tracker is not None and runtime.divided is not None:
            runtime.divided.observe(tracker.resized)
        marks = {"built": status("VmHWM") - before}
        for step in range(work["steps"]):
            # The first one makes the optimizer's states: a micro-batch per pipeline is enough.
            size = plan.global_batch_size if step else sum(p.micro_batch_size for p in plan.pipelines)
            runtime.train_step(fetch, step * plan.global_batch_size, size, lr=1e-4)
            marks[f"step {step}"] = status("VmHWM") - before
    marks["rss"] = status("VmRSS") - before
    marks["peak"] = status("VmHWM") - before
    if tracker is not None:
        marks["live"] = tracker.peak
    every = runtime.world.gather_objects(marks)
    if comm.rank == 0:
        Path(work["out"]).write_text(json.dumps(every))
    stop_comm()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
