"""Compute actions -> compute and communication actions; and what synchronises replicas after them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.generators import generate


def lower(schedule: Schedule) -> Schedule:
    """Insert what each stage receives before an F or B and sends after it.

    The first chunk of the first stage receives no activation and sends no gradient; the last chunk of the last stage
    sends no activation and receives no gradient. Between chunks that follow one another on the same stage nothing is
    sent. Everything else (W, REDUCE) stays where it is.
    """
    stages = tuple(_lower_stage(schedule, s) for s in range(len(schedule.stages)))
    return Schedule(schedule.name, stages, schedule.chunks)


@lru_cache(maxsize=4)
def lowered(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1, caps: tuple[int, ...] = ()
) -> Schedule:
    """A generated schedule with its communication; the last few are kept, as the candidates of a search have much the
    same."""
    return lower(generate(name, num_stages, num_micro_batches, num_chunks, caps))


def with_synchronisation(
    schedule: Schedule, rows: Sequence[tuple[Sequence[Action], Sequence[Action]]]
) -> Schedule:
    """Append to each stage its REDUCEs, the UPDATE and its ALL_GATHERs; ``rows``: (REDUCEs, ALL_GATHERs) per stage."""
    update = (Action("UPDATE", 0),)
    stages = (
        (*row, *reduces, *update, *spreads) for row, (reduces, spreads) in zip(schedule.stages, rows, strict=True)
    )
    return Schedule(schedule.name, tuple(stages), schedule.chunks)


def _lower_stage(schedule: Schedule, stage: int) -> tuple[Action, ...]:
    chunks = range(schedule.chunks)
    before = [schedule.peer(stage, Action("RECV_F", 0, c)) is not None for c in chunks]
    after = [schedule.peer(stage, Action("SEND_F", 0, c)) is not None for c in chunks]
    out: list[Action] = []
    append, make, new = out.append, tuple.__new__, Action  # most of a large schedule's cost is making its actions
    for action in schedule.stages[stage]:
        kind, m, c = action
        if kind == "F":
            if before[c]:
                append(make(new, ("RECV_F", m, c)))
            append(action)
            if after[c]:
                append(make(new, ("SEND_F", m, c)))
        elif kind == "B" or kind == "B_INPUT":
            if after[c]:
                append(make(new, ("RECV_B", m, c)))
            append(action)
            if before[c]:
                append(make(new, ("SEND_B", m, c)))
        else:
            append(action)
    return tuple(out)
