"""Seconds and bytes of an unequal pipeline: what a schedule is made from, and what no schedule can beat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.simulate import Costs

ROUNDING = 1e-9  # relative: sums of the same seconds in another order differ by less


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What micro-batches hold on one stage, and what it has for them. With the first two left at 1, ``memory_bytes`` is
    the most micro-batches in flight.

    Args:
        activation_bytes: held by a micro-batch from the start of F to the end of B_INPUT or B.
        deferred_bytes: held from the end of B_INPUT to the end of W: inputs and output gradients of the layers whose
            weight gradients are still to be computed.
        memory_bytes: what the stage has for both; may be infinite.

    Raises:
        UserError: a negative or infinite number, or memory for not even one micro-batch.
    """

    activation_bytes: float = 1
    deferred_bytes: float = 1
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        _check_numbers(self, unlimited="memory_bytes")
        if self.memory_bytes < self.activation_bytes:
            raise UserError(
                f"holds no micro-batch of {self.activation_bytes} bytes",
                field="memory_bytes",
                value=self.memory_bytes,
                accepted=f"{self.activation_bytes} or more",
            )

    @property
    def capacity(self) -> float:
        """Micro-batches that fit at once, no W deferred; may be infinite."""
        if self.memory_bytes == math.inf or not self.activation_bytes:
            return math.inf
        return self.memory_bytes // self.activation_bytes


@dataclass(frozen=True)
class StageTimes(StageMemory):
    """Seconds of one micro-batch on one stage and of the stage's end of step, beside its memory.

    Seconds that the stage itself spends on sends and receives belong to the F or backward beside them.

    Args:
        forward_seconds: F.
        input_gradient_seconds: B_INPUT, recomputed activations included.
        weight_gradient_seconds: W.
        tail_seconds: after the stage's last action: gradient reduction and optimizer, as far as not hidden.
        split_seconds: what B_INPUT and W together take more than a whole B; may be negative.

    Raises:
        UserError: a negative or infinite number, or memory for not even one micro-batch.
    """

    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    tail_seconds: float = 0.0
    split_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.backward_seconds < math.inf:
            most = self.input_gradient_seconds + self.weight_gradient_seconds
            raise UserError(
                "leaves no time for a whole backward", field="split_seconds", value=self.split_seconds,
                accepted=f"{most} or less: B_INPUT and W together",
            )  # fmt: skip

    @property
    def backward_seconds(self) -> float:
        """Whole B."""
        return self.input_gradient_seconds + self.weight_gradient_seconds - self.split_seconds

    @property
    def least_seconds(self) -> tuple[float, float]:
        """(until a backward's input gradient is there, then until all of it is done), at least, split or not."""
        first = min(self.input_gradient_seconds, self.backward_seconds)
        return first, self.backward_seconds + min(self.split_seconds, 0.0) - first


@dataclass(frozen=True)
class LinkTimes:
    """One boundary between stages. Transfers of one direction follow one another; the two directions do not disturb
    each other.

    Args:
        forward_seconds, backward_seconds: how long one activation, or its gradient, occupies the link.
        latency_seconds: from the end of that to the arrival.

    Raises:
        UserError: a negative or infinite number.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)


def _check_numbers(times: StageMemory | LinkTimes, unlimited: str = "") -> None:
    for name in (f.name for f in fields(times) if f.name != "split_seconds"):
        value = getattr(times, name)
        if not value >= 0 or (value == math.inf and name != unlimited):
            raise UserError("is no duration or size", field=name, value=value, accepted="0 or more, finite")


@dataclass(frozen=True)
class PipelineTimes:
    """All stages, and the boundary after each but the last.

    Raises:
        UserError: no stage, or a number of links that does not match.
    """

    stages: tuple[StageTimes, ...]
    links: tuple[LinkTimes, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise UserError("too few stages", field="stages", value=0, accepted="1 or more")
        if len(self.links) != len(self.stages) - 1:
            raise UserError(
                f"the pipeline has {len(self.stages)} stages",
                field="links",
                value=len(self.links),
                accepted=f"{len(self.stages) - 1} links",
            )

    @cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        """Whole B, per stage."""
        return tuple(s.backward_seconds for s in self.stages)

    def costs(self) -> Costs:
        """The same for :func:`~hetero_megatron.schedule.simulate`; ``tail_seconds`` become one REDUCE per stage."""
        return Costs(
            forward=[s.forward_seconds for s in self.stages],
            backward=self.backward_seconds,
            weight=[s.weight_gradient_seconds for s in self.stages],
            split=[s.split_seconds for s in self.stages],
            reduce=[s.tail_seconds for s in self.stages],
            link=[k.forward_seconds for k in self.links],
            link_back=[k.backward_seconds for k in self.links],
            latency=[k.latency_seconds for k in self.links],
        )


def lower_bound_seconds(times: PipelineTimes, num_micro_batches: int) -> float:
    """No schedule of these times that keeps the memory takes less (up to rounding).

    The largest of, for every stage and link: what it does for all micro-batches, between the earliest it can begin and
    the least that has to follow; and the round trips of micro-batches that wait for each other's memory.
    """
    if num_micro_batches == 0:
        return max(s.tail_seconds for s in times.stages)
    return max(_bounds(times, num_micro_batches))


def _bounds(times: PipelineTimes, count: int) -> Iterator[float]:
    stages, links = times.stages, times.links
    gradient, rest = zip(*(s.least_seconds for s in stages))
    # After the input gradient of a stage, the gradient still has to reach every earlier one: seconds to the step's end.
    after = [rest[0] + stages[0].tail_seconds]
    for s, link in enumerate(links):
        back = link.backward_seconds + link.latency_seconds + gradient[s]
        after.append(max(rest[s + 1] + stages[s + 1].tail_seconds, back + after[-1]))
    # From the start of a forward to the end of the same micro-batch's input gradient.
    trip = [stages[-1].forward_seconds + gradient[-1]]
    for s, link in reversed(list(enumerate(links))):
        both = link.forward_seconds + link.backward_seconds + 2 * link.latency_seconds
        trip.append(stages[s].forward_seconds + both + trip[-1] + gradient[s])
    trip.reverse()
    head = 0.0  # earliest start of the stage's first forward
    for s, stage in enumerate(stages):
        forward, own = stage.forward_seconds, stage.forward_seconds + gradient[s]
        yield head + count * (own + rest[s]) + stage.tail_seconds
        yield head + count * own + after[s]
        yield head + (count - 1) * forward + trip[s] + after[s]
        rounds = math.ceil(count / stage.capacity) if stage.capacity < math.inf else 1
        yield head + rounds * trip[s] + after[s]
        if s < len(links):
            link = links[s]
            yield head + (count - 1) * max(link.forward_seconds, link.backward_seconds) + trip[s] + after[s]
            head += forward + link.forward_seconds + link.latency_seconds
