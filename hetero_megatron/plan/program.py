"""The whole step of a plan as data: every stage's actions, and which ranks meet in an action of a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hetero_megatron.plan.buckets import Bucket, sync_actions
from hetero_megatron.plan.canonical import Plan
from hetero_megatron.plan.context_plan import context_groups
from hetero_megatron.plan.pipeline_schedule import pipeline_schedule
from hetero_megatron.plan.shares import micro_batch_sizes, pipeline_samples
from hetero_megatron.plan.token_hops import routing_groups
from hetero_megatron.schedule import (
    Action,
    Schedule,
    format_rows,
    validate,
    validate_collectives,
    with_synchronisation,
)
from hetero_megatron.schedule.actions import COMPUTE, SYNCHRONISATION
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import rank_ranges

GROUPS_SHOWN = 8


def step_schedules(plan: Plan, buckets: Sequence[Bucket], batch_size: int | None = None) -> tuple[Schedule, ...]:
    """Per pipeline, all that its stages do in a step of ``batch_size`` sequences (default: the plan's): forwards,
    backwards and transfers, then the sums of gradients, the update, and the way back of the parameters."""
    out = []
    rows: dict[tuple[object, ...], SyncActions] = {}  # stages that hold the same take part in the same buckets
    known: dict[tuple[object, ...], Schedule] = {}
    for pipeline, (start, stop) in zip(plan.pipelines, pipeline_samples(plan, batch_size or plan.global_batch_size)):
        count = len(micro_batch_sizes(pipeline, stop - start))
        held = tuple((stage.layers, stage.embed, stage.head) for stage in pipeline.stages)
        for key, stage in zip(held, pipeline.stages, strict=True):
            if key not in rows:
                rows[key] = sync_actions(buckets, stage.ranks[0])
        shape = (held, count, pipeline.orders, pipeline.in_flight)
        if shape not in known:
            plain = pipeline_schedule(plan, pipeline, count)
            known[shape] = with_synchronisation(plain, [rows[key] for key in held])
        out.append(known[shape])
    return tuple(out)


SyncActions = tuple[tuple[Action, ...], tuple[Action, ...]]  # REDUCEs, ALL_GATHERs


class Collectives:
    """Which groups of ranks meet in an action: ``collectives(rank, action)``, in the order in which they first meet.

    F and B: the rank's TP group, then the groups of its context and of its experts, and of the weights that its stage
    divides (so does W, whose gradients are summed up). REDUCE and ALL_GATHER: the holders
    of the bucket, or those in the rank's island. UPDATE: all ranks, for loss and norm. Groups of one rank exchange
    nothing and are left out.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket], spec: ModelSpec) -> None:
        self._everyone = (plan.ranks,) if len(plan.ranks) > 1 else ()
        self._buckets = {b.index: b for b in buckets}
        self._layers: dict[int, tuple[tuple[int, ...], ...]] = {}
        for stage in (s for p in plan.pipelines for s in p.stages):
            groups = [tuple(sorted(u.ranks)) for u in stage.units]
            groups += [tuple(sorted(g)) for g in context_groups(stage, plan.seq_length)]
            groups += routing_groups(spec, stage, plan.islands)
            for rank in stage.ranks:
                self._layers[rank] = tuple(dict.fromkeys(g for g in groups if rank in g and len(g) > 1))
        self._divided: dict[int, tuple[tuple[int, ...], ...]] = defaultdict(tuple)
        for group in dict.fromkeys(b.ranks for b in buckets if b.weights is not None and len(b.ranks) > 1):
            for rank in group:
                self._divided[rank] += (group,)

    def __call__(self, rank: int, action: Action) -> tuple[tuple[int, ...], ...]:
        kind, index, hop = action
        if kind in ("F", "B", "B_INPUT"):
            return self._layers[rank] + self._divided.get(rank, ())
        if kind == "W":
            return self._divided.get(rank, ())
        if kind in ("REDUCE", "ALL_GATHER"):
            group = self._buckets[index].hops[hop].group(rank)
            return (group,) if len(group) > 1 else ()
        return self._everyone if kind == "UPDATE" else ()

    def synchronising(self, rank: int, action: Action) -> tuple[tuple[int, ...], ...]:
        """Only of actions in which stages may meet: groups of forward and backward lie inside one."""
        return self(rank, action) if action[0] in SYNCHRONISATION else ()

    def kinds(self) -> dict[int, tuple[int, ...]]:
        """By rank: equal for ranks that are in the same groups in all REDUCEs and ALL_GATHERs that both of them do."""
        groups = dict.fromkeys(g for b in self._buckets.values() for hop in b.hops for g in hop.groups)
        inside: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(groups):
            for rank in group:
                inside[rank].append(number)
        return {rank: tuple(numbers) for rank, numbers in inside.items()}


