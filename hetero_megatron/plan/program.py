"""The whole step of a plan as data: every stage's actions, and which ranks meet in an action of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_megatron.plan.buckets import Bucket, sync_actions
from hetero_megatron.plan.canonical import Plan
from hetero_megatron.plan.context_plan import context_groups
from hetero_megatron.plan.shares import micro_batch_sizes, pipeline_samples
from hetero_megatron.schedule import (
    Action,
    Schedule,
    generate,
    lower,
    validate,
    validate_collectives,
    with_synchronisation,
)


def step_schedules(plan: Plan, buckets: Sequence[Bucket], batch_size: int | None = None) -> tuple[Schedule, ...]:
    """Per pipeline, all that its stages do in a step of ``batch_size`` sequences (default: the plan's): forwards,
    backwards and transfers, then the sums of gradients, the update, and the way back of the parameters."""
    out = []
    for pipeline, (start, stop) in zip(plan.pipelines, pipeline_samples(plan, batch_size or plan.global_batch_size)):
        count = len(micro_batch_sizes(pipeline, stop - start))
        lowered = lower(generate(plan.schedule, len(pipeline.stages), count))
        rows = [sync_actions(buckets, stage.ranks[0]) for stage in pipeline.stages]
        out.append(with_synchronisation(lowered, rows))
    return tuple(out)


class Collectives:
    """Which groups of ranks meet in an action: ``collectives(rank, action)``, in the order in which they first meet.

    F and B: the rank's TP group, then the groups of its context. REDUCE and SPREAD: the holders of the bucket, or those
    in the rank's island. UPDATE: all ranks, for loss and norm. Groups of one rank exchange nothing and are left out.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self._everyone = (plan.ranks,) if len(plan.ranks) > 1 else ()
        self._buckets = {b.index: b for b in buckets}
        self._layers: dict[int, tuple[tuple[int, ...], ...]] = {}
        for stage in (s for p in plan.pipelines for s in p.stages):
            groups = [tuple(sorted(u.ranks)) for u in stage.units]
            groups += [tuple(sorted(g)) for g in context_groups(stage, plan.seq_length)]
            for rank in stage.ranks:
                self._layers[rank] = tuple(dict.fromkeys(g for g in groups if rank in g and len(g) > 1))

    def __call__(self, rank: int, action: Action) -> tuple[tuple[int, ...], ...]:
        kind, index, hop = action
        if kind in ("F", "B", "B_INPUT"):
            return self._layers[rank]
        if kind in ("REDUCE", "SPREAD"):
            group = self._buckets[index].hops[hop].group(rank)
            return (group,) if len(group) > 1 else ()
        return self._everyone if kind == "UPDATE" else ()


def validate_step(plan: Plan, buckets: Sequence[Bucket], schedules: Sequence[Schedule]) -> None:
    """Every pipeline's schedule can run, and all ranks meet their common collectives in the same order.

    Raises:
        ScheduleError: with the place marked.
    """
    for schedule in dict.fromkeys(schedules):
        validate(schedule)
    rows = {
        rank: schedule.stages[s]
        for schedule, pipeline in zip(schedules, plan.pipelines, strict=True)
        for s, stage in enumerate(pipeline.stages)
        for rank in stage.ranks
    }
    validate_collectives(rows, Collectives(plan, buckets))
