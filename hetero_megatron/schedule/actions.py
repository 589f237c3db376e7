"""What a stage can do: an action is a kind, a micro-batch and a virtual chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = ("F", "B", "B_INPUT", "W")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SYNCHRONISATION = ("REDUCE", "UPDATE", "ALL_GATHER")
# Receives posted before they are needed. Each waits on the device, where it takes execution slots from compute: one
# is under way while a micro-batch is computed.
LOOKAHEAD = 1
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
        there = self.after(stage, chunk) if kind in ("SEND_F", "RECV_B") else self.before(stage, chunk)
        if there is None or there[0] == stage:
            return None
        return there[0], Action(_OTHER_END[kind], micro_batch, there[1])


Rows = tuple[tuple[Action, ...], ...]  # of every stage in turn
