"""Seconds and bytes of a pipeline whose stages have several chunks of layers, and how to time schedules of it.

A micro-batch passes chunk 0 of all stages, then chunk 1 of all stages, and so on; from the last stage to the first it
takes a link of its own, and in a pipeline of one stage nothing moves between chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.simulate import ChunkSeconds, Costs
from hetero_megatron.schedule.stage_orders import (
    LinkTimes,
    PipelineTimes,
    StageTimes,
    lower_bound_seconds,
    split_letter,
)

ChunkOrders = tuple[tuple[str, ...], ...]  # by stage: letters with the number of their chunk


@dataclass(frozen=True)
class ChunkedTimes:
    """All stages with their chunks, and the boundaries.

    Args:
        stages: of each stage, its chunks, as many on each; ``memory_bytes`` and ``tail_seconds`` of a stage's first
            chunk are the stage's.
        links: after each stage; the last one leads from the last stage back to the first. () with one stage.

    Raises:
        UserError: no stage or chunk, unlike numbers of chunks, a number of links that does not match, or memory in
            which not even one micro-batch can pass all chunks.
    """

    stages: tuple[tuple[StageTimes, ...], ...]
    links: tuple[LinkTimes, ...]

    def __post_init__(self) -> None:
        counts = sorted({len(chunks) for chunks in self.stages})
        if len(counts) != 1 or counts[0] < 1:
            raise UserError("no equal number of chunks on every stage", field="stages", value=counts, accepted="1 each")
        link_count = len(self.stages) if len(self.stages) > 1 else 0
        if len(self.links) != link_count:
            problem = f"the pipeline has {len(self.stages)} stages"
            raise UserError(problem, field="links", value=len(self.links), accepted=f"{link_count} links")
        for s, chunks in enumerate(self.stages):
            least_bytes = sum(chunk.activation_bytes for chunk in chunks)
            if least_bytes > chunks[0].memory_bytes:
                problem = f"holds no micro-batch of {least_bytes:g} bytes in all chunks of stage {s}"
                raise UserError(
                    problem, field="memory_bytes", value=chunks[0].memory_bytes, accepted=f"{least_bytes:g} or more"
                )

    @property
    def chunks(self) -> int:
        return len(self.stages[0])

    @cached_property
    def flat(self) -> PipelineTimes:
        """Each stage's chunks as one: what every micro-batch takes in all of them, one after the other."""
        stages = [
            StageTimes(
                forward_seconds=sum(c.forward_seconds for c in chunks),
                input_gradient_seconds=sum(c.input_gradient_seconds for c in chunks),
                weight_gradient_seconds=sum(c.weight_gradient_seconds for c in chunks),
                tail_seconds=chunks[0].tail_seconds,
                split_seconds=sum(c.split_seconds for c in chunks),
            )
            for chunks in self.stages
        ]
        return PipelineTimes(tuple(stages), self.links[:-1])

    def costs(self) -> Costs:
        """The same for :func:`~hetero_megatron.schedule.simulate`; ``tail_seconds`` become one REDUCE per stage."""
        rows = [
            [ChunkSeconds(c.forward_seconds, c.backward_seconds, c.weight_gradient_seconds, c.split_seconds) for c in x]
            for x in self.stages
        ]
        links = self.links if self.chunks > 1 else self.links[:-1]
        return replace(
            self.flat.costs(), chunks=rows, link=[k.forward_seconds for k in links],
            link_back=[k.backward_seconds for k in links], latency=[k.latency_seconds for k in links],
        )  # fmt: skip


def chunked_lower_bound_seconds(times: ChunkedTimes, num_micro_batches: int) -> float:
    """No schedule of these times takes less (up to rounding): of every stage, what it does for all micro-batches, not
    before a first one has passed chunk 0 of the stages before it, and followed by the stage's reduction of gradients;
    and the way of one micro-batch through all chunks and back."""
    if num_micro_batches == 0:
        return lower_bound_seconds(times.flat, 0)
    bounds, head, way = list[float](), 0.0, 0.0
    for s, chunks in enumerate(times.stages):
        work = sum(c.forward_seconds + sum(c.least_seconds) for c in chunks)
        bounds.append(head + num_micro_batches * work + chunks[0].tail_seconds)
        way += sum(c.forward_seconds + c.least_seconds[0] for c in chunks)
        if times.links:
            link = times.links[s]
            head += chunks[0].forward_seconds + link.forward_seconds + link.latency_seconds
            trips = times.chunks - (s == len(times.stages) - 1)
            way += trips * (link.forward_seconds + link.backward_seconds + 2 * link.latency_seconds)
    first = times.stages[0][0]
    return max(*bounds, way + first.least_seconds[1] + first.tail_seconds)


