"""The second reader of a schedule: the same actions, with time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import COMMUNICATION, Action, Schedule

Floats = NDArray[np.float64]
_RECEIVES = ("RECV_F", "RECV_B")


@dataclass(frozen=True)
class Costs:
    """Seconds per action of each stage.

    Args:
        forward, backward: per stage, of one micro-batch, all its chunks together.
        link: per boundary (stage s to s + 1), how long one transfer occupies it, in either direction; () means none
            take time. Transfers of one direction of a boundary follow one another; the two directions do not disturb
            each other. With several chunks there is one more boundary, from the last stage to the first, which may be
            left out where it takes no time.
        weight_share: the part of ``backward`` that W takes where a schedule splits B into B_INPUT and W.
        weight: per stage, seconds of W, instead of ``weight_share``; B_INPUT takes the rest of B, and ``split`` more.
        split: per stage, seconds that B_INPUT and W together take more than B.
        chunks: per stage and chunk, what each of its actions takes; without it, all chunks of a stage take the same.
        reduce, gather, update: per stage, seconds of one REDUCE, ALL_GATHER and of the UPDATE.
        link_back: the same as ``link`` for gradients, where it differs.
        latency: per boundary, from the end of a transfer's occupation to its arrival.
        host: per stage, seconds of the stage itself by kind of send or receive (``SEND_F``, …); none where missing.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    link: Sequence[float] = ()
    weight_share: float = 0.5
    reduce: Sequence[float] = ()
    gather: Sequence[float] = ()
    update: Sequence[float] = ()
    link_back: Sequence[float] = ()
    latency: Sequence[float] = ()
    host: Sequence[Mapping[str, float]] = ()
    weight: Sequence[float] = ()
    split: Sequence[float] = ()
    chunks: Sequence[Sequence[ChunkSeconds]] = ()


class ChunkSeconds(NamedTuple):
    """Of one micro-batch in one chunk; ``weight``: W's; ``split``: what B_INPUT and W together take more than B."""

    forward: float
    backward: float
    weight: float
    split: float = 0.0


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
        busy: seconds of compute per stage.
        schedule: what was timed; starts, ends: seconds of each of its actions, by stage.
    """

    step_seconds: float
    busy: tuple[float, ...]
    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    @cached_property
    def stages(self) -> tuple[tuple[Timed, ...], ...]:
        """The timed actions of each stage, in order."""
        return tuple(
            tuple(map(Timed, *row)) for row in zip(self.schedule.stages, self.starts, self.ends, strict=True)
        )


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Event simulation of a lowered, valid schedule: a stage does one action after the other, a receive
    waits for the arrival, a send takes no time of its stage but what ``costs.host`` says.

    Raises:
        UserError: a number of costs that does not match the stages, or a schedule that deadlocks.
    """
    starts: list[list[float]] = [[] for _ in schedule.stages]
    ends: list[list[float]] = [[] for _ in schedule.stages]
    run = _Run(schedule, costs, starts, ends)
    run.all_stages()
    last = max((max(row) for row in ends if row), default=0.0)
    return Timeline(last, tuple(run.busy), schedule, starts, ends)


def simulate_many(schedule: Schedule, costs: Costs, vary: Sequence[Callable[[float], Floats]]) -> Floats:
    """:func:`simulate` for many steps at once, in each of which actions take other times.

    Args:
        vary: of each stage; called for every compute action with its planned seconds, returns those of each step.

    Returns:
        Seconds of each step, float64 of shape [steps].
    """
    last: list[deque[Any]] = [deque(maxlen=1) for _ in schedule.stages]  # what arrives later is received, so ends there
    run = _Run(schedule, costs, last, last, np.maximum)
    run.compute = [
        [_Varied(seconds, stage) for seconds in chunks] for chunks, stage in zip(run.compute, vary, strict=True)
    ]
    run.all_stages()
    return np.max(np.broadcast_arrays(*(end for ends in last for end in ends)), axis=0)


class _Varied(dict[str, Any]):
    """Seconds by kind of action; every look is another action."""

    def __init__(self, seconds: Mapping[str, float], vary: Callable[[float], Floats]) -> None:
        super().__init__(seconds)
        self.vary = vary

    def __getitem__(self, kind: str) -> Floats:
        return self.vary(super().__getitem__(kind))


