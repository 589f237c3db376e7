"""Seconds of stages and of exchanges on the chips of a job, measured inside short running pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.ops import KernelPlan
from hetero_megatron.parallel.exchange import HopExchange
from hetero_megatron.parallel.update import OptimizerFactory
from hetero_megatron.plan import Plan
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.calibration.runs import Observation, Phase, Run, steady
from hetero_megatron.training.runtime import Runtime

Kernels = Callable[[Plan, ModelSpec], KernelPlan]  # of this rank's stage


@dataclass(frozen=True)
class Job:
    """What all runs of a calibration have in common. ``kernels``: as runs would have them; None: torch's own."""

    comm: Comm
    dtype: torch.dtype
    optimizer: OptimizerFactory
    kernels: Kernels | None = None


@dataclass(frozen=True)
class Observed:
    """What a rank saw of its chip in one run.

    Attributes:
        saved: what a step's first backward takes less than the others, in seconds per byte of weights.
        computed: the chip's seconds in parts of steps that hold the same actions.
        tail: those outside of actions; owned: the elements that are updated then.
    """

    rank: int
    observation: Observation
    saved: float
    computed: tuple[float, ...]
    tail: float
    owned: int


def observe(run: Run, chip: str, job: Job, steps: int) -> Observed | None:
    """Take part in ``run``; every rank of the job calls it, also those that the plan leaves out (None). Actions count
    where all stages are busy: those that share a core or its caches take a tenth longer then, as in a step.

    Args:
        chip: its own.
        steps: that count, after one that warms up.
    """
    runtime, comm = _runtime(run, job), job.comm
    if runtime is None:
        return None
    forward: list[float] = []
    backward: list[float] = []
    apart: dict[str, list[float]] = {"F": [], "B": []}
    computed: list[float] = []
    tails: list[float] = []
    saved: list[float] = []
    later = run.later_stages(comm.rank)
    for step in range(steps + 1):
        before = comm.clock.computed
        stats = runtime.train_step(_fetch(run), 0, run.plan.global_batch_size if step else run.warm_up, lr=1e-6)
        actions = sum(t.computed for t in stats.actions)
        tail = comm.clock.computed - before - actions
        if step == 0:  # allocations, caches, lazy initialisation
            continue
        parts = []
        for kind, into in (("F", forward), ("B", backward)):
            every = [t.computed for t in stats.actions if t.action.kind == kind]
            parts.append(steady(kind, every, later))
            into += parts[-1]
            apart[kind] += [t.end - t.start - t.computed for t in stats.actions if t.action.kind == kind]
        saved.append(median(parts[-1]) - every[0])
        half = min(map(len, parts)) // 2
        computed += [sum(sum(part[i : i + half]) for part in parts) for i in (0, half)] if half else []
        tails.append(tail)
    stage = runtime.stage
    width = max(forward) - min(forward) + max(backward) - min(backward)
    observation = Observation(
        chip, stage.ranks, run.tp, run.micro_batch_size, stage.num_layers, stage.embed, stage.head,
        median(forward), median(backward), width / (median(forward) + median(backward)),
        (fmean(apart["F"]), fmean(apart["B"])),
    )  # fmt: skip
    assert runtime.optimizer is not None
    owned = sum(master.numel() for _, _, master in runtime.optimizer.owned())
    held = sum(p.numel() * p.element_size() for p in runtime.model.parameters())
    return Observed(comm.rank, observation, median(saved) / held, tuple(computed), median(tails), owned)


def observe_exchange(run: Run, chip: str, job: Job, steps: int) -> list[Phase]:
    """Take part in a run of replicas; every rank of the job calls it. What this rank's chip did, bucket by bucket."""
    runtime = _runtime(run, job)
    if runtime is None:
        return []
    found: list[Phase] = []
    for hop in (hop for exchange in runtime.sync.exchanges for hop in exchange.hops):
        hop.runs = None  # as between replicas of unlike degrees: replicas of one chip each would copy next to nothing
        _time_phases(hop, chip, job.dtype, found)
    for step in range(steps + 1):
        if step == 1:  # the first one allocates
            found.clear()
        runtime.train_step(_fetch(run), 0, run.plan.global_batch_size, lr=1e-6)
    return found


def _runtime(run: Run, job: Job) -> Runtime | None:
    """This rank of the run; one that its plan leaves out makes the groups with the others, and gets None."""
    comm = job.comm
    compiled = CompiledPlan(run.plan, run.spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in run.plan.ranks:
        return None

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, run.spec, seed=0)

    chosen = job.kernels(run.plan, run.spec) if job.kernels is not None else None
    return Runtime(compiled, comm, job.dtype, initialize, job.optimizer, kernels=chosen)


def _time_phases(exchange: HopExchange, chip: str, dtype: torch.dtype, found: list[Phase]) -> None:
    """Note what each call of ``exchange`` computes."""
    clock, ranks = exchange.group.comm.clock, exchange.group.size
    wide = torch.promote_types(dtype, torch.float32).itemsize
    given, taken = exchange.given, exchange.taken
    calls = {
        "start": ("pack", given * wide, 1),
        "finish": ("add", (taken + exchange.size) * wide, ranks),
        "start_back": ("pack", taken * dtype.itemsize, 1),
        "finish_back": ("unpack", given * dtype.itemsize, 1),
    }

    def timed(name: str, kind: str, size: int, count: int) -> None:
        plain = getattr(exchange, name)

        def call(*arguments: object) -> object:
            clock.settle()
            before = clock.computed
            out = plain(*arguments)
            clock.settle()
            found.append(Phase(chip, kind, size, count, clock.computed - before))
            return out

        setattr(exchange, name, call)

    for name, what in calls.items():
        timed(name, *what)


def _fetch(run: Run):  # type: ignore[no-untyped-def]
    def fetch(indices: Sequence[int]) -> Batch:
        shape = (len(indices), run.plan.seq_length)
        generator = torch.Generator().manual_seed(indices[0])
        tokens = torch.randint(0, run.spec.vocab_size, shape, generator=generator)
        return Batch(tokens, tokens, torch.arange(shape[1]).expand(shape))

    return fetch
