"""Compute actions -> compute and communication actions."""

from __future__ import annotations

from hetero_megatron.schedule.actions import Action, Schedule


def lower(schedule: Schedule) -> Schedule:
    """Insert what each stage receives before an F or B and sends after it.

    The first stage receives no activation and sends no gradient; the last sends no activation and receives no
    gradient. Everything else (W, REDUCE) stays where it is.
    """
    last = len(schedule.stages) - 1
    return Schedule(schedule.name, tuple(_lower_stage(row, s > 0, s < last) for s, row in enumerate(schedule.stages)))


def _lower_stage(row: tuple[Action, ...], has_before: bool, has_after: bool) -> tuple[Action, ...]:
    out: list[Action] = []
    for action in row:
        kind, m, c = action
        forward, backward = kind == "F", kind in ("B", "B_INPUT")
        if (forward and has_before) or (backward and has_after):
            out.append(Action("RECV_F" if forward else "RECV_B", m, c))
        out.append(action)
        if (forward and has_after) or (backward and has_before):
            out.append(Action("SEND_F" if forward else "SEND_B", m, c))
    return tuple(out)
