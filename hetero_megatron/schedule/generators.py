"""One function per schedule: (stages, micro-batches) -> compute actions. A new schedule is one entry in
the table.
"""

from __future__ import annotations

from collections.abc import Callable

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Action, Schedule

Generator = Callable[[int, int], tuple[tuple[Action, ...], ...]]


def gpipe(stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """All forwards, then all backwards in the same order (Huang et al., 2019)."""
    row = tuple(Action(kind, m) for kind in ("F", "B") for m in range(micro_batches))
    return (row,) * stages


def one_f_one_b(stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Non-interleaved 1F1B (Narayanan et al., 2021): stage s runs ``stages - s`` forwards ahead of its
    backwards.
    """
    rows = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        row = [Action("F", m) for m in range(warm_up)]
        for m in range(warm_up, micro_batches):
            row += [Action("F", m), Action("B", m - warm_up)]
        row += [Action("B", m) for m in range(micro_batches - warm_up, micro_batches)]
        rows.append(tuple(row))
    return tuple(rows)


GENERATORS: dict[str, Generator] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def schedule_names() -> tuple[str, ...]:
    return tuple(GENERATORS)


def generate(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """Compute actions only; :func:`~hetero_megatron.schedule.lower` adds communication.

    Raises:
        UserError: an unknown schedule, fewer than one stage, or a negative number of micro-batches.
    """
    if name not in GENERATORS:
        raise UserError(
            "this version has no such schedule", field="schedule", value=name, accepted=", ".join(GENERATORS)
        )
    if num_stages < 1:
        raise UserError("too few stages", field="num_stages", value=num_stages, accepted="1 or more")
    if num_micro_batches < 0:
        raise UserError("is negative", field="num_micro_batches", value=num_micro_batches, accepted="0 or more")
    return Schedule(name, GENERATORS[name](num_stages, num_micro_batches))
