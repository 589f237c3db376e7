"""Schedules as one string of letters per stage, and how to time many of them quickly.

Micro-batches are alike, so every stage takes them in order and a stage's list is said by kinds alone: ``F`` forward,
``I`` B_INPUT, ``W`` weight gradient, ``B`` whole backward. ``FFIWB`` is F0 F1 B_INPUT0 W0 B1. With several chunks of
layers per stage a row is a tuple of such letters, with the number of the chunk from the second one on: ``F``, ``F1``.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.pipeline_times import PipelineTimes, StageMemory

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
            done = forwards if letter == "F" else backwards
            micro_batch = done[chunk]
            done[chunk] += 1
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
    found: list[str] = []
    deferred = dict[str, int]()
    for action in row:
        letter, chunk = action[0], action[1:]
        waiting = deferred.get(chunk, 0)
        if letter == "W" and waiting == 1 and found[-1] == f"I{chunk}":
            found[-1] = f"B{chunk}"
        else:
            found.append(action)
        deferred[chunk] = waiting + {"I": 1, "W": -1}.get(letter, 0)
    return found


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
    done = [(0, 0)] * (last + 1)  # forwards and backwards
    blocked = [False] * (last + 1)
    after_free, before_free = [0.0] * (last + 1), [0.0] * (last + 1)  # when the outgoing links are free
    ready = list(range(last, -1, -1))
    while ready:
        s = ready.pop()
        blocked[s] = False
        stage, row = stages[s], ends[s]
        here, back, (forwards, backwards) = activations[s], gradients[s], done[s]
        clock = row[-1] if row else 0.0
        for letter in orders[s][len(row) :]:
            if letter == "W":
                clock += stage.weight_gradient_seconds
            elif letter == "F":
                if forwards == len(here):
                    blocked[s] = True
                    break
                clock = max(clock, here[forwards]) + stage.forward_seconds
                forwards += 1
                if s == last:
                    back.append(clock)
                else:
                    link = times.links[s]
                    after_free[s] = free = max(clock, after_free[s]) + link.forward_seconds
                    activations[s + 1].append(free + link.latency_seconds)
                    if blocked[s + 1]:
                        blocked[s + 1] = False
                        ready.append(s + 1)
            else:
                if backwards == len(back):
                    blocked[s] = True
                    break
                whole = letter == "B"
                clock = max(clock, back[backwards])
                clock += times.backward_seconds[s] if whole else stage.input_gradient_seconds
                backwards += 1
                if s:
                    link = times.links[s - 1]
                    before_free[s] = free = max(clock, before_free[s]) + link.backward_seconds
                    gradients[s - 1].append(free + link.latency_seconds)
                    if blocked[s - 1]:
                        blocked[s - 1] = False
                        ready.append(s - 1)
            row.append(clock)
        done[s] = forwards, backwards
    if any(blocked):
        return None
    final = (row[-1] if row else 0.0 for row in ends)
    seconds = max(end + stage.tail_seconds for end, stage in zip(final, stages, strict=True))
    return Timing(seconds, ends, activations, gradients)