def keeps_chunk_memory(chunks: Sequence[StageTimes], row: Sequence[str]) -> bool:
    """Micro-batches never hold more than the stage has."""
    step = _steps(chunks)
    held = peak = 0.0
    for action in row:
        held += step[action]
        peak = max(peak, held)
    return peak <= chunks[0].memory_bytes


def _steps(chunks: Sequence[StageTimes]) -> dict[str, float]:
    """Bytes by which what the stage holds grows with each kind of action."""
    step = dict[str, float]()
    for i, c in enumerate(chunks):
        name = str(i) if i else ""
        step |= {
            f"F{name}": c.activation_bytes, f"I{name}": c.deferred_bytes - c.activation_bytes,
            f"W{name}": -c.deferred_bytes, f"B{name}": -c.activation_bytes,
        }  # fmt: skip
    return step


def time_chunk_orders(times: ChunkedTimes, orders: Sequence[Sequence[str]]) -> float | None:
    """Seconds of the step, ``tail_seconds`` included, as :func:`~hetero_megatron.schedule.simulate` has them; None
    where stages wait for each other for ever."""
    run = _Run(times, orders)
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        ready += run.advance(ready.pop())
    if any(place < len(row) for place, row in zip(run.places, orders, strict=True)):
        return None
    return max(clock + chunks[0].tail_seconds for clock, chunks in zip(run.clocks, times.stages, strict=True))


class _Run:
    """How far every stage is, and what has arrived where: by stage and chunk, in the order of micro-batches."""

    def __init__(self, times: ChunkedTimes, orders: Sequence[Sequence[str]]) -> None:
        count, chunks = len(times.stages), times.chunks
        self.times, self.orders = times, orders
        self.places, self.clocks = [0] * count, [0.0] * count
        self.there: tuple[list[list[list[float]]], ...] = tuple(
            [[[] for _ in range(chunks)] for _ in range(count)] for _ in range(2)
        )
        self.there[0][0][0] = [0.0] * orders[0].count("F")
        self.taken = [[[0] * chunks for _ in range(count)] for _ in range(2)]
        self.free = [[0.0] * count for _ in range(2)]
        self.kinds = {action: split_letter(action) for action in dict.fromkeys(a for row in orders for a in row)}

    def advance(self, s: int) -> list[int]:
        """Run stage ``s`` until it has to wait or ends; returns the stages for which something arrived."""
        row, chunks, clock = self.orders[s], self.times.stages[s], self.clocks[s]
        woken = list[int]()
        for place in range(self.places[s], len(row)):
            letter, c = self.kinds[row[place]]
            chunk = chunks[c]
            if letter == "W":
                clock += chunk.weight_gradient_seconds
            else:
                back = letter != "F"
                arrivals, taken = self.there[back][s][c], self.taken[back][s]
                if taken[c] == len(arrivals):
                    self.places[s], self.clocks[s] = place, clock
                    return woken
                clock = max(clock, arrivals[taken[c]])
                taken[c] += 1
                clock += (
                    chunk.forward_seconds if not back else
                    chunk.input_gradient_seconds if letter == "I" else chunk.backward_seconds
                )  # fmt: skip
                to = send(self.times, self.free, self.there, s, c, back, clock)
                if to is not None and to != s:
                    woken.append(to)
        self.places[s], self.clocks[s] = len(row), clock
        return woken


def send(
    times: ChunkedTimes, free: list[list[float]], there: Sequence[list[list[list[float]]]], s: int, c: int, back: bool,
    end: float,
) -> int | None:  # fmt: skip
    """Send what chunk ``c`` of stage ``s`` put out at ``end`` (``back``: the gradient of its input); the stage where it
    arrives, or None after the first gradient.

    Args:
        free: when the links are free, by direction and stage before them.
        there: arrivals by direction, stage and chunk; appended to.
    """
    last = len(times.stages) - 1
    if not back and s == last and c == times.chunks - 1:
        there[1][s][c].append(end)
        return s
    if back and s == 0 and c == 0:
        return None
    if last == 0:
        there[back][0][c - 1 if back else c + 1].append(end)
        return 0
    if back:
        to, chunk, link_index = (s - 1, c, s - 1) if s else (last, c - 1, last)
    else:
        to, chunk, link_index = (s + 1, c, s) if s < last else (0, c + 1, last)
    link = times.links[link_index]
    begin = max(end, free[back][link_index])
    free[back][link_index] = sent = begin + (link.backward_seconds if back else link.forward_seconds)
    there[back][to][chunk].append(sent + link.latency_seconds)
    return to
