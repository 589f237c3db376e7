"""The messages between a student and a teacher on ranks of its own, and the student's side of them.

The student's first rank and all ranks of the teacher exchange messages once for each batch: the teacher's report how
the last one went, the student's which one comes next, and whether to send the scores of the last one. So the teacher
works on the batch after the one that the student trains on, and the faster one waits. Only the student knows which
batch comes: the teacher is given those of a run that goes on to its end, and scores of a batch that does not come are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hetero_megatron.comm import Comm, CommError, Group
from hetero_megatron.comm.group import Refusal
from hetero_megatron.data import Datasets
from hetero_megatron.data.batch import BatchLoader
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.teacher_scores import ScoreTransfer, TeacherScores
from hetero_megatron.training.checkpointing import WRITE_TIMEOUT
from hetero_megatron.training.config import RunConfig

if TYPE_CHECKING:
    from hetero_megatron.pipeline.step_work import Fetch
    from hetero_megatron.training.loop import Training

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class BatchRequest:
    """A batch: the samples ``[first, first + size)`` of one of the data sets."""

    split: str
    first: int
    size: int


@dataclass(frozen=True)
class Instruction:
    """Of the student: the batch that comes next (None: that is not known yet), and whether to send the scores of the
    last one; or that the run ends, with an exit code, or because of a ``problem``."""

    next: BatchRequest | None = None
    send_scores: bool = False
    ends: bool = False
    code: int = 0
    problem: Refusal | None = None


@dataclass(frozen=True)
class Answer:
    """Of a rank of the teacher, or of all of them together: what went wrong with the last batch, and why it wants to
    stop, if it does; at the start, ``data``: what it reads."""

    problem: Refusal | None = None
    stop: str = ""
    data: dict[str, str] = field(default_factory=dict)


def meeting_group(config: RunConfig, comm: Comm) -> Group | None:
    """The student's first rank and those of the teacher; None on other ranks. Every rank of the job calls it first with
    its other groups. It waits in host memory, and for as long as the student may save or export."""
    return comm.background_group((config.plan.ranks[0], *config.compiled_role.plan.ranks), WRITE_TIMEOUT)


def meet(group: Group, student: int, message: Instruction | Answer) -> tuple[Instruction, Answer]:
    """Exchange the instruction of rank ``student`` and the answers of the others. Called on all ranks of the group.

    Returns:
        the instruction, and what the others answer together; equal on all.
    """
    messages = dict(zip(group.ranks, group.gather_objects(message, Instruction | Answer), strict=True))
    instruction = messages.pop(student)
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
    stops = (f"{answer.stop} (rank {rank}, of the teacher)" for rank, answer in zip(ranks, answers) if answer.stop)
    stop = next(stops, "")
    return replace(first, problem=problems[0] if problems else None, stop=stop)


def score_transfer(config: RunConfig, comm: Comm) -> ScoreTransfer:
    assert config.role is not None
    return ScoreTransfer(comm, config.compiled_role.plan, config.plan, config.role.top_k)


def corpora(data: Datasets) -> dict[str, str]:
    """What is read, for comparisons between ranks."""
    return {f"data ({name})": f"{mark} {data.corpora[name]}" for name, mark in data.fingerprints.items()}


def requests(config: RunConfig, step: int, consumed: int, tests: bool) -> Iterator[BatchRequest]:
    """The batches of a run that goes on after ``step`` steps and ``consumed`` samples, unless it is stopped; ``tests``:
    it ends with the test set."""
    evaluation, size = config.evaluation, config.plan.global_batch_size

    def evaluated(split: str) -> Iterator[BatchRequest]:
        return (BatchRequest(split, i * size, size) for i in range(evaluation.iterations))

    while not config.skip_train and step < config.steps:
        batch = config.batch_size.at(consumed)
        yield BatchRequest("train", consumed, batch)
        step, consumed = step + 1, consumed + batch
        if step % evaluation.interval == 0 and step < config.steps:
            yield from evaluated("valid")
    yield from evaluated("valid")
    if tests:
        yield from evaluated("test")


class Lookahead:
    """Which batch comes next, of a run whose batches are to be ``upcoming``.

    Attributes:
        next: of them; None: there is none, or that is not known any more.
    """

    def __init__(self, upcoming: Iterator[BatchRequest]) -> None:
        self._upcoming, self.next = upcoming, next(upcoming, None)

    def pass_by(self, request: BatchRequest) -> None:
        """``request`` has come; perhaps without those that were to come before it."""
        while self.next is not None and self.next != request:
            self.next = next(self._upcoming, None)
        self.next = next(self._upcoming, None)


class TeacherClient:
    """The student's side; made on all of its ranks, as soon as there are groups."""

    def __init__(self, config: RunConfig, comm: Comm) -> None:
        assert config.role is not None
        self._comm, self._meeting, self._first = comm, meeting_group(config, comm), config.plan.ranks[0]
        self._world: Group = comm.group(config.plan.ranks)
        self._scores, self._transfer = TeacherScores(config.role.top_k), score_transfer(config, comm)
        self._lookahead = Lookahead(iter(()))
        self._asked: BatchRequest | None = None  # of the teacher
        self._taken: BatchRequest | None = None
        self._stop: Callable[[str], None] = lambda reason: None

    def begin(self, training: Training) -> None:
        """The run is set up: the teacher starts with its first batch. Called on all ranks of the student.

        Raises:
            UserError: the teacher's ranks cannot do their part, or read other data; on all ranks.
        """
        data, runtime = training.node_data.datasets, training.runtime
        self._data = data
        self._stop = training.exit.ask
        self._lookahead = Lookahead(
            requests(training.config, training.step, training.consumed, data.test is not None)
        )
        self._asked = self._lookahead.next
        answer = self._meet(Instruction(self._asked))
        if answer.problem is not None:
            raise answer.problem.error()
        for name, mark in corpora(data).items():
            if answer.data.get(name) != mark:
                problem = f"the teacher's ranks read {answer.data.get(name)}, the student's {mark}"
                raise UserError(problem, field=name, accepted="the same data on every rank")
        if isinstance(runtime.loss, DistillationLoss):
            runtime.loss.scores = self._scores
        runtime.hooks.before_forward = self.before_forward

    def before_forward(self, fetch: Fetch, first_sample: int, batch_size: int) -> None:
        """See :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        assert isinstance(fetch, BatchLoader)
        split = next(name for name in SPLITS if getattr(self._data, name) is fetch.dataset)
        request = BatchRequest(split, first_sample, batch_size)
        if request == self._taken:  # a step that is done again
            return
        while self._asked != request:
            self._asked = request
            self._meet(Instruction(request))
        self._lookahead.pass_by(request)
        self._asked = self._lookahead.next
        answer = self._meet(Instruction(self._asked, send_scores=True))
        if answer.problem is not None:
            raise answer.problem.error()
        self._scores.rows = {}  # before there is memory for the next ones
        self._scores.rows = self._transfer.receive(first_sample, batch_size)
        self._taken = request

    def end(self, instruction: Instruction) -> None:
        """The run is over for the teacher's ranks, too. Only the first rank tells them: after an error others may be
        gone."""
        if self._meeting is not None:
            self._comm.activity = "the end of the teacher's run"
            meet(self._meeting, self._first, instruction)

    def _meet(self, instruction: Instruction) -> Answer:
        self._comm.activity = "waiting for the teacher"
        began = self._comm.clock.wait_begins()
        try:
            answer = meet(self._meeting, self._first, instruction)[1] if self._meeting is not None else None
            found: Answer = self._world.gather_objects(answer, Answer | None)[0]
        finally:
            self._comm.clock.wait_ends(began, True)
        if found.stop:
            self._stop(found.stop)
        return found


def beside_teacher(config: RunConfig, comm: Comm, run: Callable[[TeacherClient], int]) -> int:
    """``run`` on a rank of the student; however it ends, the teacher's ranks are told. Returns the exit code."""
    client = TeacherClient(config, comm)
    try:
        code = run(client)
    except UserError as error:
        with suppress(CommError):  # what was wrong is not that a teacher is gone, too
            client.end(Instruction(ends=True, problem=Refusal.of(error)))
        raise
    client.end(Instruction(ends=True, code=code))
    return code
