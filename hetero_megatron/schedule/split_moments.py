"""What a stage holds before each of its actions, where backwards are split."""

from __future__ import annotations

from functools import lru_cache

from hetero_megatron.schedule.actions import Action, Schedule

Moment = tuple[tuple[int, ...], tuple[int, ...], str, int]  # by chunk, as in Held; what comes, in which chunk


def splits_backward(schedule: Schedule) -> bool:
    return any(action.kind == "B_INPUT" for row in schedule.stages for action in row)


def split_moments(schedule: Schedule) -> tuple[tuple[Moment, ...], ...]:
    """Per stage, all unlike moments before a B, B_INPUT or W, with what is held then."""
    return tuple(_of_row(row, schedule.chunks) for row in schedule.stages)


@lru_cache(maxsize=64)
def _of_row(row: tuple[Action, ...], chunks: int) -> tuple[Moment, ...]:
    whole_counts, split_counts = [0] * chunks, [0] * chunks
    moments: dict[Moment, None] = {}
    for kind, _, chunk in row:
        if kind in ("B", "B_INPUT", "W"):
            moments[tuple(whole_counts), tuple(split_counts), kind, chunk] = None
        if kind == "F":
            whole_counts[chunk] += 1
        elif kind == "W":
            split_counts[chunk] -= 1
        elif kind in ("B", "B_INPUT"):
            whole_counts[chunk] -= 1
            split_counts[chunk] += kind == "B_INPUT"
    return tuple(moments)
