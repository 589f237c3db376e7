"""What the executor runs: a stage's chunks with their work and losses, and what a step of it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hetero_megatron.comm.hooks import Clock
from hetero_megatron.data.batch import Batch
from hetero_megatron.pipeline.boundary import Boundary
from hetero_megatron.schedule import Action


class LossFunction(Protocol):
    """(logits, batch, gradient with which backward will start) -> sum of losses, [], or [1 + modules] where modules
    predict further tokens."""

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float, /) -> torch.Tensor: ...

    def count(self, batch: Batch) -> int:
        """How many losses of a batch are in the sum."""
        ...


Key = tuple[int, int]  # micro-batch, chunk


class Reducer(Protocol):
    """Who sums gradients: told when the last gradients of each chunk come, asked for each REDUCE at its place in the
    list."""

    def begin(self, reduces: Sequence[Action]) -> None: ...

    def last_gradients(self, chunk: int, products: Sequence[torch.Tensor] | None) -> None:
        """The action that begins is the last one with gradients of this chunk: of the weights whose ``products`` it
        computes, or of any of its parameters (None)."""

    def complete(self, action: Action) -> None: ...


class WeightGatherer(Protocol):
    """Who gathers weights that the ranks of a stage divide: told what each chunk begins and ends, and what of this a
    rank does not compute. ``reshard``: they are given up between forward and backward."""

    reshard: bool

    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def begin_forward(self, chunk: int) -> None: ...
    def end_forward(self, chunk: int) -> None: ...
    def begin_backward(self, chunk: int) -> None: ...
    def end_backward(self, chunk: int) -> None: ...
    def end_products(self, chunk: int) -> None: ...
    def pass_forward(self, chunk: int) -> None: ...
    def pass_backward(self, chunk: int) -> None: ...


class HostBytes(Protocol):
    """How many bytes of host memory are in use, now and at most so far; ``hold``: so many more, or less."""

    live: int
    peak: int

    def hold(self, size: int) -> None: ...


class ActivationMover(Protocol):
    """Who moves saved activations to host memory and back: told what begins, where there is a backward. ``settle``: all
    whose forward is over are to be gone from the device."""

    @property
    def host(self) -> HostBytes: ...

    def begin_forward(self, key: Key) -> None: ...
    def begin_backward(self, key: Key) -> None: ...
    def settle(self) -> None: ...


@dataclass(frozen=True)
class StageChunk:
    """What a micro-batch passes at once on this rank.

    Attributes:
        model: called as ``model(x, batch)``.
        loss: after the last chunk of the pipeline, maps logits to the sum of token losses; None elsewhere.
        before, after: ``before(size)`` gives the boundary with the stage before, for micro-batches of that size; None
            where there is none, and where the chunk before is on this stage (``local``).
        sender: number of the chunk before, on its own stage.
    """

    model: Callable[[torch.Tensor, Batch], torch.Tensor]
    loss: LossFunction | None = None
    before: Callable[[int], Boundary] | None = None
    after: Callable[[int], Boundary] | None = None
    sender: int = 0
    local_before: bool = False
    local_after: bool = False


@dataclass(frozen=True)
class StageWork:
    """What a step gives one rank to do.

    Attributes:
        actions: lowered actions of its stage, and the REDUCEs after them.
        batches: its rows of each micro-batch (None where it has no rows).
        sizes: sequences of each micro-batch (of the whole pipeline, which defines the boundary layouts).
        receives: those among the actions, in the order in which they are posted; None: as they are needed.
        seed: value with which backward starts at the loss sum.
    """

    actions: Sequence[Action]
    batches: Sequence[Batch | None]
    sizes: Sequence[int]
    receives: Sequence[Action] | None = None
    seed: float = 1.0


@dataclass(frozen=True, slots=True)
class TimedAction:
    """What an action took on this rank: ``start`` and ``end`` in seconds of one clock, and ``computed``, its seconds of
    compute by the chip's clock (the rest it spent communicating)."""

    action: Action
    start: float
    end: float
    computed: float


@dataclass
class StepResult:
    """Sum of losses of each micro-batch and their number (of this rank's head stage, else none); the actions
    in the order in which they ran, each from a moment of the rank's clock to another, and the moments at which all
    began and ended.

    ``before``: of a forward of another model that came before, already read.

    After :meth:`read`, in seconds: computing, waiting for pipeline neighbours, communicating otherwise (adding up
    gradients after the last backward included), and ``actions``.
    """

    # [] or [1 + modules] each, so that the executor never waits for the device.
    losses: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    ran: list[tuple[Action, Any, Any]] = field(default_factory=list)
    whole: tuple[Any, Any] | None = None
    before: StepResult | None = None
    busy_seconds: float = 0.0
    bubble_seconds: float = 0.0
    communication_seconds: float = 0.0
    actions: list[TimedAction] = field(default_factory=list)

    def read(self, clock: Clock) -> None:
        """Read the times, before the clock is used for another step. A device must have passed the last moment: else
        this would be an error, not a wait."""
        assert self.whole is not None, "read before the end"
        spans = [(action, clock.span(begin, end)) for action, begin, end in self.ran]
        self.actions = [TimedAction(action, s.start, s.end, s.computed) for action, s in spans]
        self.busy_seconds = sum(s.computed for action, s in spans if action.kind != "REDUCE")
        step_span = clock.span(*self.whole)
        self.bubble_seconds = step_span.neighbours
        self.communication_seconds = step_span.end - step_span.start - self.busy_seconds - self.bubble_seconds


class ComparedLoss:
    """What losses have in common that compare the model with another one, a reference (``preference.py``) or a teacher
    (``distillation.py``): it collects what a step or an evaluation tells about itself beside its loss, the facts."""

    def __init__(self) -> None:
        self._rehearsing = False
        self._facts: list[torch.Tensor] = []  # of micro-batches, [facts] each

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, the other model has not spoken, and nothing that is computed counts."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def begin(self) -> None:
        """A step or an evaluation begins."""
        self._facts.clear()

    def _tell(self, facts: torch.Tensor) -> None:
        """``facts``: [facts], of one micro-batch or of a part of it."""
        if not self._rehearsing:
            self._facts.append(facts)

    def _summed(self, number: int, device: torch.device) -> torch.Tensor:
        """[number]: sums of the facts since :meth:`begin`."""
        return torch.stack(self._facts).sum(0) if self._facts else torch.zeros(number, device=device)
