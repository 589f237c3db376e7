"""Rates fitted to measured step times, with error bars.

Each rate is a factor on its previous value (measured, else from data sheets): least squares on log(predicted /
measured), with a weak prior that keeps factors near 1 when the runs say nothing about them. The error bar of a rate is
the factor by which it may be off (one standard deviation); a rate whose bar is hardly smaller than the prior's is
reported as not determined by these runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import ChipRates, LinkRates, Rates, scaled_rows
from hetero_megatron.predictor.cost.rates_document import as_document, link_document
from hetero_megatron.predictor.measured_runs import MeasuredRun
from hetero_megatron.predictor.simulate.step import StepSimulator
from hetero_megatron.spec import ModelSpec

CHIP = (
    "gemm_flops", "gemm_half", "attention_flops", "score_seconds", "bytes_per_second", "layer_seconds",
    "layer_backward_seconds", "action_seconds", "message_seconds", "step_seconds",
)  # fmt: skip
LINK = ("alpha", "beta", "message_seconds")
ROWS = ("layers", "embed", "head", "optimizer")  # measured tables, scaled as a whole
PARTS = {"layers": ("split_layers", "elementwise"), "head": ("split_head",)}  # parts of these, scaled with them
LEAST = {"gemm_half": 100.0, "score_seconds": 1e-13, "beta": 1e-12}  # what factor 1 means for a rate of zero
LEAST_SECONDS = 1e-5
PRIOR = 1.0  # standard deviation of the logarithm of a factor, before any run
NOISE = 0.03  # standard deviation of a measured time, relative
DETERMINED = 0.7  # share of the prior's deviation below which a rate counts as determined
# Coarse search before the least squares: (factors tried, passes over all knobs, passes that include the knobs that
# synchronisation depends on).
SEARCH = (((0.1, 0.3, 3.0, 10.0), 2, 1), ((0.5, 0.7, 1.4, 2.0), 6, 1), ((0.85, 0.93, 1.08, 1.18), 6, 1))
LITTLE = 1e-3  # relative gain below which a pass is the last one
COMPUTING = (
    "gemm_flops", "gemm_half", "attention_flops", "score_seconds", "layer_seconds", "layer_backward_seconds",
    "action_seconds", "layers", "embed", "head",
)  # fmt: skip
EVERY = 40  # most runs in the coarse search
LAG = 3  # steps between updates of the derivatives of rates that synchronisation depends on


@dataclass(frozen=True)
class FittedRate:
    """Args:
        name: ``chip.rate`` or ``link a-b.rate``.
        before, value: in units of the rate.
        error: factor by which ``value`` may be off.
        determined: whether the runs determine the rate."""

    name: str
    before: float
    value: float
    error: float
    determined: bool


@dataclass(frozen=True)
class Fit:
    """The fitted rates; ``before``, ``after``: per run, predicted / measured - 1."""

    rates: Rates
    fitted: tuple[FittedRate, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


def predict_runs(
    runs: Sequence[MeasuredRun], rates: Rates, options: CostOptions, pipelines_only: bool = False
) -> list[float]:
    """Predicted seconds of each run, or only of its pipelines (without synchronisation and optimizer)."""
    costs: dict[tuple[ModelSpec, int], CostModel] = {}
    out = []
    for run in runs:
        key = (run.model, run.plan.seq_length)
        if key not in costs:
            costs[key] = CostModel(run.model, rates.cluster, run.plan.seq_length, rates.dtype, options, rates)
        step = StepSimulator(run.plan, costs[key], run.prepared)
        out.append(step.pipeline_seconds if pipelines_only else step.times.end)
    return out


def fit_rates(
    runs: Sequence[MeasuredRun],
    start: Rates,
    options: CostOptions | None = None,
    only: Sequence[str] | None = None,
    steps: int = 15,
) -> Fit:
    """Fit the rates of the chips and links that ``runs`` use.

    Args:
        only: rates to vary (names as in :data:`CHIP` and :data:`LINK`); None: all.
        steps: most steps of the least-squares solver.

    Raises:
        UserError: no runs, or a time that is not positive.
    """
    from scipy.optimize import least_squares

    if not runs:
        raise UserError("there is nothing to fit to", field="runs", accepted="at least one measured run")
    for run in runs:
        if not 0 < run.seconds < math.inf:
            raise UserError("not a time", field=run.label or "seconds", value=run.seconds, accepted="seconds above 0")
    knobs = _knobs(runs, start, only)
    problem = _FitProblem(runs, start, options or CostOptions(), knobs)
    highest = [_highest(knob, start) for knob in knobs]
    solution = least_squares(
        problem.residuals, _coarse(problem, np.array(highest)), problem.jacobian, loss="soft_l1",
        bounds=(-np.inf, highest), ftol=1e-3, max_nfev=steps,
    )  # fmt: skip
    errors_after = problem.errors(solution.x)
    # The Jacobian of the plain residuals gives the bars; a worse fit than NOISE widens them.
    jacobian = problem.jacobian(solution.x, fresh=True)
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    widen = max(1.0, float(np.sqrt(np.mean(np.square(errors_after)))) / NOISE)
    bars = np.minimum(np.sqrt(np.diag(covariance)) * widen, PRIOR)
    keep = np.array([bar < DETERMINED * PRIOR for bar in bars])
    rates = _apply(start, knobs, solution.x)
    fitted = tuple(
        FittedRate(str(knob), knob.value(start), knob.value(rates), float(np.exp(bar)), bool(ok))
        for knob, bar, ok in zip(knobs, bars, keep, strict=True)
    )
    errors_before = np.exp(problem.errors(np.zeros(len(knobs)))) - 1
    return Fit(rates, fitted, tuple(errors_before.tolist()), tuple((np.exp(errors_after) - 1).tolist()))


class _FitProblem:
    """Residuals of a fit and their derivatives. A prediction is the time of the pipelines plus what follows, mostly
    gradient synchronisation, which takes most of the work to compute. Residuals are exact. When only a rate of
    *computing* changes, derivatives and the coarse search assume that the time after the pipelines is unchanged.
    Derivatives of the other rates are updated at every :data:`LAG`-th step."""

    def __init__(self, runs: Sequence[MeasuredRun], start: Rates, options: CostOptions, knobs: Sequence[_Knob]) -> None:
        self.runs, self.start, self.options, self.knobs = runs, start, options, knobs
        self.measured = np.log([run.seconds for run in runs])
        self.some = runs if len(runs) <= EVERY else [runs[round(i)] for i in np.linspace(0, len(runs) - 1, EVERY)]
        self._exact: dict[bytes, np.ndarray] = {}
        self._columns: dict[int, np.ndarray] = {}
        self._calls = 0

    def seconds(self, theta: np.ndarray) -> np.ndarray:
        key = theta.tobytes()
        if key not in self._exact:
            self._exact[key] = self.predicted(theta, self.runs)
        return self._exact[key]

    def predicted(self, theta: np.ndarray, runs: Sequence[MeasuredRun], pipelines_only: bool = False) -> np.ndarray:
        """Seconds of some runs, or of their pipelines alone."""
        return np.array(predict_runs(runs, _apply(self.start, self.knobs, theta), self.options, pipelines_only))

    def errors(self, theta: np.ndarray) -> np.ndarray:
        """log(predicted / measured) per run."""
        return np.asarray(np.log(self.seconds(theta)) - self.measured)

    def residuals(self, theta: np.ndarray) -> np.ndarray:
        return np.concatenate([self.errors(theta) / NOISE, theta / PRIOR])

    def jacobian(self, at: np.ndarray, fresh: bool = False, step: float = -0.02) -> np.ndarray:
        """Finite differences: wide, to average over kinks of maxima, and downwards because of the bounds."""
        fresh = fresh or self._calls % LAG == 0
        self._calls += 1
        seconds_here = self.seconds(at)
        base = self.predicted(at, self.runs, True) if any(k.computes for k in self.knobs) else seconds_here
        for i, knob in enumerate(self.knobs):
            move = at.copy()
            move[i] += step
            if knob.computes:
                seconds_moved = seconds_here + self.predicted(move, self.runs, True) - base
            elif fresh or i not in self._columns:
                seconds_moved = self.seconds(move)
                del self._exact[move.tobytes()]
            else:
                continue
            self._columns[i] = (np.log(seconds_moved) - np.log(seconds_here)) / step / NOISE
        prior = np.eye(len(at)) / PRIOR
        return np.concatenate([np.stack([self._columns[i] for i in range(len(at))], axis=1), prior])

    def rough(self, theta: np.ndarray, base: np.ndarray | None) -> float:
        """The objective of the least squares on a sample of the runs; ``base``: their seconds after the pipelines, if
        known."""
        measured = np.log([run.seconds for run in self.some])
        seconds = self.predicted(theta, self.some, base is not None) + (0.0 if base is None else base)
        residuals = np.concatenate([(np.log(seconds) - measured) / NOISE, theta / PRIOR])
        return float(np.sum(np.sqrt(1 + np.square(residuals)) - 1))

    def after(self, theta: np.ndarray) -> np.ndarray:
        """Seconds after the end of the pipelines, for a sample of the runs."""
        return self.predicted(theta, self.some) - self.predicted(theta, self.some, True)


def _highest(knob: _Knob, start: Rates) -> float:
    """Upper bound on log(factor) of a knob: no chip computes faster than its data sheet's peak."""
    chip = start.cluster.chips.get(knob.chip)
    peak = chip.flops.get(start.dtype) if chip is not None and knob.rate in ("gemm_flops", "attention_flops") else None
    return max(math.log(peak / knob.value(start)), 1e-3) if peak else math.inf


