"""What a stage holds while it runs a schedule: micro-batches with their activations, or with what their W needs."""

from __future__ import annotations

import numpy as np

from hetero_megatron.schedule.actions import Action, Schedule

Held = tuple[tuple[int, ...], tuple[int, ...]]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations are alive at once (from F until B, or W where
    split); those of several chunks are added up.
    """
    return tuple(max((sum(held) + sum(left) for held, left in states), default=0) for states in held_states(schedule))


def held_states(schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    """Per stage, what it holds at the moments when it holds most, of which none holds less of all than another:
    by chunk, micro-batches between F and their B or B_INPUT, and between B_INPUT and W."""
    known: dict[tuple[Action, ...], tuple[Held, ...]] = {}
    for row in schedule.stages:
        if row not in known:
            known[row] = _row_states(row, schedule.chunks)
    return tuple(known[row] for row in schedule.stages)


def _row_states(row: tuple[Action, ...], chunks: int) -> tuple[Held, ...]:
    counts = [0] * (2 * chunks)  # whole activations by chunk, then what W needs by chunk
    found: dict[tuple[int, ...], None] = {(0,) * (2 * chunks): None}
    grew = False
    for kind, _, chunk in row:
        if kind == "F":
            counts[chunk] += 1
            grew = True
        elif kind == "B" or kind == "B_INPUT" or kind == "W":
            if grew or kind == "B_INPUT":  # before this one it held more than after any since
                found[tuple(counts)] = None
            grew = False
            if kind != "W":
                counts[chunk] -= 1
            if kind != "B":
                counts[chunks + chunk] += 1 if kind == "B_INPUT" else -1
            if kind == "B_INPUT":  # what W needs may be more than the activations that are gone
                found[tuple(counts)] = None
    found[tuple(counts)] = None
    most = np.array(list(found), np.int64)
    top = np.sum(np.all(np.less_equal(most[:, None], most[None]), axis=2), axis=1) == 1  # all differ
    return tuple((tuple(x[:chunks]), tuple(x[chunks:])) for x in most[top].tolist())
