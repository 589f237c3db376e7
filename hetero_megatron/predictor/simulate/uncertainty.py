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

from collections.abc import Mapping, Sequence
from math import hypot

from hetero_megatron.plan import Stage
from hetero_megatron.plan.program import splits_backward
from hetero_megatron.predictor.cost.rates import Rates
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.schedule import Timeline

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
    least, most = last - max(end - by for end, by in ends), max(end + by for end, by in ends) - last
    low, high = (hypot(NINE_IN_TEN * (by + moved), MODEL_ERROR * step) for by in (least, most))
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
