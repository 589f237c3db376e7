"""Columns (in the sense of column generation): pipelines that were found for some chips, and how long each takes for a
share of the batch."""

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