def _coarse(problem: _FitProblem, highest: np.ndarray) -> np.ndarray:
    """Starting point: coordinate search over factors, coarse ones first, while it helps. Maxima in the model (compute
    or launches, bytes or FLOPs) hide a knob that is far off from every gradient, and a knob that moved to compensate
    for another must be able to come back."""
    best = np.zeros(len(highest))
    base = problem.after(best)
    least_loss = problem.rough(best, None)
    for factors, passes, turns in SEARCH:
        for turn in range(passes):
            start = least_loss
            for i, knob in enumerate(problem.knobs):
                if not knob.computes and turn >= turns:  # expensive: synchronisation is simulated again
                    continue
                origin = best[i]
                for factor in factors:
                    trial = best.copy()
                    trial[i] = origin + math.log(factor)
                    if trial[i] >= highest[i]:
                        continue
                    loss = problem.rough(trial, base if knob.computes else None)
                    if loss < least_loss:
                        best, least_loss = trial, loss
                if not knob.computes and best[i] != origin:
                    base = problem.after(best)
            if least_loss > start * (1 - LITTLE):
                break
    return best


@dataclass(frozen=True)
class _Knob:
    """One rate to fit: of a ``chip``, or of the ``link`` (group, group, same node)."""

    rate: str
    chip: str = ""
    link: tuple[str, str, bool] | None = None

    def __str__(self) -> str:
        if self.link is None:
            return f"{self.chip}.{self.rate}"
        a, b, inside = self.link
        return f"link {'within ' + a if inside else a + '-' + b}.{self.rate}"

    @property
    def computes(self) -> bool:
        """Whether it is a rate of computing, which synchronisation does not depend on."""
        return self.rate in COMPUTING

    def value(self, rates: Rates) -> float:
        if self.link is not None:
            rate = getattr(rates.between(*self.link), self.rate)
            return float(rate or 0.0)
        value = getattr(rates.chips[self.chip], self.rate)
        return float(value) if not isinstance(value, tuple) else _size(value)


