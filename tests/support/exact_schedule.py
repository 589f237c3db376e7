"""The fastest schedule of a small pipeline, by an exact solver: CP-SAT where OR-Tools is installed, else HiGHS.

Shares nothing with the search but its inputs. Seconds must be whole numbers. Backwards are always split: a whole B is
never faster, and never holds less where what W needs is no more than the activations, which is assumed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hetero_megatron.schedule.stage_orders import PipelineTimes

Start = tuple[str, int, int]  # kind, stage, micro-batch
After = tuple[Start, Start, int]  # the second starts at least so many seconds after the start of the first


def cp_sat_installed() -> bool:
    return importlib.util.find_spec("ortools") is not None


def exact_seconds(times: PipelineTimes, count: int, upper: float, limit: float = 60.0) -> tuple[float, float]:
    """(seconds of the best schedule found, a bound below which there is none); equal when solved.

    Args:
        upper: seconds of a known schedule; no slower ones are looked at.
        limit: seconds of solving.
    """
    for stage in times.stages:
        assert stage.deferred_bytes <= stage.activation_bytes, "whole backwards might be needed"
        assert not stage.split_seconds, "whole backwards might be faster"
    solve = _cp_sat if cp_sat_installed() else _highs
    return solve(times, count, round(upper), limit)


def _precedences(times: PipelineTimes, count: int) -> Iterator[After]:
    """What does not depend on any choice: the way of each micro-batch, micro-batches in order, and forwards that need
    the memory of earlier ones, which where W needs as much as the rest says all about memory."""
    for s, stage in enumerate(times.stages):
        seconds = _seconds(times, s)
        released = "W" if stage.deferred_bytes == stage.activation_bytes else "I"
        for m in range(count):
            if m >= stage.capacity:
                yield (released, s, m - int(stage.capacity)), ("F", s, m), seconds[released]
        for m in range(count):
            yield ("I", s, m), ("W", s, m), seconds["I"]
            for kind in "FIW":
                if m:
                    yield (kind, s, m - 1), (kind, s, m), seconds[kind]
            if s == len(times.stages) - 1:
                yield ("F", s, m), ("I", s, m), seconds["F"]
                continue
            link = times.links[s]
            there, back, latency = map(round, (link.forward_seconds, link.backward_seconds, link.latency_seconds))
            yield ("F", s, m), (">", s, m), seconds["F"]
            yield (">", s, m), ("F", s + 1, m), there + latency
            yield ("I", s + 1, m), ("<", s, m), round(times.stages[s + 1].input_gradient_seconds)
            yield ("<", s, m), ("I", s, m), back + latency
            if m:
                yield (">", s, m - 1), (">", s, m), there
                yield ("<", s, m - 1), ("<", s, m), back


def _seconds(times: PipelineTimes, s: int) -> dict[str, int]:
    stage = times.stages[s]
    kinds = (stage.forward_seconds, stage.input_gradient_seconds, stage.weight_gradient_seconds)
    return dict(zip("FIW", map(round, kinds), strict=True))


def _starts(times: PipelineTimes, count: int) -> list[Start]:
    stages = len(times.stages)
    return [(k, s, m) for s in range(stages) for k in ("FIW" if s == stages - 1 else "FIW<>") for m in range(count)]


def _cp_sat(times: PipelineTimes, count: int, upper: int, limit: float) -> tuple[float, float]:
    cp_model = importlib.import_module("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    start = {key: model.new_int_var(0, upper, str(key)) for key in _starts(times, count)}
    end = model.new_int_var(0, upper, "end")
    for before, after, seconds in _precedences(times, count):
        model.add(start[after] >= start[before] + seconds)
    for s, stage in enumerate(times.stages):
        lasts = _seconds(times, s)
        keys = [(k, s, m) for k in "FIW" for m in range(count)]
        model.add_no_overlap([model.new_fixed_size_interval_var(start[k], lasts[k[0]], str(k)) for k in keys])
        if count:
            model.add(end >= start["W", s, count - 1] + lasts["W"] + round(stage.tail_seconds))
        if stage.capacity < count and stage.deferred_bytes != stage.activation_bytes:
            _cp_memory(model, start, times, s, count, upper)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit, 1
    status = solver.solve(model)
    found = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float("inf")
    return found, solver.best_objective_bound


def _cp_memory(model: Any, start: dict[Start, Any], times: PipelineTimes, s: int, count: int, upper: int) -> None:
    stage, seconds = times.stages[s], _seconds(times, s)
    held, sizes = [], []
    for m in range(count):
        turn, end = start["I", s, m] + seconds["I"], start["W", s, m] + seconds["W"]
        for begin, stop, size in ((start["F", s, m], turn, stage.activation_bytes), (turn, end, stage.deferred_bytes)):
            held.append(model.new_interval_var(begin, model.new_int_var(0, upper, ""), stop, ""))
            sizes.append(round(size))
    model.add_cumulative(held, sizes, round(stage.memory_bytes))


def _highs(times: PipelineTimes, count: int, upper: int, limit: float) -> tuple[float, float]:
    """Mixed-integer program: a binary variable per pair of unlike actions of a stage says which comes first. Memory is
    counted in micro-batches: equal bytes until W."""
    keys = _starts(times, count)
    column = {key: i for i, key in enumerate(keys)}
    size = len(keys) + 1  # the last of these is the end of the step
    end = len(keys)
    rows: list[tuple[dict[int, float], float]] = []  # coefficients . x >= bound
    for before, after, gap in _precedences(times, count):
        rows.append(({column[after]: 1, column[before]: -1}, gap))
    for s, stage in enumerate(times.stages):
        seconds = _seconds(times, s)
        rows.append(({end: 1, column["W", s, count - 1]: -1}, seconds["W"] + stage.tail_seconds))
        assert stage.activation_bytes == stage.deferred_bytes, "HiGHS counts micro-batches"
        for a, b in ("FI", "FW", "IW"):
            for i in range(count):
                for j in range(i):  # before its own and all later ones it comes anyway
                    x, y, first = column[a, s, i], column[b, s, j], size
                    size += 1
                    rows.append(({y: 1, x: -1, first: -upper}, seconds[a] - upper))
                    rows.append(({x: 1, y: -1, first: upper}, seconds[b]))
    matrix = coo_array(
        (
            [v for row, _ in rows for v in row.values()],
            ([r for r, (row, _) in enumerate(rows) for _ in row], [c for row, _ in rows for c in row]),
        ),
        shape=(len(rows), size),
    )
    cost = np.zeros(size)
    cost[end] = 1
    integrality = (np.arange(size) > end).astype(int)
    most = np.where(integrality, 1, upper)
    constraint = LinearConstraint(matrix.tocsr(), np.array([b for _, b in rows]), np.inf)
    found = milp(
        cost, integrality=integrality, bounds=Bounds(0, most), constraints=constraint, options={"time_limit": limit}
    )
    return (float("inf") if found.x is None else float(found.fun)), float(found.mip_dual_bound or 0)
