"""The step simulator: duration of one step of a concrete plan, and memory of every rank.

The plan's own schedule actions are timed (:func:`hetero_megatron.schedule.simulate`), its own buckets travel, and its
own layouts determine which bytes cross which link. Only the seconds per operator and per byte come from a model, the
rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.fp8_checks import fp8_fits
from hetero_megatron.plans.memory.memory_report import OverLimit, over_host, over_limit, refuse
from hetero_megatron.plans.memory.of_plan import (
    MemoryBytes,
    estimate_memory,
    format_communicators,
    state_bytes,
    with_communicators,
)
from hetero_megatron.plans.program import splits_backward
from hetero_megatron.predictor.cost.cost_options import CostOptions, source_of
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.predictor.simulate.grad_sync import BucketSpan, GradSync
from hetero_megatron.predictor.simulate.next_forward import end_of_parameters
from hetero_megatron.predictor.simulate.stage_cost import PipelineCosts, PreparedPlan, StageCosts
from hetero_megatron.predictor.simulate.uncertainty import late_seconds, seconds_range
from hetero_megatron.schedule import Timeline, simulate
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import sequence_flops
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.predictor.simulate.role_prediction import RolePrediction, RolloutPrediction


@dataclass(frozen=True)
class Prediction:
    """One optimizer step of a plan.

    Attributes:
        step_seconds: from the first forward until the next step's can begin.
        seconds_range: in which the step is expected (:mod:`~hetero_megatron.predictor.simulate.uncertainty`); None
            where some chip's rates are not measured.
        tokens_per_second: of the whole plan.
        mfu: model FLOPs over the peak of the chips used; None where a peak is unknown (emulated chips).
        memory: by rank, including the framework's overhead; limits: usable bytes by rank; over: ranks that do not fit.
        timelines: of each pipeline; pipeline_seconds: their ends.
        reduces, all_gathers: when each bucket travels.
        parts: seconds of the step: ``pipelines``, ``jitter`` (added by unsteady chips), ``gradients`` (exposed),
            ``optimizer``, ``parameters``, ``outer`` (exchanges between islands, the mean of all steps).
        busy: by rank, seconds of its stage's forwards and backwards, including TP exchanges.
        assumed: chips whose rates come from data sheets and default efficiencies, with the source of the sheet.
        tails: by rank, seconds from the last action of all pipelines that hold its layers until its gradients are
            summed, which the end of the step waits for.
        unsplit: other chips of a plan that splits backwards whose rates do not say what B_INPUT and W take: W is
            counted by FLOPs, and splitting costs nothing.
        dtypes: by rank, what its linear modules compute in, as words; empty where the run has no fp8.
        communicators: what of ``memory`` the communication libraries take, in words, and where that is from.
        role: of a second model that only runs forward (:mod:`~hetero_megatron.predictor.simulate.beside`).
        sync: buckets and their prices, which plans with the same stages share.
    """

    plan: Plan
    step_seconds: float
    seconds_range: tuple[float, float] | None
    tokens_per_second: float
    mfu: float | None
    memory: Mapping[int, MemoryBytes]
    limits: Mapping[int, int]
    over: tuple[OverLimit, ...]
    timelines: tuple[Timeline, ...]
    reduces: tuple[BucketSpan, ...]
    all_gathers: tuple[BucketSpan, ...]
    parts: Mapping[str, float]
    busy: Mapping[int, float]
    chips: Mapping[int, str]
    assumed: Mapping[str, str]
    tails: Mapping[int, float]
    unsplit: tuple[str, ...] = ()
    dtypes: Mapping[int, str] = field(default_factory=dict)
    communicators: tuple[str, ...] = ()
    role: RolePrediction | RolloutPrediction | None = None
    sync: GradSync | None = field(default=None, repr=False, compare=False)

    @property
    def pipeline_seconds(self) -> tuple[float, ...]:
        return tuple(t.step_seconds for t in self.timelines)

    @property
    def computed_seconds(self) -> float:
        """Seconds until the last backward has ended on every rank."""
        return self.parts["pipelines"] + self.parts["jitter"]

    def describe_assumed(self) -> str:
        """The ``assumed`` chips, each with its source."""
        return ", ".join(f"{chip} ({source})" for chip, source in self.assumed.items())

    def require_fit(self) -> Prediction:
        """Self; UserError for a plan that does not fit, naming the rank and by how many bytes."""
        if self.over:
            raise refuse(self.over, self.memory)
        return self


def predict(
    plan: Plan, model: ModelSpec, cluster: Cluster, dtype: str = "bf16", costs: CostModel | None = None,
    options: CostOptions | None = None, prepared: PreparedPlan | None = None, sync: GradSync | None = None,
) -> Prediction:  # fmt: skip
    """Simulate one step of a valid plan on the chips of the cluster.

    Args:
        costs: the cost model, when the caller has one for this model, cluster, sequence length and dtype.
        prepared: the compiled plan, when the caller has it.
        sync: of a prediction by the same cost model, whose plan may have had another schedule.

    Raises:
        UserError: the plan does not match the cluster, or rates or links are missing.
    """
    if costs is None:
        validate(plan, model, cluster, dtype=dtype)
        costs = CostModel(model, cluster, plan.seq_length, dtype, options or CostOptions())
    if costs.options.fp8 is not None or plan.dtypes:
        fp8_fits(plan, model, costs.options.fp8, costs.dtype, cluster)
    return StepSimulator(plan, costs, prepared, sync).prediction()


@dataclass(frozen=True)
class StepTimes:
    """``end``: seconds of the step; the others as in :class:`Prediction`."""

    end: float
    reduces: tuple[BucketSpan, ...]
    all_gathers: tuple[BucketSpan, ...]
    parts: Mapping[str, float]
    tails: Mapping[int, float]


class StepSimulator:
    """One step of a valid plan: pipelines, then reduction of gradients, optimizer and all-gather of parameters. Every
    part is simulated when it is first asked for. ``prepared``, ``sync``: as of :func:`predict`.

    Raises:
        UserError: the cluster has fewer chips than the plan.
    """

    def __init__(
        self, plan: Plan, costs: CostModel, prepared: PreparedPlan | None = None, sync: GradSync | None = None
    ) -> None:
        self.plan, self.costs = plan, costs
        self.prepared = prepared or PreparedPlan(CompiledPlan(plan, costs.model, muon=costs.options.muon))
        if plan.ranks[-1] >= costs.cluster.world_size:
            raise UserError(
                f"the cluster has {plural(costs.cluster.world_size, 'chip')}", field="ranks", value=plan.ranks[-1],
                accepted=f"ranks 0 to {costs.cluster.world_size - 1}", where=costs.cluster.file,
            )  # fmt: skip
        assert costs.seq_length == plan.seq_length, "costs for another sequence length"
        self.chips = {r: costs.cluster.ranks[r].chip for r in plan.ranks}
        self.stages = StageCosts(plan, costs, self.prepared)
        if sync is not None:
            assert sync.plan.stages == plan.stages and sync.plan.islands == plan.islands and sync.model is costs
            self.sync = sync

    @cached_property
    def sync(self) -> GradSync:
        return GradSync(self.plan, self.costs, self.prepared.structure(self.costs))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Of gradients: those of the reduction, if that was given or made, whose hops take longer to find."""
        return self.sync.all_buckets if "sync" in self.__dict__ else self.prepared.compiled.buckets

    @cached_property
    def pipelines(self) -> list[PipelineCosts]:
        return [self.stages.of(p) for p in self.plan.pipelines]

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """Of each pipeline; equal ones are the same object."""
        timeline_of: dict[tuple[object, ...], Timeline] = {}
        out = []
        for costs, pipeline in zip(self.pipelines, self.plan.pipelines, strict=True):
            key = (id(costs), pipeline.num_micro_batches, pipeline.orders, pipeline.in_flight)
            if key not in timeline_of:
                timeline_of[key] = simulate(self.prepared.schedule(pipeline), costs.costs)
            out.append(timeline_of[key])
        return tuple(out)

    @cached_property
    def reference_seconds(self) -> float:
        """Of the forwards over the batch that come before all else."""
        options = self.costs.options
        if not options.reference:
            return options.role_seconds
        return options.role_seconds + options.reference * max(
            simulate(self.prepared.schedule(pipeline).forward_only(), costs.costs).step_seconds
            for costs, pipeline in zip(self.pipelines, self.plan.pipelines, strict=True)
        )

    @property
    def pipeline_seconds(self) -> float:
        """Until the last backward has ended, on steady chips."""
        return max(timeline.step_seconds for timeline in self.timelines)

    @property
    def computing(self) -> dict[int, float]:
        """By rank, seconds per step of its own forwards and backwards without TP exchanges: what the runtime measures
        as busy. (:attr:`Prediction.busy` is the stage's, with them.)"""
        return self._computing(self.costs.options.reference)

    @property
    def computing_forward(self) -> dict[int, float]:
        """The same of one forward over the batch."""
        both, once = self._computing(1), self._computing(0)
        return {rank: both[rank] - once[rank] for rank in both}

    def _computing(self, again: int) -> dict[int, float]:
        """``again``: forwards besides."""
        return {
            rank: pipeline.num_micro_batches * self.stages.computing(stage, unit, t, again)
            for pipeline in self.plan.pipelines
            for stage in pipeline.stages
            for unit in stage.units
            for t, rank in enumerate(unit.ranks)
        }

    @cached_property
    def times(self) -> StepTimes:
        costs, sync = self.costs, self.sync
        late = late_seconds(self.plan, self.stages, self.timelines)
        computed, begin, parts, chunks = self._last_backwards(late)

        ready = sync.last_backwards(begin, parts, chunks) if costs.options.overlap else self._all_at(computed)
        summed, reduces = sync.run(ready, computed, costs.options.gradient_bytes or costs.wide, False)
        barrier = max(summed.values()) + self._barrier_seconds()
        updated = {r: barrier + self._update_seconds(r) for r in self.plan.ranks}
        written, all_gathers = sync.run(self._all_at(updated), updated, costs.item, True)
        ahead = costs.options.gather_ahead
        end = end_of_parameters(self.plan, sync, self.timelines, updated, written) if ahead else max(written.values())
        last = max(computed.values())
        parts_of_step = {
            "pipelines": last - late, "jitter": late, "gradients": barrier - last,
            "optimizer": max(updated.values()) - barrier,
            "parameters": end - max(updated.values()),
            "reference": self.reference_seconds,
            "outer": self._outer_seconds(end),
        }  # fmt: skip
        end += self.reference_seconds + parts_of_step["outer"]
        return StepTimes(end, tuple(reduces), tuple(all_gathers), parts_of_step, self._tails(computed, summed))

    def _outer_seconds(self, step: float) -> float:
        if self.plan.outer is None:
            return 0.0
        from hetero_megatron.predictor.simulate.grad_sync import outer_seconds

        costs = self.costs
        return outer_seconds(self.plan, costs.model, self.sync.all_buckets, costs.links, costs.wide, step)

    def _tails(self, computed: Mapping[int, float], summed: Mapping[int, float]) -> dict[int, float]:
        last = dict(computed)
        for bucket in self.sync.buckets:
            end = max(computed[rank] for rank in bucket.ranks)
            for rank in bucket.ranks:
                last[rank] = max(last[rank], end)
        return {rank: max(0.0, end - last[rank]) for rank, end in summed.items()}

    def _all_at(self, seconds: Mapping[int, float]) -> Callable[[Bucket], NDArray[np.float64]]:
        structure = self.sync.structure
        every = np.array([seconds[r] for r in structure.places.ranks.tolist()])
        return lambda bucket: np.asarray(every[structure.at(bucket)])

    def prediction(self) -> Prediction:
        costs, times, timelines = self.costs, self.times, self.timelines
        chips = sorted(set(self.chips.values()))
        split = chips if splits_backward(self.plan) else []
        return Prediction(
            plan=self.plan,
            step_seconds=times.end,
            seconds_range=seconds_range(times.end, self.stages, timelines, times.parts),
            tokens_per_second=self.plan.global_batch_size * self.plan.seq_length / times.end,
            mfu=self._mfu(times.end),
            memory=self.memory,
            limits=self.limits,
            over=self.over,
            timelines=timelines,
            reduces=times.reduces,
            all_gathers=times.all_gathers,
            parts=times.parts,
            busy={
                rank: timeline.busy[s]
                for timeline, pipeline in zip(timelines, self.plan.pipelines, strict=True)
                for s, stage in enumerate(pipeline.stages)
                for rank in stage.ranks
            },
            chips=self.chips,
            communicators=tuple(format_communicators(self.plan.ranks, costs.cluster)),
            tails=times.tails,
            sync=self.sync,
            dtypes=self._dtypes(),
            assumed={
                c: source_of(costs.cluster.chips[c], costs.dtype) for c in chips if not costs.chip_rates(c).calibrated
            },
            unsplit=tuple(c for c in split if costs.chip_rates(c).calibrated and not self._split_measured(c)),
        )

    def _dtypes(self) -> dict[int, str]:
        fp8 = self.costs.options.fp8
        if fp8 is None:
            return {}
        words = {True: str(fp8), False: self.costs.dtype}
        return {rank: words[self.costs.computes_in_fp8(stage)] for stage in self.plan.stages for rank in stage.ranks}

    def _split_measured(self, chip: str) -> bool:
        """Whether B_INPUT and W were measured in what the stages on the chip compute in."""
        stages = [stage for stage in self.plan.stages if any(self.chips[r] == chip for r in stage.ranks)]
        return all(self.costs.operators(chip, self.costs.computes_in_fp8(s)).split_measured for s in stages)

    def _last_backwards(
        self, late: float
    ) -> tuple[dict[int, float], dict[int, float], dict[int, UnitSeconds], dict[int, int]]:
        """(end of the last action, start of the last backward, its parts, its chunk), by rank; ``late``: added to all
        times. The first backward of a step writes gradients instead of adding to them; where the pipeline waits for its
        busiest stage, everything ends earlier by what that stage saves."""
        ended, begin, parts, chunks = {}, {}, {}, {}
        for pipeline, costs, timeline in zip(self.plan.pipelines, self.pipelines, self.timelines, strict=True):
            busiest = max(range(len(pipeline.stages)), key=timeline.busy.__getitem__)
            saved = min(self._saved_seconds(r) for r in pipeline.stages[busiest].ranks)
            for s, stage in enumerate(pipeline.stages):
                row = timeline.schedule.stages[s]
                at = next(i for i in range(len(row) - 1, -1, -1) if row[i].kind in ("B", "W"))
                start, part = timeline.starts[s][at], costs.parts[s]
                if row[at].kind == "W":
                    part = part.only_weights
                for rank in stage.ranks:
                    ended[rank] = timeline.ends[s][-1] - saved + late
                    begin[rank] = start - saved + late
                    parts[rank], chunks[rank] = part, row[at].chunk
        return ended, begin, parts, chunks

    def _saved_seconds(self, rank: int) -> float:
        return self.costs.first_backward_saved(self.chips[rank], self.sync.held.get(rank, 0))

    def _barrier_seconds(self) -> float:
        """The all-reduce of loss and norm; the first rank's links count."""
        ranks, where = self.plan.ranks, self.costs.cluster.ranks
        first, others = where[ranks[0]], [where[r] for r in ranks[1:]]
        kinds = {(first.group, other.group, first.node == other.node) for other in others}
        return self.costs.links.barrier_seconds(kinds, len(ranks))

    def _update_seconds(self, rank: int) -> float:
        updated = self.sync.owned if self.costs.options.sharded else self.sync.held
        home, offload = self.costs.cluster.group_of(rank), rank in self.plan.offloading
        flops, resident = self.sync.matrix_flops.get(rank, 0.0), rank in self.plan.sharding_stages
        return self.costs.update_seconds(home, updated.get(rank, 0), flops, offload, resident)

    @cached_property
    def limits(self) -> dict[int, int]:
        """Usable bytes by rank."""
        return {r: self.costs.memory_limit(self.chips[r]) for r in self.plan.ranks}

    @cached_property
    def over(self) -> tuple[OverLimit, ...]:
        """The ranks that do not fit, worst first, and nodes without enough host memory."""
        return over_limit(self.memory, self.limits, self.chips) + over_host(self.memory, self.costs.cluster)

    @cached_property
    def memory(self) -> dict[int, MemoryBytes]:
        """Of every rank, including the framework's overhead and communicators."""
        costs, buckets = self.costs, self.buckets
        needs_of_rank = estimate_memory(
            self.plan, costs.model, costs.dtype, costs.options.moments, buckets,
            logits_bytes=costs.options.logits_bytes, routing=costs.options.routing, fp8=costs.options.fp8,
        )  # fmt: skip
        memory = {}
        for rank, needs in needs_of_rank.items():
            optimizer = needs.optimizer
            if not costs.options.sharded and rank not in self.plan.offloading:
                held = self.sync.held[rank]
                optimizer = state_bytes(held, held, costs.item, costs.options.moments)[2]
            overhead = int(costs.chip_rates(self.chips[rank]).overhead_bytes)
            memory[rank] = replace(needs, optimizer=optimizer, overhead=overhead)
        return with_communicators(memory, self.plan, costs.model, buckets, costs.cluster, costs.dtype)

    def _mfu(self, seconds: float) -> float | None:
        peaks = [self.costs.cluster.chips[c].flops.get(self.costs.dtype) for c in self.chips.values()]
        if any(peak is None for peak in peaks):
            return None
        flops = sequence_flops(self.costs.model, self.plan.seq_length) * self.plan.global_batch_size
        return flops / seconds / sum(peak for peak in peaks if peak)
