"""Seconds of stages, optimizer and step on the chips of a job, measured inside short running pipelines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.ops import attention
from hetero_megatron.ops.optimizer_ops import l2norm_aten
from hetero_megatron.parallel.optimizer import OptimizerFactory, squared_norm
from hetero_megatron.plan.buckets import make_buckets, plan_groups
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.calibration.runs import Observation, Run
from hetero_megatron.training.runtime import Runtime

OPTIMIZER_ELEMENTS = (1 << 18, 1 << 21)


def observe(run: Run, comm: Comm, dtype: torch.dtype, optimizer: OptimizerFactory, steps: int) -> dict[str, object]:
    """Take part in ``run``; every rank of the job calls it, also those that the plan leaves out.

    Returns:
        On a rank of the plan: ``observation`` of its stage, and ``tail``, the seconds between its last action and the
        end of the step less the optimizer's (of the step in which they were fewest).
    """
    if comm.rank not in run.plan.ranks:
        comm.create_groups(plan_groups(run.plan, make_buckets(run.plan, run.spec)))
        return {}

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, run.spec, seed=0)

    runtime = Runtime(run.plan, run.spec, comm, dtype, initialize, optimizer)
    forward: list[float] = []
    backward: list[float] = []
    tails: list[float] = []
    for step in range(steps + 1):
        stats = runtime.train_step(_fetch(run), 0, run.plan.global_batch_size, lr=1e-6)
        done = time.perf_counter()
        if step == 0:  # allocations, caches, lazy initialisation
            continue
        for kind, into in (("F", forward), ("B", backward)):
            into += [t.computed for t in stats.actions if t.action.kind == kind][1:]
        tails.append(done - max(t.end for t in stats.actions if t.action.kind != "REDUCE"))
    stage, first = runtime.stage, runtime.place.stage
    chip, layers = run.stages[first]
    width = max(forward) - min(forward) + max(backward) - min(backward)
    observation = Observation(
        chip, stage.ranks, run.tp, run.micro_batch_size, layers, stage.embed, stage.head,
        median(forward), median(backward), width / (median(forward) + median(backward)),
    )  # fmt: skip
    assert runtime.optimizer is not None
    owned = sum(master.numel() for _, _, master in runtime.optimizer.owned())
    return {"observation": observation, "tail": min(tails), "owned": owned}


def _fetch(run: Run):  # type: ignore[no-untyped-def]
    def fetch(indices: Sequence[int]) -> Batch:
        shape = (len(indices), run.plan.seq_length)
        generator = torch.Generator().manual_seed(indices[0])
        tokens = torch.randint(0, run.spec.vocab_size, shape, generator=generator)
        return Batch(tokens, tokens, torch.arange(shape[1]).expand(shape))

    return fetch


def optimizer_seconds(comm: Comm, dtype: torch.dtype, build: OptimizerFactory) -> list[tuple[int, float]]:
    """(elements, seconds) of norm, scaling and update of so many owned elements, each the median of 5."""
    wide = torch.promote_types(dtype, torch.float32)
    rows = []
    for elements in OPTIMIZER_ELEMENTS:
        # Pieces of one owner are not many and not small; 16 stand for a layer's.
        masters = [torch.zeros(elements // 16, dtype=wide, device=comm.device) for _ in range(16)]
        optimizer = build([{"params": masters, "decay": True}])
        seconds = []
        for _ in range(6):
            grads = [torch.ones_like(m) for m in masters]
            before = comm.clock.computed
            with comm.clock.counting():
                squared_norm([grads], lambda tensors: l2norm_aten(tensors)[0])
                torch._foreach_mul_(grads, 0.5)
                for master, grad in zip(masters, grads):
                    master.grad = grad
                optimizer.step()
            seconds.append(comm.clock.computed - before)
        rows.append((elements, median(seconds[1:])))
    return rows


def attention_seconds(
    comm: Comm, dtype: torch.dtype, spec: ModelSpec, lengths: Sequence[int]
) -> list[tuple[int, int, int, float, float]]:
    """(length, heads, head_dim, forward, backward) of causal attention over one sequence, each the median of 3."""
    rows = []
    heads, kv = spec.num_heads, spec.num_kv_heads
    for length in lengths:
        times: list[list[float]] = [[], []]
        for _ in range(4):
            q, k, v = (
                torch.randn(1, length, n, spec.head_dim, dtype=dtype, device=comm.device, requires_grad=True)
                for n in (heads, kv, kv)
            )
            with comm.clock.counting():
                at = [comm.clock.computed]
                out, _ = attention(q, k, v)
                comm.clock.settle()
                at.append(comm.clock.computed)
                torch.autograd.backward(out, torch.ones_like(out))
                comm.clock.settle()
                at.append(comm.clock.computed)
            times[0].append(at[1] - at[0])
            times[1].append(at[2] - at[1])
        rows.append((length, heads, spec.head_dim, median(times[0][1:]), median(times[1][1:])))
    return rows
