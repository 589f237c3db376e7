"""The second reader of a schedule: the same actions, with time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Action, Schedule


@dataclass(frozen=True)
class Costs:
    """Seconds per action of each stage.

    Args:
        forward, backward: per stage, of one micro-batch.
        link: per boundary (stage s to s + 1), of one transfer in either direction; () means none take
            time. Transfers of one direction of a boundary follow one another; the two directions do not
            disturb each other.
        weight_share: the part of ``backward`` that W takes where a schedule splits B into B_INPUT and W.
        reduce: per stage, seconds of one REDUCE.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    link: Sequence[float] = ()
    weight_share: float = 0.5
    reduce: Sequence[float] = ()


class Timed(NamedTuple):
    """An action with its start and end in seconds; a send ends when the data has arrived."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What :func:`simulate` returns.

    Attributes:
        step_seconds: from the first start to the last end, transfers included.
        stages: the timed actions of each stage, in order.
        busy: seconds of compute per stage.
    """

    step_seconds: float
    stages: tuple[tuple[Timed, ...], ...]
    busy: tuple[float, ...]


_MATCH = {"RECV_F": ("SEND_F", -1), "RECV_B": ("SEND_B", +1)}


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Event simulation of a lowered, valid schedule: a stage does one action after the other, a receive
    waits for the arrival, a send takes no time of its stage.

    Raises:
        UserError: a number of costs that does not match the stages, or a schedule that deadlocks.
    """
    count = len(schedule.stages)
    seconds = _seconds(count, costs)
    clock, position = [0.0] * count, [0] * count
    link_free: dict[tuple[int, str], float] = {}  # (stage, kind of send) -> when its link is free again
    arrival: dict[tuple[int, Action], float] = {}
    timed: list[list[Timed]] = [[] for _ in range(count)]
    busy = [0.0] * count
    waiting: dict[tuple[int, Action], int] = {}
    ready = list(range(count))
    while ready:
        stage = ready.pop()
        row = schedule.stages[stage]
        while position[stage] < len(row):
            action = row[position[stage]]
            kind, start = action.kind, clock[stage]
            end = start
            if kind in _MATCH:
                send, step = _MATCH[kind]
                key = (stage + step, Action(send, action.micro_batch, action.chunk))
                if key not in arrival:
                    waiting[key] = stage
                    break
                end = clock[stage] = max(start, arrival[key])
            elif kind in ("SEND_F", "SEND_B"):
                start = max(start, link_free.get((stage, kind), 0.0))
                end = start + seconds[stage][kind]
                link_free[stage, kind] = arrival[stage, action] = end
                if (stage, action) in waiting:
                    ready.append(waiting.pop((stage, action)))
            else:
                end = clock[stage] = start + seconds[stage][kind]
                busy[stage] += end - start
            timed[stage].append(Timed(action, start, end))
            position[stage] += 1
    if any(p < len(row) for p, row in zip(position, schedule.stages)):
        raise UserError("deadlocks; validate() says where", field="schedule", value=schedule.name)
    ends = [t.end for row in timed for t in row]
    return Timeline(max(ends, default=0.0), tuple(map(tuple, timed)), tuple(busy))


def _seconds(count: int, costs: Costs) -> list[Mapping[str, float]]:
    """Per stage: seconds by kind of action."""
    link = costs.link or (0.0,) * (count - 1)
    reduce = costs.reduce or (0.0,) * count
    for name, values, want in (
        ("forward", costs.forward, count),
        ("backward", costs.backward, count),
        ("link", link, count - 1),
        ("reduce", reduce, count),
    ):
        if len(values) != want:
            raise UserError(
                f"the schedule has {count} stages", field=name, value=list(values), accepted=f"{want} values"
            )
    table: list[Mapping[str, float]] = []
    for s in range(count):
        table.append(
            {
                "F": costs.forward[s],
                "B": costs.backward[s],
                "W": costs.backward[s] * costs.weight_share,
                "B_INPUT": costs.backward[s] * (1 - costs.weight_share),
                "REDUCE": reduce[s],
                "SEND_F": link[s] if s < count - 1 else 0.0,
                "SEND_B": link[s - 1] if s > 0 else 0.0,
            }
        )
    return table
