"""Columns (as in column generation): pipelines on some chips, with their time for each share of the batch."""

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
    """One pipeline.

    Attributes:
        forward, backward: seconds per stage; link: per boundary, seconds (forward, backward).
        after: lower bound on the sync tail, in seconds.
    """

    shape: PipelineTemplate
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    link: tuple[Link, ...]
    schedule: str
    after: float = 0.0

    def time(self, micro_batches: int, exact: bool = False) -> float:
        """Seconds until its parameters are updated: a lower bound, or with ``exact`` the pipeline's exact time plus the
        lower bound on its sync tail."""
        compute = seconds if exact else closed_form
        return self.after + compute(self.forward, self.backward, self.link, micro_batches, self.schedule)


@dataclass
class ColumnPool:
    """Columns of pipelines that use the same chips.

    Attributes:
        times: [batch + 1] least seconds for each number of sequences.
        best: by number of sequences, (seconds, column index) of the ``keep`` fastest.
        cut: [batch + 1] least seconds of a column that was dropped.
    """

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
        """Add a column for these numbers of micro-batches only."""
        index = self.add_lazily(lambda: column)
        for m in counts:
            self.insert(m * column.shape.micro_batch_size, column.time(m, self.exact), index)

    def add_lazily(self, make: Callable[[], PipelineColumn]) -> int:
        """Register a column that is made on first use; returns its index."""
        self.makers.append(cache(make))
        return len(self.makers) - 1

    def column(self, index: int) -> PipelineColumn:
        return self.makers[index]()

    def takes(self, q: int, least: float) -> bool:
        """Whether a column that takes at least ``least`` seconds for ``q`` sequences may be kept; recorded in ``cut``
        if not."""
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
