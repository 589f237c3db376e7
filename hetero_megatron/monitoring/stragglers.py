"""Ranks that fall behind: each one's computing time against what it should be.

What it should be is the prediction from calibrated rates where there is one, else the rank's own earlier steps.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_fields import integer, number, numbered, record, require, text
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:  # a launcher starts without torch
    from hetero_megatron.monitoring.reporter import Reporter
    from hetero_megatron.training.exit import ExitConditions

WARM_UP, BASELINE, RECENT = 3, 20, 8  # steps that are ignored, that make the own baseline, that are compared with it
FACTOR = 1.5
SILENCE = 100  # steps before the same rank is named again
DRIFT = 4  # exit code: stopped after a checkpoint, for the launcher to plan again
DRIFT_FILE = "drift.json"
_DRIFT = record({"step": integer(), "dtype": text, "ratios": numbered(number(0))})


@dataclass(frozen=True)
class Behind:
    """A rank that computes ``seconds`` per step (median of its last steps) and should take ``should``.

    ``steady``: every one of them was too slow, so that their median is what it takes now.
    """

    rank: int
    chip: str
    seconds: float
    should: float
    predicted: bool
    steady: bool

    @property
    def ratio(self) -> float:
        return self.seconds / self.should

    def __str__(self) -> str:
        own = f"in steps {WARM_UP + 1} to {WARM_UP + BASELINE} of this run"
        source = "predicted from calibrated rates" if self.predicted else own
        return (
            f"rank {self.rank} ({self.chip}) falls behind: it computes {self.seconds:.3g} s per step, "
            f"{self.ratio:.2f} times the {self.should:.3g} s {source}"
        )


@dataclass
class StragglerWatch:
    """Fed with every step's busy seconds per rank of the plan.

    Args:
        ranks: of the plan, in the order of the seconds.
        chips: type by rank, for the message.
        expected: predicted busy seconds of a step by rank; empty: the rank's own median of earlier steps.
        factor: a rank is behind when the median of its last steps exceeds this times what is expected.
        batch_size: that ``expected`` is for; 0: any. Steps of another size are judged by the rank's own.
    """

    ranks: Sequence[int]
    chips: Mapping[int, str]
    expected: Mapping[int, float] = field(default_factory=dict)
    factor: float = FACTOR
    batch_size: int = 0

    def __post_init__(self) -> None:
        self._size = 0
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._first: dict[int, list[float]] = {r: [] for r in self.ranks}
        self._recent: dict[int, deque[float]] = {r: deque(maxlen=RECENT) for r in self.ranks}
        self._named: dict[int, int] = {}

    def step(self, busy: Sequence[float], batch_size: int) -> list[Behind]:
        """The ranks that are found to be behind at this step, and were not named lately."""
        if batch_size != self._size:  # another amount of work: begin anew
            self._size = batch_size
            self._begin()
        self._step += 1
        if self._step <= WARM_UP:
            return []
        for rank, seconds in zip(self.ranks, busy, strict=True):
            self._recent[rank].append(seconds)
            if len(self._first[rank]) < BASELINE:
                self._first[rank].append(seconds)
        new = [b for b in self.behind() if self._step >= self._named.get(b.rank, 0)]
        self._named |= {b.rank: self._step + SILENCE for b in new}
        return new

    def behind(self) -> list[Behind]:
        """Every rank that is behind now."""
        found = []
        for rank in self.ranks:
            recent, first = self._recent[rank], self._first[rank]
            predicted = rank in self.expected and self.batch_size in (0, self._size)
            if len(recent) < RECENT or (not predicted and self._step <= WARM_UP + BASELINE):
                continue
            should = self.expected[rank] if predicted else median(first)
            seconds = median(recent)
            if seconds > self.factor * should:
                steady = min(recent) > self.factor * should
                found.append(Behind(rank, self.chips[rank], seconds, should, predicted, steady))
        return found


class StragglerReport:
    """Names ranks that fall behind, where that was asked for, and stops the run for a new plan, where that was.

    Only the rank that speaks has something to watch; a stop becomes everyone's at the next step.
    """

    def __init__(self, config: RunConfig, reporter: Reporter, exit: ExitConditions) -> None:
        self.config, self.reporter, self.exit = config, reporter, exit
        self._watch: StragglerWatch | None = None
        self._drift: list[Behind] = []  # for which the run stops
        self._reason = ""
        failure, plan = config.failure, config.plan
        if (failure.stragglers or failure.replan_on_drift) and reporter.speaks:
            factor = failure.replan_on_drift or FACTOR
            expected, size = reporter.expected_busy, plan.global_batch_size
            self._watch = StragglerWatch(plan.ranks, reporter.chips, expected, factor, size)

    def step(self, step: int, busy: Sequence[float], batch_size: int) -> None:
        """After ``step`` steps; ``busy``: seconds of compute of the last one per rank of the plan."""
        if self._watch is None:
            return
        for behind in self._watch.step(busy, batch_size):
            self.reporter.say(notice_line(f"step {step}: {behind}"))
            self.reporter.event("straggler", str(behind), step=step, rank=behind.rank, ratio=behind.ratio)
        steady = [b for b in self._watch.behind() if b.steady]
        if self.config.failure.replan_on_drift and not self.exit.reason and steady:
            self._drift = steady
            ranks = ", ".join(str(b.rank) for b in steady)
            self.exit.reason = self._reason = f"rank {ranks} drifted from its rate"

    def wants_plan(self, step: int) -> bool:
        """At the end of the run, after ``step`` steps: whether drift is why it stopped, and no signal since. Then the
        launcher is told which ranks."""
        if not self._drift or self.exit.reason != self._reason or step >= self.config.steps:
            return False
        write_drift(self.config, step, self._drift)
        return True


def write_drift(config: RunConfig, step: int, behind: Sequence[Behind]) -> None:
    """For the launcher: which ranks are behind by how much, in the --save directory."""
    assert config.checkpoint.save is not None
    ranks = {str(b.rank): b.ratio for b in behind}
    path = Path(config.checkpoint.save) / DRIFT_FILE
    try:
        path.write_text(json.dumps({"step": step, "dtype": config.dtype, "ratios": ranks}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", field="--save", value=str(path)) from error


def read_drift(directory: Path) -> dict[str, Any] | None:
    """What ``write_drift`` wrote, which is removed: ``step``, ``dtype``, ``ratios`` by rank; None if nothing."""
    path = directory / DRIFT_FILE
    if not os.path.lexists(path):
        return None
    try:
        found = read_json_object(path)
    finally:
        with suppress(OSError):
            path.unlink()
    require(found, _DRIFT, "what a rank that drifted writes", str(path))
    return {**found, "ratios": {int(rank): float(ratio) for rank, ratio in found["ratios"].items()}}
