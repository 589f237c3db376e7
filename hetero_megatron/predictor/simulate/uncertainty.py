"""The range in which a step is expected, from how much the plan's rates varied when they were measured.

Let ``D`` be the seconds by which a step moves if every rate moves by one standard deviation, in the same direction:

- pipelines: each by the spread of its busiest stage's chip, of which computing varies as ``layers`` do (or ``split``,
  where backwards are split and that is more), and exchanges
  inside TP groups as ``waiting`` or the links do, whichever is more; the pipeline that then ends last counts;
- gradients and parameters, as far as they are exposed: as ``exchange`` or the links do, whichever is more;
- the update: as ``optimizer`` does; always of the worst of the plan's chips and links.

Nine of ten measurements of such rates lie within 1.645 ``D``. The model of schedule and communication has an error of
its own: nine of ten plans that ran under an exact clock were within ``MODEL_ERROR`` of their prediction
(docs/results/testbed.md). The two are independent, so the range is the step less and plus the root of
(1.645 D)^2 + (MODEL_ERROR step)^2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import hypot
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plans import Pipeline, Plan, Stage
from hetero_megatron.plans.program import splits_backward
from hetero_megatron.plans.shares import has_context
from hetero_megatron.predictor.cost.rates import Rates
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.schedule import Costs, Schedule, Timeline, simulate_many

NINE_IN_TEN = 1.645  # standard deviations to each side
MODEL_ERROR = 0.03


def seconds_range(
    step: float, stages: StageCosts, timelines: Sequence[Timeline], parts: Mapping[str, float]
) -> tuple[float, float] | None:
    """(lowest, highest) expected seconds of a step.

    Args:
        timelines: of the plan's pipelines; parts: as in a prediction.

    Returns:
        None where some chip's rates are not measured, or say nothing about their spread.
    """
    rates, ranks = stages.model.rates, stages.network.ranks
    chips = {ranks[r].chip for r in stages.plan.ranks}
    if any("layers" not in rates.chips[chip].spread for chip in chips):
        return None
    groups = {ranks[r].group for r in stages.plan.ranks}
    links = max((link.spread or 0.0 for (a, b, _), link in rates.measured.items() if {a, b} <= groups), default=0.0)
    ends = []
    for pipeline, timeline in zip(stages.plan.pipelines, timelines, strict=True):
        busy = max(timeline.busy)
        stage = pipeline.stages[timeline.busy.index(busy)]
        spread = _stage_spread(stage, pipeline.num_micro_batches, busy, stages, links)
        ends.append((timeline.step_seconds, spread * timeline.step_seconds))
    last = max(end for end, _ in ends)
    moved = (parts["gradients"] + parts["parameters"]) * max(links, _worst(rates, chips, "exchange"))
    moved += parts["optimizer"] * _worst(rates, chips, "optimizer")
    spread_down, spread_up = (
        last - max(end - spread_of for end, spread_of in ends),
        max(end + spread_of for end, spread_of in ends) - last,
    )
    low, high = (hypot(NINE_IN_TEN * (spread + moved), MODEL_ERROR * step) for spread in (spread_down, spread_up))
    return max(0.0, step - low), step + high


def _stage_spread(stage: Stage, micro_batches: int, busy: float, stages: StageCosts, links: float) -> float:
    rates, ranks = stages.model.rates, stages.network.ranks
    chips = {ranks[r].chip for r in stage.ranks}
    seconds = max(stages.computing(stage, unit, t) for unit in stage.units for t in range(unit.tp))
    computing = min(1.0, micro_batches * seconds / busy) if busy else 1.0
    waiting = max(links, _worst(rates, chips, "waiting"))
    layers = max(_worst(rates, chips, family) for family in ("layers", "split")[: 1 + splits_backward(stages.plan)])
    return computing * layers + (1 - computing) * waiting


def _worst(rates: Rates, chips: set[str], family: str) -> float:
    return max(rates.chips[chip].spread.get(family, 0.0) for chip in chips)


Floats = NDArray[np.float64]
REACH, CELLS = 8, 400  # integration range in standard deviations to each side, and number of cells
STEPS = 64  # samples per pipeline: the error of their mean is an eighth of a step's deviation


def late_seconds(plan: Plan, stages: StageCosts, timelines: Sequence[Timeline]) -> float:
    """Mean delay (s) of the last pipeline of a step; exactly 0 where all chips are steady. ``timelines``: of each
    pipeline without jitter; equal ones may be the same object, which is cheaper."""
    if not any(stages.jitter(rank) for rank in plan.ranks):
        return 0.0
    ends_of: dict[int, list[tuple[float, float]]] = {}
    ends: list[tuple[float, float]] = []
    for pipeline, timeline in zip(plan.pipelines, timelines, strict=True):
        if id(timeline) not in ends_of:
            ends_of[id(timeline)] = _ends(pipeline, stages, timeline)
        ends += ends_of[id(timeline)]
    last = max(end for end, _ in ends)
    return last + expected_delay(ends) - max(timeline.step_seconds for timeline in timelines)


def _ends(pipeline: Pipeline, stages: StageCosts, timeline: Timeline) -> list[tuple[float, float]]:
    """(seconds, standard deviation) of the ends of a pipeline's independent parts."""
    units, steady = [_units(stage, stages) for stage in pipeline.stages], timeline.step_seconds
    if len(units) == 1 and not has_context(pipeline.stages[0], stages.plan.seq_length):
        (busy,) = timeline.busy
        return [(steady - busy + share * busy, jitter * (share * busy) ** 0.5) for share, jitter in units[0]]
    seconds, deviation = drawn_steps(timeline.schedule, stages.of(pipeline).costs, units)
    return [(max(seconds, steady), deviation)]  # jitter cannot shorten a step


