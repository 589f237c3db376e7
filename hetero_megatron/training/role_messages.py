"""The messages between the ranks that train and those of a role (a teacher, a reference, a generator).

The first rank that trains and all ranks of the role exchange messages once for each batch: the role's report how the
last one went, the other's which one comes next, and whether to send what was said of the last one. So the role works on
the batch after the one that is trained on, and the faster one waits. Only the ranks that train know which batch comes:
the role is given those of a run that goes on to its end, and what it says of a batch that does not come is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetero_megatron.comm import Comm, Group
from hetero_megatron.comm.group import Refusal
from hetero_megatron.training.checkpointing import WRITE_TIMEOUT
from hetero_megatron.training.config import RunConfig


@dataclass(frozen=True)
class BatchRequest:
    """A batch: the samples ``[first, first + size)`` of one of the data sets."""

    split: str
    first: int
    size: int


@dataclass(frozen=True)
class RolloutRequest:
    """Answers that a generator is to sample.

    Attributes:
        first: global index of the first one.
        weights: optimizer steps that its weights have seen.
        sync: these weights come now.
    """

    first: int
    weights: int
    sync: bool


Request = BatchRequest | RolloutRequest


@dataclass(frozen=True)
class Sampled:
    """Token ids of the answers of a batch; where weights may have changed until they are learned from, also the
    log-probabilities of these tokens, in nats (else none)."""

    answers: list[list[int]]
    logps: list[list[float]]


@dataclass(frozen=True)
class Instruction:
    """Of the ranks that train: the batch that comes next (None: that is not known yet), and whether to send what was
    said of the last one; or that the run ends, with an exit code, or because of a ``problem``."""

    next: Request | None = None
    send: bool = False
    ends: bool = False
    code: int = 0
    problem: Refusal | None = None


@dataclass(frozen=True)
class Answer:
    """Of a rank of the role, or of all of them together: what went wrong with the last batch, and why it wants to
    stop, if it does; at the start, ``data``: what it reads; of a generator's first rank, ``sampled``."""

    problem: Refusal | None = None
    stop: str = ""
    data: dict[str, str] = field(default_factory=dict)
    sampled: Sampled | None = None


def meeting_group(config: RunConfig, comm: Comm) -> Group | None:
    """The first rank that trains and those of the role; None on other ranks. Every rank of the job calls it first with
    its other groups. It waits in host memory, and for as long as the ranks that train may save or export."""
    return comm.background_group((config.plan.ranks[0], *config.compiled_role.plan.ranks), WRITE_TIMEOUT)


def meet(group: Group, first: int, message: Instruction | Answer) -> tuple[Instruction, Answer]:
    """Exchange the instruction of rank ``first`` and the answers of the others. Called on all ranks of the group.

    Returns:
        the instruction, and what the others answer together; equal on all.
    """
    messages = dict(zip(group.ranks, group.gather_objects(message, Instruction | Answer), strict=True))
    instruction = messages.pop(first)
    answers = {rank: answer for rank, answer in messages.items() if isinstance(answer, Answer)}
    assert isinstance(instruction, Instruction) and len(answers) == len(messages), f"{instruction}, {messages}"
    return instruction, joint_answer(tuple(answers), tuple(answers.values()))


def joint_answer(ranks: Sequence[int], answers: Sequence[Answer]) -> Answer:
    """What several ranks answer together: the first problem of any, also that they read unlike data."""
    first, problems = answers[0], [answer.problem for answer in answers if answer.problem is not None]
    for rank, answer in zip(ranks, answers, strict=True):
        for name, mark in first.data.items() if not problems else ():
            if answer.data.get(name) != mark:
                problem = f"rank {rank} reads {answer.data.get(name)}, rank {ranks[0]} reads {mark}"
                problems.append(Refusal(problem, name, None, "the same data on every rank", ""))
    stops = (f"{answer.stop} (rank {rank}, with another role)" for rank, answer in zip(ranks, answers) if answer.stop)
    sampled = next((answer.sampled for answer in answers if answer.sampled is not None), None)
    return replace(first, problem=problems[0] if problems else None, stop=next(stops, ""), sampled=sampled)
