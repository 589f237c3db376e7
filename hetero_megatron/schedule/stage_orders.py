"""Schedules as one string of letters per stage, and how to time many of them quickly.

Micro-batches are alike, so every stage takes them in order and a stage's list is said by kinds alone: ``F`` forward,
``I`` B_INPUT, ``W`` weight gradient, ``B`` whole backward. ``FFIWB`` is F0 F1 B_INPUT0 W0 B1. With several chunks of
layers per stage a row is a tuple of such letters, with the number of the chunk from the second one on: ``F``, ``F1``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.simulate import Costs

ROUNDING = 1e-9  # relative: sums of the same seconds in another order differ by less


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What micro-batches hold on one stage, and what it has for them. With the first two left at 1, ``memory_bytes`` is
    the most micro-batches in flight.

    Args:
        activation_bytes: held by a micro-batch from the start of F to the end of B_INPUT or B.
        deferred_bytes: held from the end of B_INPUT to the end of W: inputs and output gradients of the layers whose
            weight gradients are still to be computed.
        memory_bytes: what the stage has for both; may be infinite.

    Raises:
        UserError: a negative or infinite number, or memory for not even one micro-batch.
    """

    activation_bytes: float = 1
    deferred_bytes: float = 1
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        _check_numbers(self, unlimited="memory_bytes")
        if self.memory_bytes < self.activation_bytes:
            raise UserError(
                f"holds no micro-batch of {self.activation_bytes} bytes",
                field="memory_bytes",
                value=self.memory_bytes,
                accepted=f"{self.activation_bytes} or more",
            )

    @property
    def capacity(self) -> float:
        """Micro-batches that fit at once, no W deferred; may be infinite."""
        if self.memory_bytes == math.inf or not self.activation_bytes:
            return math.inf
        return self.memory_bytes // self.activation_bytes


@dataclass(frozen=True)
class StageTimes(StageMemory):
    """Seconds of one micro-batch on one stage and of the stage's end of step, beside its memory.

    Seconds that the stage itself spends on sends and receives belong to the F or backward beside them.

    Args:
        forward_seconds: F.
        input_gradient_seconds: B_INPUT, recomputed activations included.
        weight_gradient_seconds: W.
        tail_seconds: after the stage's last action: gradient reduction and optimizer, as far as not hidden.
        split_seconds: what B_INPUT and W together take more than a whole B; may be negative.

    Raises:
        UserError: a negative or infinite number, or memory for not even one micro-batch.
    """

    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    tail_seconds: float = 0.0
    split_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.backward_seconds < math.inf:
            both_parts = self.input_gradient_seconds + self.weight_gradient_seconds
            raise UserError(
                "leaves no time for a whole backward", field="split_seconds", value=self.split_seconds,
                accepted=f"{both_parts} or less: B_INPUT and W together",
            )  # fmt: skip

    @property
    def backward_seconds(self) -> float:
        """Whole B."""
        return self.input_gradient_seconds + self.weight_gradient_seconds - self.split_seconds

    @property
    def least_seconds(self) -> tuple[float, float]:
        """(until a backward's input gradient is there, then until all of it is done), at least, split or not."""
        first = min(self.input_gradient_seconds, self.backward_seconds)
        return first, self.backward_seconds + min(self.split_seconds, 0.0) - first