def _units(stage: Stage, stages: StageCosts) -> list[tuple[float, float]]:
    """(share of the stage's seconds, jitter) of each unit. The ranks of a TP group run in step; their waiting is part
    of the measured exchange times."""
    seconds = [max(stages.computing(stage, unit, t) for t in range(unit.tp)) for unit in stage.units]
    slowest = max(seconds) or 1.0
    return [
        (unit_seconds / slowest, max(stages.jitter(rank) for rank in unit.ranks))
        for unit_seconds, unit in zip(seconds, stage.units)
    ]


def expected_delay(ends: Iterable[tuple[float, float]]) -> float:
    """Mean delay of the last of several independent, normally distributed ends.

    Args:
        ends: (planned seconds, standard deviation) of each.

    Returns:
        E[max(end + deviation x z)] - max(end) in seconds; exactly 0 where nothing varies.
    """
    counts = Counter(ends)
    last, widest = (max(column) for column in zip(*counts))
    if widest == 0.0:
        return 0.0
    cell = 2 * REACH * widest / CELLS
    centres = (np.arange(CELLS) - CELLS // 2 + 0.5) * cell  # centres of the cells, relative to ``last``
    all_ended = np.ones(CELLS)  # probability that all have ended
    for (end, deviation), count in counts.items():
        all_ended *= _done(last + centres - end, deviation) ** count
    return float(cell * np.sum(np.where(centres < 0, -all_ended, 1 - all_ended)))


def drawn_steps(
    schedule: Schedule, costs: Costs, units: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    """(mean, standard deviation) of a pipeline's seconds, from samples with fixed seeds. ``units``: per stage, the
    units that each of its actions waits for: (share of the action's seconds, jitter: standard deviation of one second).
    """
    seconds = simulate_many(schedule, costs, [_vary(stage, s) for s, stage in enumerate(units)])
    return float(seconds.mean()), float(seconds.std(ddof=1))


def _vary(units: Sequence[tuple[float, float]], seed: int) -> Callable[[float], Floats]:
    """Lognormal seconds: never negative, and smooth in the planned seconds, as fits of rates need."""
    shares, jitters = (np.array(column)[:, None] for column in zip(*units))
    drawn = np.random.default_rng(seed)

    def vary(seconds: float) -> Floats:
        planned = shares * seconds
        square = np.log1p(jitters**2 / np.maximum(planned, 1e-12))
        varied = planned * np.exp(square**0.5 * drawn.standard_normal((len(units), STEPS)) - square / 2)
        return np.asarray(varied.max(axis=0))

    return vary


def _done(late: Floats, deviation: float) -> Floats:
    if deviation == 0.0:
        return (late >= 0).astype(float)
    cdf = NormalDist(0.0, deviation).cdf
    return np.array([cdf(x) for x in late.tolist()])
