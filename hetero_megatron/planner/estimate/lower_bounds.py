"""Lower bounds on step times: of one template, of all splits of its layers, and of pipelines without layers.

All say what no plan beats under the same rates; the search skips what they rule out. :mod:`certificate` bounds the
whole search space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plan.memory import equal_shares, held_elements
from hetero_megatron.planner.estimate.link_table import LinkTable
from hetero_megatron.planner.estimate.pipeline_score import PipelineScorer
from hetero_megatron.planner.estimate.pipeline_time import Link, Links, closed_form
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate

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


class TemplateBounds:
    """Of templates over one pool."""

    def __init__(self, scorer: PipelineScorer, links: LinkTable) -> None:
        self.scorer, self.links = scorer, links
        self._tails: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def least(self, template: PlanTemplate) -> float:
        """Lower bound on the step of a template, wherever it lies: of each of its pipelines, the closed form over the
        better of the links that each boundary may have, and what follows at least."""
        worst = 0.0
        for part in template.parts:
            shape, stages = part.shape, part.shape.stages
            forward, backward = self.scorer.stage_seconds(shape)
            link = [self._least_link(a, b, shape.micro_batch_size) for a, b in zip(stages, stages[1:])]
            compute = closed_form(forward, backward, link, part.num_micro_batches, template.schedule)
            worst = max(worst, compute + self.after(stages, shape.micro_batch_size, link, template.pipelines))
        return worst

    def _least_link(self, a: StageTemplate, b: StageTemplate, size: int) -> Link:
        places = (True, False) if self.scorer.tables.likely_same_node(a, b) else (False,)
        found = [self.scorer.tables.boundary(a, b, size, near) for near in places]
        return min(there for there, _ in found), min(back for _, back in found)

    def after(self, stages: Sequence[StageTemplate], size: int, links: Links, pipelines: int) -> float:
        """Lower bound on what follows the end of a pipeline with these stages, in any plan of ``pipelines`` pipelines:
        synchronisation over the best link that replicas could have between them, no states to update if others may."""
        after, drain, saved, last = 0.0, 0.0, 0.0, len(stages) - 1
        update = self.update if pipelines > 1 else 0.0
        for s, stage in enumerate(stages):
            reduce, latency, rest = self.tail(stage, pipelines, s == 0, s == last)
            own = self.scorer.stage(stage, size, s == 0, s == last)
            after, update = max(after, exposed(reduce, own.own, stage.layers) + latency - drain), max(update, rest)
            drain += own.own + (links[s][1] if s < last else 0.0)
            saved = max(saved, own.saved)
        return after + update - saved

    def after_pipeline(self, shape: PipelineTemplate, links: Links, pipelines: int) -> float:
        """:meth:`after` for a whole pipeline."""
        return self.after(shape.stages, shape.micro_batch_size, links, pipelines)

    @cached_property
    def update(self) -> float:
        """Seconds in which all chips together update all parameters, however these are divided."""
        costs, chips = self.scorer.costs, [(g.chip, g.chips) for g in self.scorer.pool.groups]
        total = held_elements(costs.model, costs.model.num_layers, True, True, equal_shares(costs.model, 1)[0])

        def most(seconds_: float) -> float:
            left = [(n, chip, seconds_ - costs.chip_rates(chip).step_seconds) for chip, n in chips]
            return sum(n * costs.operators(chip).most_updated(x) for n, chip, x in left if x > 0)

        low, high = 0.0, 1e-6
        while most(high) < total:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if most(middle) >= total else (middle, high)
        return low

    def tail(self, stage: StageTemplate, pipelines: int, embed: bool, head: bool) -> tuple[float, float, float]:
        """(seconds that the stage's gradients travel at least, latency of that, seconds of what follows when all are
        summed), by which :meth:`after` goes."""
        key = (stage.group, stage.tp, stage.dp, stage.layers, stage.offload, pipelines, embed, head)
        if key not in self._tails:
            self._tails[key] = self._find_tail(stage, pipelines, embed, head)
        return self._tails[key]

    def _find_tail(self, stage: StageTemplate, pipelines: int, embed: bool, head: bool) -> tuple[float, float, float]:
        choice = self.scorer.tables.choice(stage, embed, head)
        # Other pipelines may own nearly all states.
        optimizer = self.scorer.costs.optimizer_seconds(choice, math.inf if pipelines > 1 else 1)
        if pipelines * stage.dp == 1 or not stage.layers:
            return 0.0, 0.0, optimizer
        copies, item = pipelines * stage.dp, self.scorer.costs.wide
        held = self.scorer.costs.held_elements(self.scorer.tables.choice(stage, False, False))
        moved = held * (copies - 1) / copies
        # Some may go to copies in the node, the others through its cards, which the TP group shares.
        (inside, a), (outside, b) = (self.links.best(stage.group, near) for near in (True, False))
        if self.scorer.pool.groups[stage.group].per_node <= stage.tp:
            inside = math.inf
        rate = sum(1 / beta if beta else math.inf for beta in (inside, outside * stage.tp) if beta < math.inf)
        wire = moved / rate if rate else 0.0
        return wire * item, min(a, b), optimizer + wire * self.scorer.costs.item + min(a, b)


class SyncBounds:
    """`TemplateBounds.after` of all splits of layers of a pipeline at once."""

    def __init__(self, bounds: TemplateBounds, layers: int) -> None:
        self.bounds, self.scorer, self.layers = bounds, bounds.scorer, layers
        self._rows: dict[tuple[object, ...], Floats] = {}

    def after(
        self, stages: Sequence[StageTemplate], ways: NDArray[np.int32], backward: Floats, links: Links,
        pipelines: int,
    ) -> Floats:  # fmt: skip
        """[ways]. ``ways`` [ways, stages]: layers; ``backward`` [ways, stages]: seconds, messages of the host
        included; ``stages`` without layers."""
        costs, groups, last = self.scorer.costs, self.scorer.pool.groups, len(stages) - 1
        after, drain, most = np.zeros(len(ways)), np.zeros(len(ways)), np.zeros(len(ways))
        update = np.full(len(ways), self.bounds.update if pipelines > 1 else 0.0)
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
            made = [replace(stage, layers=n) for n in range(self.layers + 1)]
            rows = [
                (*self.bounds.tail(x, pipelines, embed, head), self.scorer.saved_seconds(x, embed, head)) for x in made
            ]
            self._rows[key] = np.array(rows).T
        return self._rows[key]


def exposed(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a gradient reduction after the last backward of its stage has ended: a layer's gradients travel while
    the layers before it are still in backward; those of the first layer cannot."""
    return max(reduce - backward, reduce / max(1, layers))
