"""What the student's ranks and those of a teacher beside them tell each other, and the student's side of it.

The first ranks of both meet once for each batch: the teacher's says how the last one went, the student's what comes
next, and whether what was said of the last one is wanted. So the teacher works on the batch after the one that the
student trains on, and who is quicker waits. The student alone knows what comes: it takes its steps as if it would go on
to the end, and what the teacher has said of a batch that does not come is left where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetero_megatron.comm import Comm, CommError, Group
from hetero_megatron.comm.group import Refusal
from hetero_megatron.data import Datasets
from hetero_megatron.data.batch import BatchLoader
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.told import SaidTransfer, Told
from hetero_megatron.training.config import RunConfig

if TYPE_CHECKING:
    from hetero_megatron.pipeline.step_work import Fetch
    from hetero_megatron.training.loop import Training

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Request:
    """A batch: the samples ``[first, first + size)`` of one of the data sets."""

    split: str
    first: int
    size: int


@dataclass(frozen=True)
class Order:
    """Of the student's ranks: the batch that comes next (None: that is not known yet), and whether what was said of the
    last one is wanted; or that the run ends, with an exit code, or because of a ``problem``."""

    next: Request | None = None
    take: bool = False
    ends: bool = False
    code: int = 0
    problem: Refusal | None = None


@dataclass(frozen=True)
class Answer:
    """Of the teacher's ranks: what went wrong with the last batch, and why they want to stop, if they do; at the start,
    ``data``: what they read."""

    problem: Refusal | None = None
    stop: str = ""
    data: dict[str, str] = field(default_factory=dict)


def meet(comm: Comm, leaders: tuple[int, int], message: Order | Answer, kind: Any) -> Any:
    """Exchange a message with the other model's first rank. Called on both ``leaders``."""
    pair = comm.group(tuple(sorted(leaders)))
    began = comm.clock.wait_begins()
    try:
        messages = pair.gather_objects(message, Order | Answer)
    finally:
        comm.clock.wait_ends(began, True)
    found = messages[1 - pair.index]
    assert isinstance(found, kind), f"rank {pair.ranks[1 - pair.index]} sent {found}"
    return found


def leaders_of(config: RunConfig) -> tuple[int, int]:
    """The first ranks of student and teacher."""
    return config.plan.ranks[0], config.compiled_teacher.plan.ranks[0]


def said_transfer(config: RunConfig, comm: Comm) -> SaidTransfer:
    assert config.teacher is not None
    return SaidTransfer(comm, config.compiled_teacher.plan, config.plan, config.teacher.top_k)


def corpora(data: Datasets) -> dict[str, str]:
    """What is read, for comparisons between ranks."""
    return {f"data ({name})": f"{mark} {data.corpora[name]}" for name, mark in data.fingerprints.items()}


def requests(config: RunConfig, step: int, consumed: int, tests: bool) -> Iterator[Request]:
    """The batches of a run that goes on after ``step`` steps and ``consumed`` samples, unless it is stopped; ``tests``:
    it ends with the test set."""
    evaluation, size = config.evaluation, config.plan.global_batch_size

    def evaluated(split: str) -> Iterator[Request]:
        return (Request(split, i * size, size) for i in range(evaluation.iterations))

    while not config.skip_train and step < config.steps:
        batch = config.batch_size.at(consumed)
        yield Request("train", consumed, batch)
        step, consumed = step + 1, consumed + batch
        if step % evaluation.interval == 0 and step < config.steps:
            yield from evaluated("valid")
    yield from evaluated("valid")
    if tests:
        yield from evaluated("test")


class TeacherLine:
    """The student's end; made on all of its ranks, as soon as there are groups."""

    def __init__(self, config: RunConfig, comm: Comm) -> None:
        assert config.teacher is not None
        self._config, self._comm = config, comm
        self._world: Group = comm.group(config.plan.ranks)
        self._told, self._transfer = Told(config.teacher.top_k), said_transfer(config, comm)
        self._upcoming: Iterator[Request] = iter(())
        self._asked: Request | None = None  # of the teacher
        self._taken: Request | None = None
        self._stop: Callable[[str], None] = lambda reason: None

    def begin(self, training: Training) -> None:
        """The run is set up: the teacher starts with its first batch. Called on all ranks of the student.

        Raises:
            UserError: the teacher's ranks cannot do their part, or read other data; on all ranks.
        """
        data, runtime = training.node_data.datasets, training.runtime
        self._data = data
        self._stop = training.exit.ask
        self._upcoming = requests(training.config, training.step, training.consumed, data.test is not None)
        self._asked = next(self._upcoming, None)
        answer = self._meet(Order(self._asked))
        if answer.problem is not None:
            raise answer.problem.error()
        for name, mark in corpora(data).items():
            if answer.data.get(name) != mark:
                problem = f"the teacher's ranks read {answer.data.get(name)}, the student's {mark}"
                raise UserError(problem, field=name, accepted="the same data on every rank")
        if isinstance(runtime.loss, DistillationLoss):
            runtime.loss.told = self._told
        runtime.hooks.before_forward = self.before_forward

    def before_forward(self, fetch: Fetch, first_sample: int, batch_size: int) -> None:
        """See :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        assert isinstance(fetch, BatchLoader)
        split = next(name for name in SPLITS if getattr(self._data, name) is fetch.dataset)
        request = Request(split, first_sample, batch_size)
        if request == self._taken:  # a step that is done again
            return
        while self._asked != request:
            self._asked = request
            self._meet(Order(request))
        self._asked = self._after(request)
        answer = self._meet(Order(self._asked, take=True))
        if answer.problem is not None:
            raise answer.problem.error()
        self._told.rows = self._transfer.receive(first_sample, batch_size)
        self._taken = request

    def end(self, order: Order) -> None:
        """The run is over for the teacher's ranks, too. Only the first rank says so: after an error others may be
        gone."""
        if self._world.index == 0:
            self._comm.activity = "the end of the teacher's run"
            meet(self._comm, leaders_of(self._config), order, Answer)

    def _after(self, request: Request) -> Request | None:
        """What comes after ``request``, by what was to come."""
        for upcoming in self._upcoming:
            if upcoming == request:
                break
        return next(self._upcoming, None)

    def _meet(self, order: Order) -> Answer:
        self._comm.activity = "waiting for the teacher"
        leads = self._world.index == 0
        answer = meet(self._comm, leaders_of(self._config), order, Answer) if leads else None
        found: Answer = self._world.gather_objects(answer, Answer | None)[0]
        if found.stop:
            self._stop(found.stop)
        return found


def beside_teacher(config: RunConfig, comm: Comm, run: Callable[[TeacherLine], int]) -> int:
    """``run`` on a rank of the student; however it ends, the teacher's ranks hear of it. Returns the exit code."""
    line = TeacherLine(config, comm)
    try:
        code = run(line)
    except UserError as error:
        with suppress(CommError):  # what was wrong is not that a teacher is gone, too
            line.end(Order(ends=True, problem=Refusal.of(error)))
        raise
    line.end(Order(ends=True, code=code))
    return code
