"""Pipelines that were found for a number of chips, and how long they take for a share of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_time import Link, closed_form, seconds
from hetero_megatron.planner.template.plan_template import PipelineTemplate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PipelineColumn:
    """One pipeline: seconds of its stages and transfers, and the least that follows its end (synchronisation and
    optimizer)."""

    shape: PipelineTemplate
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    link: tuple[Link, ...]
    schedule: str
    after: float = 0.0

    def time(self, micro_batches: int, exact: bool = False) -> float:
        """Time until its parameters are updated: a lower bound, or ``exact`` but for what follows the pipeline."""
        compute = seconds if exact else closed_form
        return self.after + compute(self.forward, self.backward, self.link, micro_batches, self.schedule)


@dataclass
class ColumnPool:
    """Columns of pipelines that use the same chips: ``times[q]`` is the least time for q sequences, ``best[q]`` the
    columns that reach about that, ``cut[q]`` the least time of a column that was not kept."""

    batch: int
    exact: bool = False
    keep: int = 6
    makers: list[Callable[[], PipelineColumn]] = field(default_factory=list)
    times: Floats = field(init=False)
    best: list[list[tuple[float, int]]] = field(init=False)
    cut: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.times = np.full(self.batch + 1, np.inf)
        self.best = [[] for _ in range(self.batch + 1)]
        self.cut = np.full(self.batch + 1, np.inf)

    def add_at(self, column: PipelineColumn, counts: Sequence[int]) -> None:
        """Take a column for these numbers of micro-batches only."""
        index = self.promise(lambda: column)
        for m in counts:
            self.insert(m * column.shape.micro_batch_size, column.time(m, self.exact), index)

    def promise(self, make: Callable[[], PipelineColumn]) -> int:
        """The index of a column that is made when it is first asked for."""
        self.makers.append(cache(make))
        return len(self.makers) - 1

    def column(self, index: int) -> PipelineColumn:
        return self.makers[index]()

    def takes(self, q: int, least: float) -> bool:
        """Whether a column that takes at least so long for q sequences may be kept."""
        if q > self.batch or len(self.best[q]) < self.keep or least < self.best[q][-1][0]:
            return q <= self.batch
        self.cut[q] = min(self.cut[q], least)
        return False

    def insert(self, q: int, time: float, index: int) -> None:
        if q > self.batch:
            return
        row = self.best[q]
        if len(row) >= self.keep and time >= row[-1][0]:
            self.cut[q] = min(self.cut[q], time)
            return
        row.append((time, index))
        row.sort()
        if len(row) > self.keep:
            self.cut[q] = min(self.cut[q], row.pop()[0])
        self.times[q] = row[0][0]


def allocate(times: Sequence[Floats], batch: int) -> tuple[float, tuple[int, ...]] | None:
    """Share ``batch`` sequences so that the pipelines end as early as possible: exact min-max over tables of time by
    number of sequences (at least one each); None when no division comes out."""
    values = np.unique(np.concatenate([t[1:][np.isfinite(t[1:])] for t in times]))
    if not len(values) or any(not np.isfinite(t[1:]).any() for t in times):
        return None
    low, high = 0, len(values) - 1
    if not _reach(times, batch, float(values[high])):
        return None
    while low < high:
        middle = (low + high) // 2
        if sum(_most(t, float(values[middle])) for t in times) >= batch and _reach(times, batch, float(values[middle])):
            high = middle
        else:
            low = middle + 1
    limit = float(values[low])
    return limit, _shares(times, batch, limit)


def _most(times: Floats, limit: float) -> int:
    found = np.flatnonzero(times <= limit)
    return int(found[-1]) if len(found) else -(1 << 40)


def _allowed(times: Floats, limit: float) -> list[int]:
    return [int(q) for q in np.flatnonzero(times <= limit) if q]


def _reach(times: Sequence[Floats], batch: int, limit: float) -> list[int] | None:
    """Per pipeline, the bit set of totals that it and those before can reach; None when ``batch`` is not among them."""
    sets, mask = [1], (1 << (batch + 1)) - 1
    for t in times:
        total = 0
        allowed = _allowed(t, limit)
        if len(allowed) > 8 and allowed[-1] - allowed[0] == len(allowed) - 1:
            total = _spread(sets[-1], allowed[0], allowed[-1])
        else:
            for q in allowed:
                total |= sets[-1] << q
        sets.append(total & mask)
    return sets if sets[-1] >> batch & 1 else None


def _spread(bits: int, low: int, high: int) -> int:
    """OR of ``bits << q`` for all q in [low, high], by doubling."""
    result, width, want = bits, 1, high - low + 1
    while width * 2 <= want:
        result |= result << width
        width *= 2
    if width < want:
        result |= result << (want - width)
    return result << low


def _shares(times: Sequence[Floats], batch: int, limit: float) -> tuple[int, ...]:
    """One division within ``limit``; larger shares go to the pipelines that would be done earliest."""
    sets = _reach(times, batch, limit)
    assert sets is not None, "the limit was reachable"
    shares, left = [], batch
    for i in range(len(times) - 1, -1, -1):
        fits = [q for q in _allowed(times[i], limit) if q <= left and sets[i] >> (left - q) & 1]
        q = min(fits, key=lambda q: (abs(left / (i + 1) - q), q)) if i and _equal(times, i) else fits[-1]
        shares.append(q)
        left -= q
    return tuple(shares[::-1])


def _equal(times: Sequence[Floats], i: int) -> bool:
    return all(t is times[i] for t in times[: i + 1])