def format_step(plan: Plan, buckets: Sequence[Bucket], spec: ModelSpec, most: int = 24) -> str:
    """The step as a grid per pipeline (equal ones once), a row per stage, and which ranks meet in which action.

    Args:
        most: columns shown from the start, and as many of the last ones, where the sums and the update are.
    """
    schedules = step_schedules(plan, buckets)
    alike: dict[Schedule, list[int]] = {}
    for p, schedule in enumerate(schedules):
        alike.setdefault(schedule, []).append(p)
    lines = []
    for schedule, pipelines in alike.items():
        lines.append(f"pipeline{'s' if len(pipelines) > 1 else ''} {rank_ranges(pipelines)}, {schedule.name}")
        rows = {f"stage {s}": row for s, row in enumerate(schedule.stages)}
        lines += [f"  {line}" for line in format_rows(rows, most=most, last=most).splitlines()]
    return "\n".join([*lines, *_meetings(plan, buckets, spec, schedules)])


def _meetings(
    plan: Plan, buckets: Sequence[Bucket], spec: ModelSpec, schedules: Sequence[Schedule]
) -> list[str]:
    """One line per kind of action (and bucket) with its groups of ranks."""
    meet = Collectives(plan, buckets, spec)
    groups: dict[str, dict[tuple[int, ...], None]] = {}
    for schedule, pipeline in zip(schedules, plan.pipelines, strict=True):
        for row, stage in zip(schedule.stages, pipeline.stages, strict=True):
            for action in row:
                compute = action.kind in COMPUTE
                if not compute and action.kind not in SYNCHRONISATION or compute and action.micro_batch:
                    continue  # every micro-batch meets the same
                name = "F, B" if compute else str(action)
                for rank in stage.ranks:
                    groups.setdefault(name, {}).update(dict.fromkeys(meet(rank, action)))
    lines = []
    for name, found in groups.items():
        shown = " | ".join(rank_ranges(ranks) for ranks in sorted(found)[:GROUPS_SHOWN])
        more = f" | … {len(found) - GROUPS_SHOWN} more groups" if len(found) > GROUPS_SHOWN else ""
        if found:
            lines.append(f"{name}: ranks {shown}{more} meet")
    return lines


def validate_step(
    plan: Plan, buckets: Sequence[Bucket], spec: ModelSpec, schedules: Sequence[Schedule]
) -> None:
    """Every pipeline's schedule can run, and all ranks meet their common collectives in the same order.

    Raises:
        ScheduleError: with the place marked.
    """
    for schedule in {id(s): s for s in schedules}.values():
        validate(schedule)
    rows = {
        rank: schedule.stages[s]
        for schedule, pipeline in zip(schedules, plan.pipelines, strict=True)
        for s, stage in enumerate(pipeline.stages)
        for rank in stage.ranks
    }
    collectives = Collectives(plan, buckets, spec)
    validate_collectives(rows, collectives.synchronising, collectives.kinds().get)
