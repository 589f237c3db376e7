"""What unsteady chips add to a step: who needs what another makes waits for it, and the step ends when the unluckiest
of all do.

One second's luck is not the next one's: deviations grow with the root of time, however it is cut into actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plan import Pipeline, Plan, Stage
from hetero_megatron.plan.context_plan import has_context
from hetero_megatron.planner.simulate.stage_cost import StageCosts
from hetero_megatron.schedule import Costs, Schedule, Timeline, simulate_many

Floats = NDArray[np.float64]
REACH, CELLS = 8, 400  # deviations to each side that are integrated over, and in how many pieces
STEPS = 64  # of a pipeline that are drawn: their mean is off by an eighth of one's deviation


def late_seconds(plan: Plan, stages: StageCosts, timelines: Sequence[Timeline]) -> float:
    """How much later than planned the last pipeline of a step is done on average; exactly 0 where all chips are steady.

    Args:
        timelines: of each pipeline as planned; those of equal ones may be the same object, which is cheaper.
    """
    if not any(stages.jitter(rank) for rank in plan.ranks):
        return 0.0
    known: dict[int, list[tuple[float, float]]] = {}
    ends: list[tuple[float, float]] = []
    for pipeline, timeline in zip(plan.pipelines, timelines, strict=True):
        if id(timeline) not in known:
            known[id(timeline)] = _ends(pipeline, stages, timeline)
        ends += known[id(timeline)]
    last = max(end for end, _ in ends)
    return last + expected_delay(ends) - max(timeline.step_seconds for timeline in timelines)


def _ends(pipeline: Pipeline, stages: StageCosts, timeline: Timeline) -> list[tuple[float, float]]:
    """(seconds, standard deviation) of the ends of a pipeline that do not wait for one another."""
    units, steady = [_units(stage, stages) for stage in pipeline.stages], timeline.step_seconds
    if len(units) == 1 and not has_context(pipeline.stages[0], stages.plan.seq_length):
        (busy,) = timeline.busy
        return [(steady - busy + share * busy, jitter * (share * busy) ** 0.5) for share, jitter in units[0]]
    seconds, deviation = drawn_steps(timeline.schedule, stages.of(pipeline).costs, units)
    return [(max(seconds, steady), deviation)]  # waiting never makes a step shorter


def _units(stage: Stage, stages: StageCosts) -> list[tuple[float, float]]:
    """(share of the stage's seconds, jitter) of each of its units. A TP group marches in step, and what its ranks wait
    for one another is in the seconds of their exchanges."""
    seconds = [max(stages.computing(stage, unit, t) for t in range(unit.tp)) for unit in stage.units]
    slowest = max(seconds) or 1.0
    return [(own / slowest, max(stages.jitter(rank) for rank in unit.ranks)) for own, unit in zip(seconds, stage.units)]


def expected_delay(ends: Iterable[tuple[float, float]]) -> float:
    """How much later than planned the last of several is done on average.

    Args:
        ends: (planned seconds, standard deviation) of each; they vary independently and normally.

    Returns:
        E[max(end + deviation x z)] - max(end), seconds; exactly 0 where nothing varies.
    """
    counts = Counter(ends)
    last, widest = (max(column) for column in zip(*counts))
    if widest == 0.0:
        return 0.0
    cell = 2 * REACH * widest / CELLS
    at = (np.arange(CELLS) - CELLS // 2 + 0.5) * cell  # the middle of each, after ``last``
    done = np.ones(CELLS)  # the probability that all are
    for (end, deviation), count in counts.items():
        done *= _done(last + at - end, deviation) ** count
    return float(cell * np.sum(np.where(at < 0, -done, 1 - done)))


def drawn_steps(
    schedule: Schedule, costs: Costs, units: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    """Mean and standard deviation of a pipeline's seconds. Steps are drawn, always the same ones.

    Args:
        units: of each stage, those that each of its actions waits for: (share of the action's seconds that they take,
            jitter: the standard deviation of a second).
    """
    seconds = simulate_many(schedule, costs, [_vary(stage, s) for s, stage in enumerate(units)])
    return float(seconds.mean()), float(seconds.std(ddof=1))


def _vary(units: Sequence[tuple[float, float]], seed: int) -> Callable[[float], Floats]:
    """Lognormal seconds, which are never negative and change smoothly with what is planned, as fits of rates want."""
    shares, jitters = (np.array(column)[:, None] for column in zip(*units))
    drawn = np.random.default_rng(seed)

    def vary(seconds: float) -> Floats:
        planned = shares * seconds
        square = np.log1p(jitters**2 / np.maximum(planned, 1e-12))
        found = planned * np.exp(square**0.5 * drawn.standard_normal((len(units), STEPS)) - square / 2)
        return np.asarray(found.max(axis=0))

    return vary


def _done(late: Floats, deviation: float) -> Floats:
    if deviation == 0.0:
        return (late >= 0).astype(float)
    cdf = NormalDist(0.0, deviation).cdf
    return np.array([cdf(x) for x in late.tolist()])