class _Run:
    """One simulation: what has arrived where, and which stages can go on. Seconds are floats or, with ``later`` instead
    of max, arrays of those of several steps."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        starts: Sequence[MutableSequence[Any]],
        ends: Sequence[MutableSequence[Any]],
        later: Callable[[Any, Any], Any] = max,
    ) -> None:
        count = len(schedule.stages)
        self.schedule, self.rows = schedule, schedule.stages
        self.compute, self.host, self.link, self.latency = _seconds(count, schedule.chunks, costs)
        self.busy: list[Any] = [0.0] * count
        self.starts, self.ends, self.later = starts, ends, later
        # By direction and receiving stage: micro-batch and chunk -> arrival; when the incoming link is free.
        self.arrivals = [[dict[int, Any]() for _ in range(count)] for _ in range(2)]
        self.free: list[list[Any]] = [[0.0] * (count + 1) for _ in range(2)]
        self.waits: list[tuple[bool, int] | None] = [None] * count
        self.ready = list(range(count))

    def all_stages(self) -> None:
        """To their ends; UserError where they wait for one another."""
        stages = [self.stage(s) for s in range(len(self.rows))]
        while self.ready:
            next(stages[self.ready.pop()], None)
        if any(self.waits):
            raise UserError("deadlocks; validate() says where", field="schedule", value=self.schedule.name)

    def stage(self, stage: int) -> Iterator[None]:
        """Runs ``stage``; yields whenever it has to wait. A generator keeps its state at no cost, which matters: a
        stage waits about once per micro-batch."""
        chunks, host, waits, ready = self.compute[stage], self.host[stage], self.waits, self.ready
        last, compute = len(self.rows) - 1, chunks[0]
        start, end, later, clock = self.starts[stage].append, self.ends[stage].append, self.later, 0.0
        for kind, micro_batch, chunk in self.rows[stage]:
            if kind in compute:
                # The chunk of a REDUCE or ALL_GATHER is its hop, and costs the same in any.
                seconds = (chunks[chunk] if 0 < chunk < len(chunks) else compute)[kind]
                start(clock)
                clock = clock + seconds  # arrays are not changed in place
                self.busy[stage] = self.busy[stage] + seconds
                end(clock)
                continue
            backward = kind == "RECV_B" or kind == "SEND_B"
            key = micro_batch + (chunk << 40)
            if kind in _RECEIVES:
                arrivals = self.arrivals[backward][stage]
                if key not in arrivals:
                    waits[stage] = (backward, key)
                    yield
                start(clock)
                clock = later(clock, arrivals.pop(key)) + host[kind]
                end(clock)
                continue
            clock = clock + host[kind]
            if backward:
                peer = stage - 1 if stage else last
                key -= 0 if stage else 1 << 40
            else:
                peer = stage + 1 if stage < last else 0
                key += 0 if stage < last else 1 << 40
            begin = later(clock, self.free[backward][peer])
            self.free[backward][peer] = sent = begin + self.link[backward][stage]
            self.arrivals[backward][peer][key] = arrival = sent + self.latency[backward][stage]
            if waits[peer] == (backward, key):
                waits[peer] = None
                ready.append(peer)
            start(begin)
            end(arrival)


Table = list[Mapping[str, float]]
Directions = tuple[list[float], list[float]]


def _seconds(count: int, chunks: int, costs: Costs) -> tuple[list[Table], Table, Directions, Directions]:
    """(compute by stage, chunk and kind, host by stage and kind, link and latency by direction and sending stage)."""
    boundaries = (count - 1, count) if chunks > 1 else (count - 1,)
    link = list(costs.link or (0.0,) * (count - 1))
    back, latency = list(costs.link_back or link), list(costs.latency or (0.0,) * (count - 1))
    reduce, host = costs.reduce or (0.0,) * count, costs.host or ({},) * count
    gather, update = costs.gather or (0.0,) * count, costs.update or (0.0,) * count
    for name, values, want in (
        ("forward", costs.forward, (count,)),
        ("backward", costs.backward, (count,)),
        ("weight", costs.weight or costs.backward, (count,)),
        ("split", costs.split or costs.backward, (count,)),
        ("link", link, boundaries),
        ("link_back", back, boundaries),
        ("latency", latency, boundaries),
        ("reduce", reduce, (count,)),
        ("gather", gather, (count,)),
        ("update", update, (count,)),
        ("host", host, (count,)),
        ("chunks", costs.chunks or host, (count,)),
    ):
        if len(values) not in want:
            accepted = f"{' or '.join(map(str, want))} values"
            raise UserError(f"the schedule has {count} stages", field=name, value=list(values), accepted=accepted)
    compute: list[Table] = []
    for s in range(count):
        sync = {"REDUCE": reduce[s], "ALL_GATHER": gather[s], "UPDATE": update[s]}
        compute.append([
            {"F": c.forward, "B": c.backward, "W": c.weight, "B_INPUT": c.backward - c.weight + c.split, **sync}
            for c in _stage_chunks(costs, s, chunks)
        ])  # fmt: skip
    by_kind: Table = [{kind: host[s].get(kind, 0.0) for kind in COMMUNICATION} for s in range(count)]
    return compute, by_kind, _both_ways(link, back, count), _both_ways(latency, latency, count)


def _stage_chunks(costs: Costs, stage: int, chunks: int) -> Sequence[ChunkSeconds]:
    if costs.chunks:
        if len(chunk_seconds := costs.chunks[stage]) != chunks:
            accepted = f"{chunks} of each stage"
            raise UserError(
                f"the schedule has {chunks} chunks", field="chunks", value=list(chunk_seconds), accepted=accepted
            )
        return chunk_seconds
    weight = costs.weight[stage] if costs.weight else costs.backward[stage] * costs.weight_share
    split = costs.split[stage] if costs.split else 0.0
    stage_seconds = costs.forward[stage], costs.backward[stage], weight, split
    return (ChunkSeconds(*(seconds / chunks for seconds in stage_seconds)),) * chunks


def _both_ways(there: list[float], back: list[float], count: int) -> Directions:
    """By sending stage, of boundaries from stage to stage and, where it is there, from the last to the first."""
    there, back = [*there, 0.0][:count], [*back, 0.0][:count]
    return there, [back[-1], *back[:-1]]
