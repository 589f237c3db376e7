"""Seconds of layers, embedding and head: what stages of short pipelines took, and a fit that tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, median_low

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import initial_values
from hetero_megatron.ops import KernelPlan
from hetero_megatron.parallel.update import OptimizerFactory
from hetero_megatron.plan import Plan
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.planner.cost.layer_cost import SWAPS
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.calibration.measure import relative_spread, robust_fit
from hetero_megatron.training.calibration.pipelines import Run, steady
from hetero_megatron.training.runtime import Runtime, StepStats

TABLES = ("layers", "embed", "head")
NOISE = 3  # standard deviations of an action by which a straggler is slower, at least


@dataclass(frozen=True)
class Job:
    """What all runs have in common. ``kernels``: of this rank's stage, as runs would have them; None: torch's own."""

    comm: Comm
    dtype: torch.dtype
    optimizer: OptimizerFactory
    kernels: Callable[[Plan, ModelSpec], KernelPlan] | None = None

    def runtime(self, run: Run) -> Runtime | None:
        """This rank of the run; one that its plan leaves out makes the groups with the others, and gets None."""
        compiled = CompiledPlan(run.plan, run.spec)
        self.comm.create_groups(compiled.groups)
        if self.comm.rank not in run.plan.ranks:
            return None
        kernels = None if self.kernels is None else self.kernels(run.plan, run.spec)
        initialize = partial(initial_values, spec=run.spec, seed=0)
        return Runtime(compiled, self.comm, self.dtype, initialize, self.optimizer, kernels)


def train(runtime: Runtime, run: Run, sequences: int) -> StepStats:
    """One step; which tokens makes no difference."""

    def fetch(indices: Sequence[int]) -> Batch:
        positions = torch.arange(run.plan.seq_length).expand(len(indices), -1)
        tokens = (positions + torch.tensor(indices)[:, None]) % run.spec.vocab_size
        return Batch(tokens, tokens, positions)

    return runtime.train_step(fetch, 0, sequences, lr=1e-6)


@dataclass(frozen=True)
class StageTimes:
    """What one rank saw of its stage in one run; seconds are medians, by the chip's own clock.

    Attributes:
        ranks: of its TP group; parts: number of layers, embeddings and heads; alone: without other pipelines beside it.
        forward, backward: compute seconds of an action; spread: the larger of both, relative; waited: what a forward
            and a backward took besides, in exchanges with the TP group.
        saved: what a step's first backward takes less than others, in seconds per byte of weights.
        outside: seconds of a step outside of actions; owned: the elements that are updated then.
    """

    chip: str
    ranks: tuple[int, ...]
    micro_batch_size: int
    parts: tuple[int, int, int]
    forward: float
    backward: float
    spread: float = 0.0
    waited: tuple[float, float] = (0.0, 0.0)
    saved: float = 0.0
    outside: float = 0.0
    owned: int = 0
    alone: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """(TP degree, micro-batch size)."""
        return len(self.ranks), self.micro_batch_size

    @property
    def swaps(self) -> int:
        """Exchanges with the TP group, each way."""
        layers, *ends = self.parts
        return SWAPS * layers + sum(ends) if len(self.ranks) > 1 else 0


def observe(run: Run, chip: str, job: Job, steps: int) -> StageTimes | None:
    """Take part in ``run``: ``steps`` steps after one that warms up. Every rank of the job calls it with its own chip
    type, also those that the plan leaves out (None)."""
    runtime, clock = job.runtime(run), job.comm.clock
    if runtime is None or runtime.optimizer is None:
        return None
    train(runtime, run, run.warm_up)
    place, stage = runtime.place, runtime.stage
    later = len(run.plan.pipelines[place.pipeline].stages) - 1 - place.stage
    seconds, waited = ({kind: list[float]() for kind in "FB"} for _ in range(2))
    saved, outside = list[float](), list[float]()
    for _ in range(steps):
        before = clock.computed
        stats = train(runtime, run, run.plan.global_batch_size)
        outside.append(clock.computed - before - sum(t.computed for t in stats.actions))
        for kind in "FB":
            actions = [t for t in stats.actions if t.action.kind == kind]
            found = steady(kind, [t.computed for t in actions], later)
            seconds[kind] += found
            waited[kind] += steady(kind, [t.end - t.start - t.computed for t in actions], later)
        saved.append(median(found) - actions[0].computed)
    parts = stage.num_layers, int(stage.embed), int(stage.head)
    held = sum(p.numel() * p.element_size() for p in runtime.model.parameters())
    return StageTimes(
        chip, stage.ranks, run.plan.pipelines[0].micro_batch_size, parts,
        median(seconds["F"]), median(seconds["B"]), max(map(relative_spread, seconds.values())),
        (median(waited["F"]), median(waited["B"])), median(saved) / held, median(outside),
        sum(m.numel() for _, _, m in runtime.optimizer.owned()), len(run.plan.pipelines) == 1,
    )  # fmt: skip


def fit_stages(
    seen: Sequence[StageTimes], fixed: float | None = None
) -> tuple[float, dict[tuple[int, int], dict[str, tuple[float, float]]], float]:
    """Costs of one chip type: (seconds of an action besides its layers, which may be known as ``fixed``; by (TP degree,
    micro-batch size): seconds (forward, backward) of each of ``TABLES``; the relative spread of stages around them)."""
    keys = sorted({o.key for o in seen})
    rows, seconds = [], []
    for o in seen:
        for way, took in enumerate((o.forward, o.backward)):
            row, at = [0.0] * (2 + 6 * len(keys)), 2 + 6 * keys.index(o.key) + way
            row[way], row[at : at + 5 : 2] = float(fixed is None), map(float, o.parts)
            rows.append(row)
            seconds.append(max(took - (fixed or 0.0), 0.0))
    (forward, backward, *values), spread = robust_fit(rows, seconds)
    pairs = list(zip(values[::2], values[1::2], strict=True))
    by_key = {key: dict(zip(TABLES, pairs[3 * i :])) for i, key in enumerate(keys)}
    return (forward + backward) / 2 if fixed is None else fixed, by_key, spread


def stragglers(seen: Sequence[StageTimes], tolerance: float) -> dict[tuple[int, ...], float]:
    """Groups that take longer than their chip type by more than ``tolerance``, and than noise: ranks -> times."""
    took: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {}
    for o in seen:
        groups = took.setdefault(o.chip, {})
        groups[o.ranks] = max(groups.get(o.ranks, (0.0, 0.0)), (o.forward + o.backward, o.spread))
    usual = {chip: median_low(seconds for seconds, _ in groups.values()) for chip, groups in took.items()}
    slower = [(r, s / usual[chip], noise) for chip, groups in took.items() for r, (s, noise) in groups.items()]
    return {ranks: times for ranks, times, noise in slower if times > 1 + max(tolerance, NOISE * noise)}