@dataclass(frozen=True)
class LinkTimes:
    """One boundary between stages. Transfers of one direction follow one another; the two directions do not disturb
    each other.

    Args:
        forward_seconds, backward_seconds: how long one activation, or its gradient, occupies the link.
        latency_seconds: from the end of that to the arrival.

    Raises:
        UserError: a negative or infinite number.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)


def _check_numbers(times: StageMemory | LinkTimes, unlimited: str = "") -> None:
    for name in (f.name for f in fields(times) if f.name != "split_seconds"):
        value = getattr(times, name)
        if not value >= 0 or (value == math.inf and name != unlimited):
            raise UserError("is no duration or size", field=name, value=value, accepted="0 or more, finite")


@dataclass(frozen=True)
class PipelineTimes:
    """All stages, and the boundary after each but the last.

    Raises:
        UserError: no stage, or a number of links that does not match.
    """

    stages: tuple[StageTimes, ...]
    links: tuple[LinkTimes, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise UserError("too few stages", field="stages", value=0, accepted="1 or more")
        if len(self.links) != len(self.stages) - 1:
            raise UserError(
                f"the pipeline has {len(self.stages)} stages",
                field="links",
                value=len(self.links),
                accepted=f"{len(self.stages) - 1} links",
            )

    @cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        """Whole B, per stage."""
        return tuple(s.backward_seconds for s in self.stages)

    def costs(self) -> Costs:
        """The same for :func:`~hetero_megatron.schedule.simulate`; ``tail_seconds`` become one REDUCE per stage."""
        return Costs(
            forward=[s.forward_seconds for s in self.stages],
            backward=self.backward_seconds,
            weight=[s.weight_gradient_seconds for s in self.stages],
            split=[s.split_seconds for s in self.stages],
            reduce=[s.tail_seconds for s in self.stages],
            link=[k.forward_seconds for k in self.links],
            link_back=[k.backward_seconds for k in self.links],
            latency=[k.latency_seconds for k in self.links],
        )


def lower_bound_seconds(times: PipelineTimes, num_micro_batches: int) -> float:
    """No schedule of these times that keeps the memory takes less (up to rounding).

    The largest of, for every stage and link: what it does for all micro-batches, between the earliest it can begin and
    the least that has to follow; and the round trips of micro-batches that wait for each other's memory.
    """
    if num_micro_batches == 0:
        return max(s.tail_seconds for s in times.stages)
    return max(_bounds(times, num_micro_batches))


def _bounds(times: PipelineTimes, count: int) -> Iterator[float]:
    stages, links = times.stages, times.links
    gradient, weight = zip(*(s.least_seconds for s in stages))
    # After the input gradient of a stage, the gradient still has to reach every earlier one: seconds to the step's end.
    seconds_after = [weight[0] + stages[0].tail_seconds]
    for s, link in enumerate(links):
        back = link.backward_seconds + link.latency_seconds + gradient[s]
        seconds_after.append(max(weight[s + 1] + stages[s + 1].tail_seconds, back + seconds_after[-1]))
    # From the start of a forward to the end of the same micro-batch's input gradient.
    trip = [stages[-1].forward_seconds + gradient[-1]]
    for s, link in reversed(list(enumerate(links))):
        transfers = link.forward_seconds + link.backward_seconds + 2 * link.latency_seconds
        trip.append(stages[s].forward_seconds + transfers + trip[-1] + gradient[s])
    trip.reverse()
    head = 0.0  # earliest start of the stage's first forward
    for s, stage in enumerate(stages):
        forward, both_passes = stage.forward_seconds, stage.forward_seconds + gradient[s]
        yield head + count * (both_passes + weight[s]) + stage.tail_seconds
        yield head + count * both_passes + seconds_after[s]
        yield head + (count - 1) * forward + trip[s] + seconds_after[s]
        rounds = math.ceil(count / stage.capacity) if stage.capacity < math.inf else 1
        yield head + rounds * trip[s] + seconds_after[s]
        if s < len(links):
            link = links[s]
            yield head + (count - 1) * max(link.forward_seconds, link.backward_seconds) + trip[s] + seconds_after[s]
            head += forward + link.forward_seconds + link.latency_seconds


KIND_OF_LETTER = {"F": "F", "I": "B_INPUT", "W": "W", "B": "B"}
LETTER_OF_KIND = {kind: letter for letter, kind in KIND_OF_LETTER.items()}

Orders = tuple[str, ...]
Row = Sequence[str]  # of one stage: a str where it has one chunk, else a tuple


def split_letter(action: str) -> tuple[str, int]:
    """("F", 2) of ``F2``."""
    return action[0], int(action[1:] or 0)


def schedule_of(name: str, orders: Sequence[Row], chunks: int = 1) -> Schedule:
    """The compute actions that ``orders`` stand for."""
    return Schedule(name, tuple(_actions(row) for row in orders), chunks)


def _actions(row: Row) -> tuple[Action, ...]:
    forwards, backwards = Counter[int](), Counter[int]()
    deferred = defaultdict[int, deque[int]](deque)
    actions = []
    for action in row:
        letter, chunk = split_letter(action)
        if letter == "W":
            micro_batch = deferred[chunk].popleft()
        else:
            counts = forwards if letter == "F" else backwards
            micro_batch = counts[chunk]
            counts[chunk] += 1
            if letter == "I":
                deferred[chunk].append(micro_batch)
        actions.append(Action(KIND_OF_LETTER[letter], micro_batch, chunk))
    return tuple(actions)


def orders_of(schedule: Schedule) -> Orders:
    """The letters of the compute actions of a schedule of one chunk; :func:`schedule_of` gives them back where
    micro-batches are in order."""
    return tuple("".join(LETTER_OF_KIND[a.kind] for a in row if a.kind in LETTER_OF_KIND) for row in schedule.stages)


def chunk_orders_of(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """The same of a schedule of several chunks."""
    return tuple(
        tuple(LETTER_OF_KIND[a.kind] + (str(a.chunk) if a.chunk else "") for a in row if a.kind in LETTER_OF_KIND)
        for row in schedule.stages
    )


def held_bytes(memory: StageMemory, row: Row) -> list[float]:
    """Bytes that micro-batches hold on a stage after each of its actions."""
    step = {
        "F": memory.activation_bytes,
        "I": memory.deferred_bytes - memory.activation_bytes,
        "W": -memory.deferred_bytes,
        "B": -memory.activation_bytes,
    }
    return list(accumulate(step[letter] for letter in row))


def keeps_memory(memory: StageMemory, row: str) -> bool:
    """Micro-batches never hold more than the stage has."""
    return max(held_bytes(memory, row), default=0.0) <= memory.memory_bytes


def keeps_order(row: str) -> bool:
    """No backward comes before its forward, and no W before its B_INPUT."""
    forwards = deferred = 0
    for letter in row:
        if letter == "F":
            forwards += 1
            continue
        if letter == "W":
            deferred -= 1
        else:
            forwards -= 1
            deferred += letter == "I"
        if forwards < 0 or deferred < 0:
            return False
    return True


def join_backwards(row: str) -> str:
    """:func:`joined` of a stage with one chunk."""
    return "".join(joined(row))


def joined(row: Iterable[str]) -> list[str]:
    """The order with B for every B_INPUT that its own W follows at once; letters may have the number of a chunk."""
    letters: list[str] = []
    deferred = dict[str, int]()
    for action in row:
        letter, chunk = action[0], action[1:]
        waiting = deferred.get(chunk, 0)
        if letter == "W" and waiting == 1 and letters[-1] == f"I{chunk}":
            letters[-1] = f"B{chunk}"
        else:
            letters.append(action)
        deferred[chunk] = waiting + {"I": 1, "W": -1}.get(letter, 0)
    return letters


class Timing(NamedTuple):
    """Seconds of a step, ``tail_seconds`` included; ends of all actions by stage; and by receiving stage, when the
    activation and the gradient of each micro-batch arrive (on the last stage, when its forward ends)."""

    seconds: float
    ends: list[list[float]]
    activations: list[list[float]]
    gradients: list[list[float]]


def time_orders(times: PipelineTimes, orders: Sequence[str]) -> Timing | None:
    """What :func:`~hetero_megatron.schedule.simulate` returns for the same actions, several times as fast; None where
    stages wait for each other for ever."""
    stages, last = times.stages, len(times.stages) - 1
    ends: list[list[float]] = [[] for _ in stages]
    activations: list[list[float]] = [[] for _ in stages]
    gradients: list[list[float]] = [[] for _ in stages]
    activations[0] = [0.0] * orders[0].count("F")
    counts = [(0, 0)] * (last + 1)  # forwards and backwards
    blocked = [False] * (last + 1)
    after_free, before_free = [0.0] * (last + 1), [0.0] * (last + 1)  # when the outgoing links are free
    ready = list(range(last, -1, -1))
    while ready:
        s = ready.pop()
        blocked[s] = False
        stage, row = stages[s], ends[s]
        activation_arrivals, gradient_arrivals, (forwards, backwards) = activations[s], gradients[s], counts[s]
        clock = row[-1] if row else 0.0
        for letter in orders[s][len(row) :]:
            if letter == "W":
                clock += stage.weight_gradient_seconds
            elif letter == "F":
                if forwards == len(activation_arrivals):
                    blocked[s] = True
                    break
                clock = max(clock, activation_arrivals[forwards]) + stage.forward_seconds
                forwards += 1
                if s == last:
                    gradient_arrivals.append(clock)
                else:
                    link = times.links[s]
                    after_free[s] = free = max(clock, after_free[s]) + link.forward_seconds
                    activations[s + 1].append(free + link.latency_seconds)
                    if blocked[s + 1]:
                        blocked[s + 1] = False
                        ready.append(s + 1)
            else:
                if backwards == len(gradient_arrivals):
                    blocked[s] = True
                    break
                is_whole = letter == "B"
                clock = max(clock, gradient_arrivals[backwards])
                clock += times.backward_seconds[s] if is_whole else stage.input_gradient_seconds
                backwards += 1
                if s:
                    link = times.links[s - 1]
                    before_free[s] = free = max(clock, before_free[s]) + link.backward_seconds
                    gradients[s - 1].append(free + link.latency_seconds)
                    if blocked[s - 1]:
                        blocked[s - 1] = False
                        ready.append(s - 1)
            row.append(clock)
        counts[s] = forwards, backwards
    if any(blocked):
        return None
    final = (row[-1] if row else 0.0 for row in ends)
    seconds = max(end + stage.tail_seconds for end, stage in zip(final, stages, strict=True))
    return Timing(seconds, ends, activations, gradients)
