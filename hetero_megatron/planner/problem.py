"""The planner's input: what is asked (model, cluster, batch and sequence length), the choices that the search may make
(restricted ones define the baselines), and its limits: its time, Ctrl-C, and the work that it may do, which is the same
on every machine."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.catalogue import Chip
from hetero_megatron.errors import UserError
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate
from hetero_megatron.plans import supports
from hetero_megatron.plans.memory.of_plan import cannot_offload
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.spec import ModelSpec, shares

LONG = 32768  # tokens per sequence from which context groups are tried without being asked for


@dataclass(frozen=True)
class SearchSpace:
    """The open choices. None: every sensible value.

    Args:
        micro_batch_sizes: sequences per micro-batch.
        recompute: one level for all stages.
        inner_dp: stages may split the rows of a micro-batch over several TP groups.
        max_tp: largest TP degree.
        over_nodes: TP groups may span nodes.
        max_pipelines: largest number of pipelines.
        equal_pipelines: no | layers (equal stages, and shares of the batch but for a micro-batch) | copies (the same
            chips and degrees, too): all weights are whole then, as the files of some other runtimes want it.
        shares: pipelines may own unequal shares of the optimizer states where memory is tight (small clusters only).
        context: auto (for long sequences, or where nothing fits otherwise) | always | never: stages of context groups.
        more_schedules: auto (up to 64 chips) | always | never: the best plans are also tried under adaptive schedules.
        schedule_effort: how much longer than by default such schedules and better plans are looked for.
        offload: auto (where nothing fits otherwise) | always | never: optimizers in host memory.
        offload_activations: auto (of chips whose link to the host is known, where that saves 1 % of a step) | always
            (of others, too, whatever it saves) | never: those of layers in host memory, where they do not fit
            otherwise, or where that is faster than to recompute them.
        weights: auto (by room) | equal | never: shares of stages that divide their weights.
    """

    micro_batch_sizes: tuple[int, ...] | None = None
    recompute: str | None = None
    inner_dp: bool = True
    max_tp: int = 16
    over_nodes: bool = True
    max_pipelines: int | None = None
    equal_pipelines: str = "no"
    shares: bool = True
    context: str = "auto"
    offload: str = "auto"
    offload_activations: str = "auto"
    weights: str = "auto"
    more_schedules: str = "auto"
    schedule_effort: float = 1.0

    def allows(self, template: PlanTemplate) -> bool:
        """Whether pipelines are as equal as they have to be."""
        if self.equal_pipelines == "no":
            return True
        parts = template.merged().parts
        stages = {(x.shape.micro_batch_size, *(stage.layers for stage in x.shape.stages)) for x in parts}
        counts = [x.num_micro_batches for x in parts]
        most = 1 if self.equal_pipelines == "copies" else len(parts)
        return len(stages) == 1 and max(counts) - min(counts) <= 1 and len(parts) <= most

    def activations_away(self, chips: Mapping[str, Chip]) -> frozenset[str]:
        """Those of the chip types whose stages may have activations in host memory."""
        if self.recompute is not None or self.offload_activations == "never":
            return frozenset()
        all_types = self.offload_activations == "always"
        return frozenset(name for name, chip in chips.items() if all_types or chip.host_bandwidth is not None)


def tp_degrees(pool: DevicePool, group: int, model: ModelSpec, space: SearchSpace, every: bool) -> tuple[int, ...]:
    """TP degrees to try: inside a node all (``every``) or the divisors of its size, over whole nodes powers of two."""
    size, chips = pool.groups[group].per_node, pool.groups[group].chips
    inside = [t for t in range(1, size + 1) if every or size % t == 0]
    outside = []
    if space.over_nodes and size * pool.groups[group].nodes > size:
        t = 2 * size
        while t <= min(chips, 8):
            outside.append(t)
            t *= 2
    return tuple(t for t in (*inside, *outside) if t <= space.max_tp and _divides(model, t))


def _divides(model: ModelSpec, tp: int) -> bool:
    if tp > model.num_heads:
        return False
    try:
        shares(model, (1,) * tp)
    except UserError:
        return False
    return True


def batch_sizes(space: SearchSpace, batch: int, limit: int = 16) -> tuple[int, ...]:
    """Micro-batch sizes to try, smallest first: all up to 4, then powers of two."""
    if space.micro_batch_sizes is not None:
        return tuple(b for b in space.micro_batch_sizes if b <= batch)
    return tuple(b for b in (1, 2, 3, 4, 8, 16, 32) if b <= min(batch, limit))


def options(
    pool: DevicePool, group: int, model: ModelSpec, space: SearchSpace, size: int, every: bool = True
) -> Iterator[StageTemplate]:
    """Stages of a group, without layers, for micro-batches of ``size`` sequences."""
    chips = pool.groups[group].chips
    for tp in tp_degrees(pool, group, model, space, every):
        for dp in range(1, chips // tp + 1):
            if size % dp == 0 and (dp == 1 or (space.inner_dp and supports("dp_split"))):
                yield StageTemplate(group, tp, dp)


def why_no_context(space: SearchSpace, seq_length: int, fits: bool) -> str:
    """Empty where context groups are tried, else the reason why not; ``fits``: some plan without them fits."""
    if not supports("context"):
        return "not supported"
    if space.context == "never":
        return "not tried: --context never"
    if space.context == "always" or not fits or seq_length >= LONG:
        return ""
    return f"not tried: a sequence of {seq_length} tokens (below {LONG}) fits on one chip or TP group"


ShouldStop = Callable[[], bool]
T = TypeVar("T")


def never() -> bool:
    """The ``should_stop`` of work without a limit."""
    return False


class SearchWork:
    """What a search has done, in the time that one action of a schedule takes to be placed (1.6 us on the machine of
    docs/results/planner_search.md). Counted instead of timed, so that equal questions have equal answers everywhere.

    Attributes:
        done: so far; most: what looks for better plans than the first one stops at.
        cut: something was left out for it.
    """

    def __init__(self) -> None:
        self.done, self.most, self.cut = 0.0, math.inf, False

    def add(self, actions: float) -> None:
        self.done += actions

    def left(self, kept: float = 0) -> float:
        """What may still be done if so much is ``kept`` for later."""
        return max(self.most - kept - self.done, 0)

    def over(self, kept: float = 0) -> bool:
        """Whether to stop. The caller must stop when True."""
        over = self.left(kept) <= 0
        self.cut = self.cut or over
        return over


class TimeBudget:
    """Time limit shared by all searches of one command, so that one limit and one Ctrl-C apply to all of them.

    Attributes:
        interrupted: Ctrl-C was pressed once. A second one is not caught and ends the command.
        cut: the time limit or Ctrl-C made a search leave something out.
        watch: told the seconds since the beginning whenever a search asks whether to stop.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.began = time.monotonic()
        self.deadline = None if time_limit is None else self.began + time_limit
        self.watch: Callable[[float], None] | None = None
        self.interrupted = self.cut = False
        self._catches = True

    def uncaught(self) -> TimeBudget:
        """The same limit for work that Ctrl-C may abort immediately."""
        uncaught = copy.copy(self)
        uncaught._catches = False
        return uncaught

    def over(self) -> bool:
        """Whether to stop now. The caller must stop when True: the result is then marked as cut short."""
        now = time.monotonic()
        if self.watch is not None:
            self.watch(now - self.began)
        if self.interrupted or (self.deadline is not None and now > self.deadline):
            self.cut = True
            return True
        return False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Context in which Ctrl-C leaves the block instead of ending the command."""
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.stop()

    def stop(self) -> None:
        """Call after catching KeyboardInterrupt: mark the search as interrupted, or re-raise for an :meth:`uncaught`
        budget."""
        if not self._catches:
            raise KeyboardInterrupt
        self.interrupted = self.cut = True

    def finish(self, work: Callable[[], T]) -> T:
        """Run ``work``; retry once if Ctrl-C interrupts it, so there is still a plan to print. For short work only."""
        with self.catching():
            return work()
        return work()


@dataclass(frozen=True)
class SearchOptions:
    """Args:
        dtype: of weights and activations.
        time_limit: seconds after which the best plan found so far is returned; None: no limit.
        work: up to 64 chips, what a search that has a plan may do in all without a time limit, in actions of schedules
            (:class:`SearchWork`); at least ``LEAST_WORK`` of it for further schedules.
        top: number of best templates that are timed by the step simulator.
        space: the choices that plans may make.
        costs: assumptions of the cost model.
        seed: of graph partitioning, the only randomised part."""

    dtype: str = "bf16"
    time_limit: float | None = None
    work: float = 1_200_000
    top: int = 6
    space: SearchSpace = SearchSpace()
    costs: CostOptions = CostOptions()
    seed: int = 0


DEFAULTS = SearchOptions()


@dataclass(frozen=True)
class PlanningProblem:
    """One question to the planner.

    Args:
        seq_length: tokens per sequence.
        global_batch_size: sequences per optimizer step.
    """

    model: ModelSpec
    cluster: Cluster
    seq_length: int
    global_batch_size: int
    options: SearchOptions = DEFAULTS

    @property
    def space(self) -> SearchSpace:
        return self.options.space

    @property
    def dtype(self) -> str:
        return self.options.dtype

    def on(self, cluster: Cluster) -> PlanningProblem:
        return replace(self, cluster=cluster)

    def with_batch(self, global_batch_size: int) -> PlanningProblem:
        return replace(self, global_batch_size=global_batch_size)

    def with_space(self, **changes: Any) -> PlanningProblem:
        """The same problem with other choices; ``changes``: fields of :class:`SearchSpace`."""
        return replace(self, options=replace(self.options, space=replace(self.space, **changes)))

    def with_margin(self, margin: float) -> PlanningProblem:
        """The same problem with another share of device memory kept free."""
        return replace(self, options=replace(self.options, costs=replace(self.options.costs, margin=margin)))

    def without_fp8(self) -> PlanningProblem:
        """The same problem with all products in the dtype of the run."""
        return replace(self, options=replace(self.options, costs=replace(self.options.costs, fp8=None)))

    @property
    def can_offload(self) -> bool:
        """Whether the runtime can keep this optimizer in host memory."""
        return cannot_offload(self.options.costs.moments, self.dtype, self.options.costs.muon) is None

    def activations_away(self) -> frozenset[str]:
        """Chip types whose stages may have activations in host memory."""
        return frozenset() if self.model.mtp_layers else self.space.activations_away(self.cluster.chips)

    def check(self) -> None:
        """Raise UserError for sequence lengths, batch sizes and offload settings that no plan can have."""
        model, batch, sizes = self.model, self.global_batch_size, self.space.micro_batch_sizes
        if not 1 <= self.seq_length <= model.max_position_embeddings:
            raise UserError(
                f"the model has {model.max_position_embeddings} positions", field="--seq-length", value=self.seq_length,
                accepted=f"1 to {model.max_position_embeddings}",
            )  # fmt: skip
        ways, equal = ("auto", "always", "never"), ("no", "layers", "copies")
        divided = ("auto", "equal", "never")
        for name, values in (("context", ways), ("offload", ways), ("offload_activations", ways),
                             ("more_schedules", ways), ("equal_pipelines", equal), ("weights", divided)):  # fmt: skip
            if (value := getattr(self.space, name)) not in values:
                raise UserError("unknown value", field=name, value=value, accepted=", ".join(values))
        problem = cannot_offload(self.options.costs.moments, self.dtype, self.options.costs.muon)
        if self.space.offload == "always" and problem is not None:
            raise UserError(problem[0], field="--offload", value="always", accepted="auto, never")
        if self.space.offload_activations == "always" and self.space.recompute is not None:
            raise UserError("it is looked for in place of recompute, which is given", field="--offload-activations",
                            value="always", accepted="auto, never, or no --recompute")  # fmt: skip
        if self.space.offload_activations == "always" and model.mtp_layers:
            raise UserError("not built beside modules that predict further tokens", field="--offload-activations",
                            value="always", accepted="auto or never, or --mtp-num-layers 0")  # fmt: skip
        if batch < 1:
            raise UserError("too small", field="--global-batch-size", value=batch, accepted="an integer >= 1")
        if sizes is not None and len(sizes) == 1 and batch % sizes[0]:
            size = sizes[0]
            lower = batch // size * size
            divisible = f"{lower} or {lower + size}" if lower else str(size)
            raise UserError(
                f"cannot be divided into micro-batches of {size} sequences", field="--global-batch-size", value=batch,
                accepted=f"{divisible}, or --micro-batch-size 1",
            )  # fmt: skip
