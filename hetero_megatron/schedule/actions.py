"""What a pipeline schedule is: actions by stage; what each stage holds of them, in which order its messages arrive,
and the groups in which micro-batches pass chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

COMPUTE = ("F", "B", "B_INPUT", "W")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SYNCHRONISATION = ("REDUCE", "UPDATE", "ALL_GATHER")
# Receives posted before they are needed. One of a device's library waits on the device, where it takes execution slots
# from compute: one is under way while a micro-batch is computed. Through host memory (gloo, the bridge) they only take
# memory, and a message travels when both its ends are there: of two neighbours two each keep slow links busy.
LOOKAHEAD, HOST_LOOKAHEAD = 1, 4
SEND_LAG = 4  # gradient sends that may be under way; their buffers live that long
_OTHER_END = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
KINDS = (*COMPUTE, *COMMUNICATION, *SYNCHRONISATION)


class Action(NamedTuple):
    """``F3`` is the forward of micro-batch 3; chunk c > 0 prints as ``F3.c``.

    Kinds: ``F`` forward; ``B`` whole backward, or ``B_INPUT`` (gradient of the input) and ``W`` (of the
    weights); ``SEND_F``/``RECV_F`` activations to and from the neighbours; ``SEND_B``/``RECV_B`` their
    gradients; ``REDUCE`` sums the gradients of one bucket at their owners, ``ALL_GATHER`` sends its parameters back
    (the bucket's index stands in ``micro_batch``, the hop in ``chunk``); ``UPDATE`` between them agrees on the norm and
    takes the optimizer step. A REDUCE starts before its place in the list, in order, as soon as its gradients are
    there; its place is where it must have ended.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """One list of actions per stage; ``name`` is the generator's.

    With ``chunks`` above 1 every stage holds that many runs of layers: a micro-batch passes chunk 0 of all stages, then
    chunk 1 of all stages, and so on.
    """

    name: str
    stages: tuple[tuple[Action, ...], ...]
    chunks: int = 1

    def forward_only(self) -> Schedule:
        """Without backwards, what they send, and all that follows them."""
        kinds = ("F", "SEND_F", "RECV_F")
        return replace(self, stages=tuple(tuple(a for a in row if a.kind in kinds) for row in self.stages))

    def after(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) that a micro-batch passes next; None after the last one."""
        if stage + 1 < len(self.stages):
            return stage + 1, chunk
        return (0, chunk + 1) if chunk + 1 < self.chunks else None

    def before(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) that a micro-batch passes just before; None before the first one."""
        if stage > 0:
            return stage - 1, chunk
        return (len(self.stages) - 1, chunk - 1) if chunk > 0 else None

    def peer(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Where the other end of a send or receive of ``stage`` is: (stage, its action); None: there is none."""
        kind, micro_batch, chunk = action
        other_end = self.after(stage, chunk) if kind in ("SEND_F", "RECV_B") else self.before(stage, chunk)
        if other_end is None or other_end[0] == stage:
            return None
        return other_end[0], Action(_OTHER_END[kind], micro_batch, other_end[1])


Rows = tuple[tuple[Action, ...], ...]  # of every stage in turn


Held = tuple[tuple[int, ...], tuple[int, ...]]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations are alive at once (from F until B, or W where
    split); those of several chunks are added up.
    """
    return tuple(
        max((sum(whole_by_chunk) + sum(deferred_by_chunk) for whole_by_chunk, deferred_by_chunk in states), default=0)
        for states in held_states(schedule)
    )


def held_states(schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    """Per stage, what it holds at the moments when it holds most, of which none holds less of all than another:
    by chunk, micro-batches between F and their B or B_INPUT, and between B_INPUT and W."""
    states_of: dict[tuple[Action, ...], tuple[Held, ...]] = {}
    for row in schedule.stages:
        if row not in states_of:
            states_of[row] = _row_states(row, schedule.chunks)
    return tuple(states_of[row] for row in schedule.stages)


def _row_states(row: tuple[Action, ...], chunks: int) -> tuple[Held, ...]:
    counts = [0] * (2 * chunks)  # whole activations by chunk, then what W needs by chunk
    states: dict[tuple[int, ...], None] = {(0,) * (2 * chunks): None}
    grew = False
    for kind, _, chunk in row:
        if kind == "F":
            counts[chunk] += 1
            grew = True
        elif kind == "B" or kind == "B_INPUT" or kind == "W":
            if grew or kind == "B_INPUT":  # before this one it held more than after any since
                states[tuple(counts)] = None
            grew = False
            if kind != "W":
                counts[chunk] -= 1
            if kind != "B":
                counts[chunks + chunk] += 1 if kind == "B_INPUT" else -1
            if kind == "B_INPUT":  # what W needs may be more than the activations that are gone
                states[tuple(counts)] = None
    states[tuple(counts)] = None
    candidates = np.array(list(states), np.int64)
    top = np.sum(np.all(np.less_equal(candidates[:, None], candidates[None]), axis=2), axis=1) == 1  # all differ
    return tuple((tuple(x[:chunks]), tuple(x[chunks:])) for x in candidates[top].tolist())


def receive_order(schedule: Schedule, stage: int) -> tuple[Action, ...]:
    """The receives of a stage of a lowered schedule, in an order in which no message overtakes another of its sender.

    Where messages of one pair of ranks queue up (all but gloo's do), they must be posted in the order of their sends.
    That is the order of the stage's own list, except where both activations and gradients come from one stage: two
    stages with several chunks.
    """
    rows, sent = schedule.stages, dict[int, list[Action]]()
    place: dict[Action, tuple[int, int]] = {}  # of a receive: its sender, and how many it sends before
    for action in rows[stage]:
        other_end = schedule.peer(stage, action) if action.kind in ("RECV_F", "RECV_B") else None
        if other_end is not None and other_end[0] not in sent:
            sender = other_end[0]
            sent[sender] = []
            for send in rows[sender]:
                receive = schedule.peer(sender, send) if send.kind in ("SEND_F", "SEND_B") else None
                if receive is not None and receive[0] == stage:
                    place[receive[1]] = sender, len(sent[sender])
                    sent[sender].append(receive[1])
    posted = dict.fromkeys(sent, 0)
    order: list[Action] = []
    for action in rows[stage]:
        if action in place:
            sender, number = place[action]
            order += sent[sender][posted[sender] : number + 1]
            posted[sender] = max(posted[sender], number + 1)
    return tuple(order)


class ChunkPasses(NamedTuple):
    """Forwards and backwards of every stage in order, each a (micro-batch, chunk); sizes of the smallest and the
    largest group."""

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    smallest: int
    largest: int


def chunk_passes(micro_batches: int, chunks: int, groups: int) -> ChunkPasses:
    """Micro-batches divided evenly over ``groups``, of which each passes all chunks before the next one does."""
    bounds = [micro_batches * g // groups for g in range(groups + 1)]
    forwards, backwards, sizes = [], [], []
    for start, stop in zip(bounds, bounds[1:]):
        forwards += [(m, c) for c in range(chunks) for m in range(start, stop)]
        backwards += [(m, c) for c in reversed(range(chunks)) for m in range(start, stop)]
        sizes.append(stop - start)
    return ChunkPasses(forwards, backwards, min(sizes), max(sizes))


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