def _size(rows: Sequence[object]) -> float:
    row = rows[0]
    return float(row[-1] if isinstance(row, tuple) else row.forward)  # type: ignore[attr-defined]


def _knobs(runs: Sequence[MeasuredRun], start: Rates, only: Sequence[str] | None) -> list[_Knob]:
    """The rates that the runs depend on: of their chips, and of the links that their plans use."""
    ranks = start.cluster.ranks
    chips = sorted({ranks[r].chip for run in runs for r in run.plan.ranks})
    links: set[tuple[str, str, bool]] = set()
    for run in runs:
        for a, b in _pairs(run.plan):
            first, second = sorted((ranks[a].group, ranks[b].group))
            links.add((first, second, ranks[a].node == ranks[b].node))
    knobs = []
    for chip in chips:
        tables = [t for t in ROWS if getattr(start.chips[chip], t)]
        names = [*tables, *(("action_seconds", "message_seconds", "step_seconds") if "layers" in tables else CHIP)]
        knobs += [_Knob(name, chip) for name in names if only is None or name in only]
    return knobs + [_Knob(name, link=link) for link in sorted(links) for name in LINK if only is None or name in only]


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """Pairs of ranks that exchange something: enough to cover every kind of link."""
    out: set[tuple[int, int]] = set()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            out |= {(u.ranks[0], r) for u in stage.units for r in u.ranks[1:]}
        for up, down in zip(pipeline.stages, pipeline.stages[1:]):
            out |= {(a, b) for a in up.ranks for b in down.ranks if a != b}
    for stage in plan.pipelines[0].stages:
        sharing = [s for p in plan.pipelines for s in p.stages if set(s.layer_indices()) & set(stage.layer_indices())]
        holders = [r for s in sharing for r in s.ranks]
        out |= {(holders[0], r) for r in holders[1:]}
    return out


