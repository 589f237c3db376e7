"""Loss drift between two runs: the gate that H2 puts before a new platform (mean relative error below 1.5 %)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_fields import integer, maybe, number, record, require
from hetero_megatron.utils.files import json_lines
from hetero_megatron.utils.text import plural

_ROW = record({"step": integer(), "loss": maybe(number())})


@dataclass(frozen=True)
class Drift:
    """Mean and worst relative difference of the losses of the steps that both runs have."""

    steps: int
    mean: float
    worst: float
    worst_step: int
    threshold: float

    @property
    def ok(self) -> bool:
        return self.mean <= self.threshold

    def text(self) -> str:
        verdict = "within" if self.ok else "OVER"
        return (
            f"{plural(self.steps, 'step')}: mean relative difference of losses {self.mean:.3%}, "
            f"{verdict} {self.threshold:.3%}; worst {self.worst:.3%} at step {self.worst_step}"
        )


def loss_drift(one: str | Path, other: str | Path, threshold: float) -> Drift:
    """Compare the losses of two ``metrics.jsonl`` (or the directories that hold them); ``one`` is the baseline.

    Raises:
        UserError: a file is not there or has no losses, or the runs have no step in common.
    """
    a, b = _losses(one), _losses(other)
    common = sorted(a.keys() & b.keys())
    if not common:
        raise UserError("the two runs have no step in common", field="metrics", value=str(other),
                        accepted=f"steps {min(a)} to {max(a)}")  # fmt: skip
    errors = {step: _relative(b[step], a[step]) for step in common}
    worst = max(common, key=lambda step: errors[step])
    return Drift(len(common), sum(errors.values()) / len(common), errors[worst], worst, threshold)


def _relative(got: float, want: float) -> float:
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return abs(got - want) / max(abs(want), 1e-12)


def _losses(path: str | Path) -> dict[int, float]:
    """Loss by step; the last line of a step counts (a run may have been resumed)."""
    file = Path(path) / "metrics.jsonl" if os.path.isdir(path) else Path(path)
    losses = {}
    for place, row in json_lines(file, "metrics"):
        if "loss" in row and "step" in row:
            require(row, _ROW, "what a line of metrics holds", place)
            if row["loss"] is not None:
                losses[row["step"]] = float(row["loss"])
    if not losses:
        raise UserError("no step with a loss in it", field="metrics", value=str(file), accepted="a metrics.jsonl")
    return losses
