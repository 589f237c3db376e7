"""One function per schedule: (stages, micro-batches) and, for some, chunks or caps -> compute actions. A new schedule
is one entry in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Action, Rows, Schedule, chunk_passes

Generator = Callable[..., Rows]


def gpipe(stages: int, micro_batches: int) -> Rows:
    """All forwards, then all backwards in the same order (Huang et al., 2019)."""
    row = tuple(Action(kind, m) for kind in ("F", "B") for m in range(micro_batches))
    return (row,) * stages


def one_f_one_b(stages: int, micro_batches: int) -> Rows:
    """Non-interleaved 1F1B (Narayanan et al., 2021): stage s runs ``stages - s`` forwards ahead of its
    backwards.
    """
    order = [(m, 0) for m in range(micro_batches)]
    return tuple(_alternating(order, order, min(stages - s - 1, micro_batches)) for s in range(stages))


def _alternating(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warm_up: int
) -> tuple[Action, ...]:
    """So many forwards, then one forward and one backward in turns, then the backwards that are left; of each
    (micro-batch, chunk)."""
    row = [Action("F", *x) for x in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += [Action("F", *forward), Action("B", *backward)]
    row += [Action("B", *x) for x in backwards[len(forwards) - warm_up :]]
    return tuple(row)


def interleaved(stages: int, micro_batches: int, chunks: int = 1) -> Rows:
    """Interleaved 1F1B (Narayanan et al., 2021): every stage has several chunks of layers, and micro-batches pass them
    in groups.

    A group is as many micro-batches as there are stages. Where that does not divide them, they are divided evenly over
    as many groups as fit, each a little larger; a smaller group would wait for itself. Fewer micro-batches than stages
    are one group. With one chunk it is 1F1B.
    """
    if chunks == 1:
        return one_f_one_b(stages, micro_batches)
    forwards, backwards, _, largest = chunk_passes(micro_batches, chunks, max(micro_batches // stages, 1))
    # The first backward of the last stage is of a micro-batch that has passed all chunks there.
    return tuple(
        _alternating(forwards, backwards, min((chunks - 1) * largest + 2 * (stages - 1 - s), len(forwards)))
        for s in range(stages)
    )


def zero_bubble(stages: int, micro_batches: int, chunks: int = 1, caps: Sequence[int] = ()) -> Rows:
    """ZB-H1 and its relatives (:func:`hetero_megatron.schedule.zero_bubble.zero_bubble`), loaded where a plan asks."""
    from hetero_megatron.schedule.zero_bubble import zero_bubble

    return zero_bubble(stages, micro_batches, chunks, caps)


GENERATORS: dict[str, Generator] = {
    "1f1b": one_f_one_b, "gpipe": gpipe, "interleaved": interleaved, "zero-bubble": zero_bubble,
}  # fmt: skip
CHUNKED = ("interleaved", "zero-bubble")  # schedules that take a number of chunks as well
SPLITTING = ("zero-bubble",)  # schedules whose backward is B_INPUT and W


def schedule_names() -> tuple[str, ...]:
    return tuple(GENERATORS)


def generate(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1, caps: Sequence[int] = ()
) -> Schedule:
    """Compute actions only; :func:`~hetero_megatron.schedule.generators` adds communication.

    Args:
        num_chunks: runs of layers that each stage holds.
        caps: per stage, the most micro-batches in flight; of zero-bubble only, () is its default.

    Raises:
        UserError: an unknown schedule, one that does not take chunks or caps, fewer than one stage, or a negative
            number of micro-batches.
    """
    if name not in GENERATORS:
        raise UserError(
            "this version has no such schedule", field="schedule", value=name, accepted=", ".join(GENERATORS)
        )
    if num_stages < 1:
        raise UserError("too few stages", field="num_stages", value=num_stages, accepted="1 or more")
    if num_micro_batches < 0:
        raise UserError("is negative", field="num_micro_batches", value=num_micro_batches, accepted="0 or more")
    if num_chunks != 1 and (num_chunks < 1 or name not in CHUNKED):
        accepted = "1 or more" if num_chunks < 1 else f"1, or schedule {' or '.join(CHUNKED)}"
        raise UserError(f"schedule {name} cannot run so many", field="num_chunks", value=num_chunks, accepted=accepted)
    if caps and (name != "zero-bubble" or len(caps) != num_stages or min(caps) < 1):
        accepted = f"with zero-bubble, {num_stages} numbers of 1 or more"
        raise UserError("not in-flight caps of this schedule", field="caps", value=list(caps), accepted=accepted)
    options: dict[str, Any] = {"chunks": num_chunks} if num_chunks > 1 else {}
    options |= {"caps": tuple(caps)} if caps else {}
    return Schedule(name, GENERATORS[name](num_stages, num_micro_batches, **options), num_chunks)


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
    receives = [schedule.peer(stage, Action("RECV_F", 0, c)) is not None for c in chunks]
    sends = [schedule.peer(stage, Action("SEND_F", 0, c)) is not None for c in chunks]
    out: list[Action] = []
    append, make, new = out.append, tuple.__new__, Action  # most of a large schedule's cost is making its actions
    for action in schedule.stages[stage]:
        kind, m, c = action
        if kind == "F":
            if receives[c]:
                append(make(new, ("RECV_F", m, c)))
            append(action)
            if sends[c]:
                append(make(new, ("SEND_F", m, c)))
        elif kind == "B" or kind == "B_INPUT":
            if sends[c]:
                append(make(new, ("RECV_B", m, c)))
            append(action)
            if receives[c]:
                append(make(new, ("SEND_B", m, c)))
        else:
            append(action)
    return tuple(out)
