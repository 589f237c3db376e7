"""Lower bounds of many pipelines at once, for the complete enumeration: most of what it lists is ruled out by these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_time import Links
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.template.plan_template import StageTemplate

Floats = NDArray[np.float64]
LineUnder = tuple[float, float]  # seconds of a stage without layers, and the least that each layer adds


def line_under(seconds: Floats) -> LineUnder:
    """The highest line through the first entry that is nowhere above ``seconds`` (by layers; inf: does not fit)."""
    fits = np.flatnonzero(np.isfinite(seconds[1:])) + 1
    if not np.isfinite(seconds[0]):
        return math.inf, math.inf
    slope = float(((seconds[fits] - seconds[0]) / fits).min()) if len(fits) else math.inf
    return float(seconds[0]), max(slope, 1e-300)


def floor(lines: Sequence[LineUnder], layers: int, links: Links, micro_batches: int) -> float:
    """No split of the layers over stages of these lines takes less, in any schedule: one micro-batch goes through all
    stages, and the slowest stage does all of them, in the least time in which all stages together hold all layers."""
    ends = sum(own for own, _ in lines)
    each = min(slope for _, slope in lines)
    if math.isinf(ends) or math.isinf(each):
        return math.inf
    rate = sum(1 / slope for _, slope in lines)
    slowest = (layers + sum(own / slope for own, slope in lines)) / rate
    return max(ends + layers * each + sum(map(sum, links)), micro_batches * slowest)


class SyncBounds:
    """:meth:`Evaluator.least_after` of all splits of layers of a pipeline at once."""

    def __init__(self, evaluator: TemplateScorer, layers: int) -> None:
        self.evaluator, self.layers = evaluator, layers
        self._rows: dict[tuple[object, ...], Floats] = {}

    def after(
        self, stages: Sequence[StageTemplate], ways: NDArray[np.int32], backward: Floats, links: Links,
        pipelines: int,
    ) -> Floats:  # fmt: skip
        """[ways]. ``ways`` [ways, stages]: layers; ``backward`` [ways, stages]: seconds, messages of the host
        included; ``stages`` without layers."""
        costs, groups, last = self.evaluator.costs, self.evaluator.pool.groups, len(stages) - 1
        after, drain, most = np.zeros(len(ways)), np.zeros(len(ways)), np.zeros(len(ways))
        update = np.full(len(ways), self.evaluator.least_update if pipelines > 1 else 0.0)
        for s, stage in enumerate(stages):
            count = ways[:, s]
            reduce, latency, rest, saved = self._of(stage, pipelines, s == 0, s == last)[:, count]
            own = backward[:, s] - costs.message_seconds(groups[stage.group].chip) * ((s != 0) + (s != last))
            shown = np.maximum(reduce - own, reduce / np.maximum(1, count)) + latency
            after, update = np.maximum(after, shown - drain), np.maximum(update, rest)
            drain, most = drain + own + (links[s][1] if s < last else 0.0), np.maximum(most, saved)
        return np.asarray(after + update - most)

    def _of(self, stage: StageTemplate, pipelines: int, embed: bool, head: bool) -> Floats:
        """[4, layers]: seconds of gradients, their latency, of what follows; what the first backward saves."""
        key = (stage.group, stage.tp, stage.dp, pipelines, embed, head)
        if key not in self._rows:
            find = self.evaluator
            made = [replace(stage, layers=n) for n in range(self.layers + 1)]
            rows = [(*find.least_tail(x, pipelines, embed, head), find.saved_seconds(x, embed, head)) for x in made]
            self._rows[key] = np.array(rows).T
        return self._rows[key]
