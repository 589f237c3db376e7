"""Seconds of layers, embedding and head: what stages of short pipelines took, and a fit that tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low

import torch

from hetero_megatron.calibration.measure import relative_spread, robust_fit
from hetero_megatron.calibration.pipelines import Run, half_split, steady
from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import initial_values
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.spec import Kernel
from hetero_megatron.ops.stage import default_kernels
from hetero_megatron.parallel.optimizer import OptimizerFactory
from hetero_megatron.plans import Plan
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, whole_share
from hetero_megatron.spec.flops import TP_COLLECTIVES
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.step_numbers import StepStats

TABLES = ("layers", "embed", "head")
Key = tuple[str, int, int]  # fingerprint of the model, TP degree, micro-batch size
ByKey = dict[Key, dict[str, tuple[float, float]]]  # by table: seconds
NOISE = 3  # standard deviations of an action by which a straggler is slower, at least


@dataclass(frozen=True)
class Job:
    """What all runs have in common. ``kernels``: of this rank's stage, as runs would have them; None: torch's own.
    ``fp8``: by recipe, the products that this rank's platform has in fp8."""

    comm: Comm
    dtype: torch.dtype
    optimizer: OptimizerFactory
    kernels: Callable[[Plan, ModelSpec], KernelPlan] | None = None
    fp8: Mapping[str, Kernel] = field(default_factory=dict)

    def kernels_of(self, plan: Plan, spec: ModelSpec, head: bool) -> KernelPlan:
        """Of a plan of this rank alone; ``head``: with those of a model's head."""
        if self.kernels is not None:
            return self.kernels(plan, spec)
        return default_kernels(spec, whole_share(spec), head, self.dtype, self.comm.device)

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
        fingerprint: of the model; ranks: of its TP group; parts: number of layers, embeddings and heads.
        alone: without other pipelines beside it.
        forward, backward: compute seconds of an action; spread: the larger of both, relative; waited: what a forward
            and a backward took besides, in exchanges with the TP group.
        split: compute seconds of B_INPUT and W.
        saved: what a step's first backward takes less than others, in seconds per byte of weights.
        outside: seconds of a step outside of actions; owned: the elements that are updated then.
    """

    chip: str
    fingerprint: str
    ranks: tuple[int, ...]
    micro_batch_size: int
    parts: tuple[int, int, int]
    forward: float
    backward: float
    spread: float = 0.0
    waited: tuple[float, float] = (0.0, 0.0)
    split: tuple[float, float] = (0.0, 0.0)
    saved: float = 0.0
    outside: float = 0.0
    owned: int = 0
    alone: bool = True

    @property
    def key(self) -> Key:
        return self.fingerprint, len(self.ranks), self.micro_batch_size

    @property
    def tp_collectives(self) -> int:
        """Exchanges with the TP group, each way."""
        layers, *ends = self.parts
        return TP_COLLECTIVES * layers + sum(ends) if len(self.ranks) > 1 else 0


def observe(run: Run, chip: str, job: Job, steps: int) -> StageTimes | None:
    """Take part in ``run``: ``steps`` steps after one that warms up. Every rank of the job calls it with its own chip
    type, also those that the plan leaves out (None)."""
    runtime, clock = job.runtime(run), job.comm.clock
    if runtime is None or runtime.optimizer is None:
        return None
    train(runtime, run, run.warm_up)
    runtime.use_schedules(CompiledPlan(half_split(run.plan), run.spec))
    place, stage = runtime.here.place, runtime.here.stage
    later = len(run.plan.pipelines[place.pipeline].stages) - 1 - place.stage
    seconds, waited = ({kind: list[float]() for kind in ("F", "B", "B_INPUT", "W")} for _ in range(2))
    saved, outside = list[float](), list[float]()
    for _ in range(steps):
        seconds_before = clock.computed
        stats = train(runtime, run, run.plan.global_batch_size)
        outside.append(clock.computed - seconds_before - sum(t.computed for t in stats.actions))
        backwards = [t for t in stats.actions if t.action.kind in ("B", "B_INPUT")]
        forwards = [t for t in stats.actions if t.action.kind == "F"]
        counted = [*steady("F", forwards, later), *steady("B", backwards, later)]
        inner = {t.action.micro_batch for t in counted if t.action.kind == "B_INPUT"}
        counted += [t for t in stats.actions if t.action.kind == "W" and t.action.micro_batch in inner]
        for t in counted:
            seconds[t.action.kind].append(t.computed)
            waited[t.action.kind].append(t.end - t.start - t.computed)
        whole_backwards = [t.computed for t in counted if t.action.kind == "B"]
        saved.append(median(whole_backwards) - backwards[0].computed)
    parts = stage.num_layers, int(stage.embed), int(stage.head)
    held_bytes = sum(p.numel() * p.element_size() for p in runtime.stage_model.module.parameters())
    return StageTimes(
        chip, run.fingerprint, stage.ranks, run.plan.pipelines[0].micro_batch_size, parts,
        median(seconds["F"]), median(seconds["B"]), max(relative_spread(seconds[kind]) for kind in "FB"),
        (median(waited["F"]), median(waited["B"])), (median(seconds["B_INPUT"]), median(seconds["W"])),
        median(saved) / held_bytes, median(outside),
        sum(m.numel() for _, _, m in runtime.optimizer.owned()), len(run.plan.pipelines) == 1,
    )  # fmt: skip


def fit_stages(seen: Sequence[StageTimes], fixed: float | None = None) -> tuple[float, ByKey, float]:
    """Costs of one chip type: (seconds of an action besides its layers, which may be known as ``fixed``; by key:
    seconds (forward, backward) of each of ``TABLES``; the relative spread of stages around them)."""
    fixed_pair = None if fixed is None else (fixed, fixed)
    (forward, backward), by_key, spread = _fit(seen, [(o.forward, o.backward) for o in seen], fixed_pair)
    return (forward + backward) / 2 if fixed is None else fixed, by_key, spread


def fit_split(seen: Sequence[StageTimes]) -> tuple[float, ByKey, float]:
    """The same of the parts of a backward, (B_INPUT, W); the first are the seconds of a W besides its layers. Stages of
    an embedding alone have none."""
    seen = [o for o in seen if o.parts[0] or o.parts[2]]
    (_, fixed), by_key, spread = _fit(seen, [o.split for o in seen], None)
    return fixed, by_key, spread


def _fit(
    seen: Sequence[StageTimes], pairs: Sequence[tuple[float, float]], fixed: tuple[float, float] | None
) -> tuple[tuple[float, float], ByKey, float]:
    """(fixed seconds of each of two kinds of actions, their seconds by key, spread); ``pairs``: seconds of both."""
    keys = sorted({o.key for o in seen})
    rows, seconds = [], []
    for o, pair in zip(seen, pairs, strict=True):
        for way, took in enumerate(pair):
            row, column = [0.0] * (2 + 6 * len(keys)), 2 + 6 * keys.index(o.key) + way
            row[way], row[column : column + 5 : 2] = float(fixed is None), map(float, o.parts)
            rows.append(row)
            seconds.append(max(took - (fixed[way] if fixed else 0.0), 0.0))
    (first, second, *values), spread = robust_fit(rows, seconds)
    seconds_of_parts = list(zip(values[::2], values[1::2], strict=True))
    by_key = {key: dict(zip(TABLES, seconds_of_parts[3 * i :])) for i, key in enumerate(keys)}
    return fixed or (first, second), by_key, spread


def stragglers(seen: Sequence[StageTimes], tolerance: float) -> dict[tuple[int, ...], float]:
    """Groups that take longer than their chip type by more than ``tolerance``, and than noise: ranks -> times."""
    took: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {}
    for o in seen:
        groups = took.setdefault(o.chip, {})
        groups[o.ranks] = max(groups.get(o.ranks, (0.0, 0.0)), (o.forward + o.backward, o.spread))
    usual = {chip: median_low(seconds for seconds, _ in groups.values()) for chip, groups in took.items()}
    slower = [(r, s / usual[chip], noise) for chip, groups in took.items() for r, (s, noise) in groups.items()]
    return {ranks: times for ranks, times, noise in slower if times > 1 + max(tolerance, NOISE * noise)}
