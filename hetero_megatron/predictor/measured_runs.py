"""Measured runs, as :mod:`~hetero_megatron.predictor.rate_fitting` reads them: a CSV file of plans and step times."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, load_plan
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.islands import add_islands, format_added
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.utils.files import json_lines, read_text

LONGEST = 1e9  # seconds; longer steps are rejected as input errors
WARM_UP = 2  # first steps of a run that are ignored


@dataclass(frozen=True)
class MeasuredRun:
    """One measured plan: ``seconds`` per optimizer step."""

    plan: Plan
    model: ModelSpec
    seconds: float
    label: str = ""

    @cached_property
    def prepared(self) -> PreparedPlan:
        """The compiled plan, for predictions with many rates."""
        return PreparedPlan(CompiledPlan(self.plan, self.model))


def read_runs(path: str, cluster: Cluster, say: Callable[[str], None] = lambda _: None) -> list[MeasuredRun]:
    """Measured runs from a CSV file with the columns ``plan``, ``model`` and either ``seconds`` or ``metrics`` (a
    metrics.jsonl, whose median step counts). Paths are relative to the CSV file.

    Args:
        say: receives a message for every plan to which the cluster's islands are added.

    Raises:
        UserError: names file and line.
    """
    base = Path(path).resolve().parent
    try:
        rows = list(csv.DictReader(read_text(path).removeprefix("\ufeff").splitlines()))  # Excel writes a mark
    except csv.Error:
        raise UserError("not a CSV file", where=path, accepted="a line of names, then a line per run") from None
    runs = []
    for number, row in enumerate(rows, start=2):
        where = f"{path}:{number}"
        missing = [key for key in ("plan", "model") if not row.get(key)]
        if missing or not (row.get("seconds") or row.get("metrics")):
            column = missing[0] if missing else "seconds"
            raise UserError(
                "a column is missing", field=column, where=where, accepted="plan, model, seconds or metrics"
            )
        model = load_model(row["model"])
        written = load_plan(base / row["plan"], model, cluster)
        plan = add_islands(written, model, cluster)  # as the run that was measured had it
        if plan is not written:
            say(f"{where}: {format_added(plan, cluster)}")
        seconds = _seconds(row, base, where)
        runs.append(MeasuredRun(plan, model, seconds, where))
    return runs


def _seconds(row: Mapping[str, str], base: Path, where: str) -> float:
    if row.get("seconds"):
        return _positive(row["seconds"], "seconds", where)
    return median_step_seconds(base / row["metrics"])


def _positive(value: Any, field: str, where: str) -> float:
    """A measured time in seconds; UserError if it is not positive."""
    try:
        seconds = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < LONGEST:
        raise UserError("not a number of seconds", field=field, value=value, accepted="more than 0", where=where)
    return seconds


def median_step_seconds(metrics: Path) -> float:
    """Median ``step_seconds`` of a run's metrics.jsonl without its first :data:`WARM_UP` steps; UserError if none are
    left."""
    steps: dict[int, float] = {}
    for where, data in json_lines(metrics):
        if "step_seconds" in data:
            step = data.get("step")
            if not isinstance(step, int):
                raise UserError("not an integer", field="step", value=step, where=where)
            steps[step] = _positive(data["step_seconds"], "step_seconds", where)
    values = [steps[step] for step in sorted(steps)][WARM_UP:]
    if not values:
        raise UserError(f"no step after the first {WARM_UP}", where=str(metrics), accepted="a longer run")
    return statistics.median(values)
