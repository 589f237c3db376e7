"""The messages between the model that is trained and one with a role on ranks of its own (a teacher, a reference, a
generator), and the side of the ranks that train beside a teacher or a reference.

Their first rank and all ranks of the role exchange messages once for each batch: the role's report how the last one
went, the other's which one comes next, and whether to send what was said of the last one. So the role works on the
batch after the one that is trained on, and the faster one waits. Only the ranks that train know which batch comes: the
role is given those of a run that goes on to its end, and what it says of a batch that does not come is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hetero_megatron.comm import Comm, CommError, Group
from hetero_megatron.comm.group import Refusal
from hetero_megatron.data import Datasets
from hetero_megatron.data.batch import BatchLoader
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.role_scores import Rows, ScoreTransfer, TeacherScores, unpacked_answers
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.training.checkpointing import WRITE_TIMEOUT
from hetero_megatron.training.config import RunConfig

if TYPE_CHECKING:
    from hetero_megatron.pipeline.stage_work import StepResult
    from hetero_megatron.pipeline.step_work import Fetch
    from hetero_megatron.training.loop import Training
    from hetero_megatron.training.runtime_options import BeforeForward

SPLITS = ("train", "valid", "test")


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


def role_transfer(config: RunConfig, comm: Comm) -> ScoreTransfer:
    assert config.forward_role is not None
    role = config.forward_role
    return ScoreTransfer(comm, role.compiled.plan, config.plan, role.words, whole=role.name == "reference")


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


def taker(training: Training, top_k: int) -> Callable[[Rows], None]:
    """What becomes of that which is said of a batch, on this rank of a run beside a role."""
    runtime = training.runtime
    if training.config.preference is None:
        scores = TeacherScores(top_k)
        if isinstance(runtime.loss, DistillationLoss):
            runtime.loss.scores = scores
        return partial(setattr, scores, "rows")
    from hetero_megatron.training.reference import know_reference

    return lambda rows: know_reference(runtime, unpacked_answers(rows))


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


class RoleMeetings:
    """What the ranks that train say to those of a role, and hear.

    Args:
        meeting: see :func:`meeting_group`; world: the ranks that train; role: its name.
    """

    def __init__(self, comm: Comm, meeting: Group | None, world: Group, role: str) -> None:
        self.comm, self.world, self._meeting, self._role = comm, world, meeting, role
        self._stop: Callable[[str], None] = lambda reason: None

    def begin(self, training: Training) -> None:
        """The run is set up: the role starts. Called on all ranks that train.

        Raises:
            UserError: the role's ranks cannot do their part, or read other data; on all ranks.
        """
        raise NotImplementedError

    def end(self, instruction: Instruction) -> None:
        """The run is over for the role's ranks, too. Only the first rank tells them: after an error others may be
        gone."""
        if self._meeting is not None:
            self.comm.activity = f"the end of the {self._role}'s run"
            meet(self._meeting, self.world.ranks[0], instruction)

    def _meet(self, instruction: Instruction) -> Answer:
        self.comm.activity = f"waiting for the {self._role}"
        began = self.comm.clock.wait_begins()
        try:
            told = meet(self._meeting, self.world.ranks[0], instruction)[1] if self._meeting is not None else None
            answer: Answer = self.world.gather_objects(told, Answer | None)[0]
        finally:
            self.comm.clock.wait_ends(began, True)
        if answer.stop:
            self._stop(answer.stop)
        return answer

    def _same_data(self, answer: Answer, own: Mapping[str, str]) -> None:
        """UserError: ``answer`` says a problem, or that the role's ranks read other data than this one."""
        if answer.problem is not None:
            raise answer.problem.error()
        for name, mark in own.items():
            if answer.data.get(name) != mark:
                problem = f"the {self._role}'s ranks read {answer.data.get(name)}, the others {mark}"
                raise UserError(problem, field=name, accepted="the same data on every rank")


class RoleClient(RoleMeetings):
    """Beside a teacher or a reference; made on all ranks that train, as soon as there are groups."""

    def __init__(self, config: RunConfig, comm: Comm) -> None:
        assert config.role is not None
        super().__init__(comm, meeting_group(config, comm), comm.group(config.plan.ranks), config.role.name)
        self._top_k, self._transfer = config.role.top_k, role_transfer(config, comm)
        self._take: Callable[[Rows], None] = lambda rows: None
        self._lookahead = Lookahead(iter(()))
        self._asked: BatchRequest | None = None  # of the teacher
        self._taken: BatchRequest | None = None
        self._then: BeforeForward = lambda fetch, first, size: None

    def begin(self, training: Training) -> None:
        """See :class:`RoleMeetings`: with its first batch."""
        data, runtime = training.node_data.datasets, training.runtime
        self._data = data
        self._stop = training.exit.ask
        self._lookahead = Lookahead(
            requests(training.config, training.step, training.consumed, data.test is not None)
        )
        self._asked = self._lookahead.next
        self._same_data(self._meet(Instruction(self._asked)), corpora(data))
        self._take, self._then = taker(training, self._top_k), runtime.hooks.before_forward
        runtime.hooks.before_forward = self.before_forward

    def before_forward(self, fetch: Fetch, first_sample: int, batch_size: int) -> StepResult | None:
        """See :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        assert isinstance(fetch, BatchLoader)
        split = next(name for name in SPLITS if getattr(self._data, name) is fetch.dataset)
        request = BatchRequest(split, first_sample, batch_size)
        if request != self._taken:  # else a step is done again
            self._hear(request)
        return self._then(fetch, first_sample, batch_size)

    def _hear(self, request: BatchRequest) -> None:
        """What is said of a batch arrives."""
        while self._asked != request:
            self._asked = request
            self._meet(Instruction(request))
        self._lookahead.pass_by(request)
        self._asked = self._lookahead.next
        answer = self._meet(Instruction(self._asked, send=True))
        if answer.problem is not None:
            raise answer.problem.error()
        self._take({})  # before there is memory for the next ones
        self._take(self._transfer.receive(request.first, request.size))
        self._taken = request


def client_of(config: RunConfig, comm: Comm) -> RoleMeetings:
    """Of the role beside a run."""
    assert config.role is not None
    if config.role.name != GENERATOR:
        return RoleClient(config, comm)
    from hetero_megatron.training.generator_client import generator_client

    return generator_client(config, comm)


def beside_role(config: RunConfig, comm: Comm, run: Callable[[RoleMeetings], int]) -> int:
    """``run`` on a rank that trains; however it ends, the role's ranks are told. Returns the exit code."""
    client = client_of(config, comm)
    try:
        code = run(client)
    except UserError as error:
        with suppress(CommError):  # what was wrong is not that a peer is gone, too
            client.end(Instruction(ends=True, problem=Refusal.of(error)))
        raise
    client.end(Instruction(ends=True, code=code))
    return code
