"""The side of the ranks that train beside a teacher or a reference on ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from hetero_megatron.comm import Comm, Group
from hetero_megatron.data import Datasets
from hetero_megatron.data.batch import BatchLoader
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.role_scores import Rows, ScoreTransfer, TeacherScores, unpacked_answers
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.role_messages import Answer, BatchRequest, Instruction, meet, meeting_group

if TYPE_CHECKING:
    from hetero_megatron.pipeline.stage_work import StepResult
    from hetero_megatron.pipeline.step_work import Fetch
    from hetero_megatron.training.loop import Training
    from hetero_megatron.training.runtime_options import BeforeForward

SPLITS = ("train", "valid", "test")


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