def _apply(start: Rates, knobs: Sequence[_Knob], theta: Sequence[float] | np.ndarray) -> Rates:
    chips: dict[str, dict[str, object]] = {}
    links: dict[tuple[str, str, bool], dict[str, float]] = {}
    for knob, move in zip(knobs, theta, strict=True):
        factor = math.exp(move)
        if knob.link is not None:
            links.setdefault(knob.link, {})[knob.rate] = factor
        elif knob.rate in ROWS:
            for table in (knob.rate, *PARTS.get(knob.rate, ())):
                rows = getattr(start.chips[knob.chip], table)
                chips.setdefault(knob.chip, {})[table] = scaled_rows(table, rows, factor)
        else:
            chips.setdefault(knob.chip, {})[knob.rate] = _first(start, knob) * factor
    new_chips: dict[str, ChipRates] = {
        name: replace(rates, **chips[name], calibrated=True) if name in chips else rates  # type: ignore[arg-type]
        for name, rates in start.chips.items()
    }
    measured: dict[tuple[str, str, bool], LinkRates] = dict(start.measured)
    for (a, b, inside), factors in links.items():
        for ends in ((a, b, inside), (b, a, inside)):  # both directions are scaled alike
            values = {r: _first(start, _Knob(r, link=ends)) * factor for r, factor in factors.items()}
            measured[ends] = replace(start.between(*ends), calibrated=True, **values)  # type: ignore[arg-type]
    return Rates(start.cluster, start.dtype, new_chips, measured)


def _first(start: Rates, knob: _Knob) -> float:
    return knob.value(start) or LEAST.get(knob.rate, LEAST_SECONDS)


def rates_section(fit: Fit) -> dict[str, Any]:
    """The fitted rates as the ``rates:`` section of a cluster file."""
    rates = fit.rates
    chips = {n: {rates.dtype: as_document(c)} for n, c in rates.chips.items() if c.calibrated}
    measured = sorted(rates.measured.items(), key=lambda item: item[0])
    return {"chips": chips, "links": [link_document(a, b, link) for (a, b, _), link in measured]}


def format_fit(fit: Fit) -> str:
    """Table of the fitted rates, their errors, and the errors of the predictions."""
    lines = [f"{'rate':<44}{'before':>12}{'fitted':>12}  error"]
    for rate in fit.fitted:
        bar = f"x/÷ {rate.error:.2f}" if rate.determined else "not determined by these runs"
        lines.append(f"{rate.name:<44}{rate.before:>12.4g}{rate.value:>12.4g}  {bar}")
    for name, errors in (("before", fit.before), ("after", fit.after)):
        sizes = [abs(e) for e in errors]
        lines.append(f"{name}: mean error {statistics.mean(sizes):.1%}, worst {max(sizes):.1%} over {len(sizes)} runs")
    return "\n".join(lines)
