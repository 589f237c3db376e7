"""What a stage can do: an action is a kind, a micro-batch and a virtual chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = ("F", "B", "B_INPUT", "W")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SYNCHRONISATION = ("REDUCE", "UPDATE", "SPREAD")
LOOKAHEAD = 2  # receives posted before they are needed: one in flight while one is being consumed
SEND_LAG = 4  # gradient sends that may be under way; their buffers live that long
KINDS = (*COMPUTE, *COMMUNICATION, *SYNCHRONISATION)


class Action(NamedTuple):
    """``F3`` is the forward of micro-batch 3; chunk c > 0 prints as ``F3.c``.

    Kinds: ``F`` forward; ``B`` whole backward, or ``B_INPUT`` (gradient of the input) and ``W`` (of the
    weights); ``SEND_F``/``RECV_F`` activations to and from the neighbours; ``SEND_B``/``RECV_B`` their
    gradients; ``REDUCE`` sums the gradients of one bucket at their owners, ``SPREAD`` sends its parameters back (the
    bucket's index stands in ``micro_batch``, the hop in ``chunk``); ``UPDATE`` between them agrees on the norm and
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
    """One list of actions per stage; ``name`` is the generator's."""

    name: str
    stages: tuple[tuple[Action, ...], ...]
