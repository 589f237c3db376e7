"""Compute actions -> compute and communication actions; and what synchronises replicas after them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.generators import generate


def lower(schedule: Schedule) -> Schedule:
    """Insert what each stage receives before an F or B and sends after it.

    The first stage receives no activation and sends no gradient; the last sends no activation and receives no
    gradient. Everything else (W, REDUCE) stays where it is.
    """
    last = len(schedule.stages) - 1
    return Schedule(schedule.name, tuple(_lower_stage(row, s > 0, s < last) for s, row in enumerate(schedule.stages)))


@lru_cache(maxsize=4)
def lowered(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """A generated schedule with its communication; the last few are kept, as the candidates of a search have much the
    same."""
    return lower(generate(name, num_stages, num_micro_batches))


def with_synchronisation(
    schedule: Schedule, rows: Sequence[tuple[Sequence[Action], Sequence[Action]]]
) -> Schedule:
    """Append to each stage its REDUCEs, the UPDATE and its SPREADs; ``rows``: (REDUCEs, SPREADs) per stage."""
    update = (Action("UPDATE", 0),)
    stages = (
        (*row, *reduces, *update, *spreads) for row, (reduces, spreads) in zip(schedule.stages, rows, strict=True)
    )
    return Schedule(schedule.name, tuple(stages))


def _lower_stage(row: tuple[Action, ...], has_before: bool, has_after: bool) -> tuple[Action, ...]:
    out: list[Action] = []
    append, make, new = out.append, tuple.__new__, Action  # most of a large schedule's cost is making its actions
    for action in row:
        kind, m, c = action
        forward, backward = kind == "F", kind == "B" or kind == "B_INPUT"
        if (forward and has_before) or (backward and has_after):
            append(make(new, ("RECV_F" if forward else "RECV_B", m, c)))
        append(action)
        if (forward and has_after) or (backward and has_before):
            append(make(new, ("SEND_F" if forward else "SEND_B", m, c)))
    return tuple(out)
