"""Lower bounds on step times: of one template, of all splits of its layers, and of pipelines without layers.

No plan is faster under the same rates; the search skips what they rule out. :mod:`certificate` bounds the whole search
space. The *sync tail* of a pipeline is the time from the end of its last backward until its parameters are updated:
gradient reduction, optimizer, all-gather of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_score import PipelineScorer
from hetero_megatron.planner.estimate.pipeline_time import Link, Links, closed_form
from hetero_megatron.planner.estimate.sync_segments import LinkTable
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate
from hetero_megatron.utils.cached_method import cached_by

Floats = NDArray[np.float64]


class TemplateBounds:
    """Lower bounds on templates over one pool."""

    def __init__(self, scorer: PipelineScorer, links: LinkTable) -> None:
        self.scorer, self.links = scorer, links

    def lower_bound(self, template: PlanTemplate) -> float:
        """Lower bound (s) on the step of a template, wherever it is placed: per pipeline, the closed form over the
        fastest links that each boundary could have, plus the sync tail."""
        slowest = 0.0
        for part in template.parts:
            shape, stages = part.shape, part.shape.stages
            forward, backward = self.scorer.least_stage_seconds(shape)
            link = [self._fastest_link(a, b, shape.micro_batch_size) for a, b in zip(stages, stages[1:])]
            compute = closed_form(forward, backward, link, part.num_micro_batches, template.schedule)
            slowest = max(slowest, compute + self.sync_tail(shape, link, template.pipelines))
        return slowest

    def _fastest_link(self, a: StageTemplate, b: StageTemplate, size: int) -> Link:
        places = (True, False) if self.scorer.tables.likely_same_node(a, b) else (False,)
        boundaries = [self.scorer.tables.boundary(a, b, size, same_node) for same_node in places]
        return min(onward for onward, _ in boundaries), min(back for _, back in boundaries)

    def sync_tail(self, shape: PipelineTemplate, links: Links, pipelines: int) -> float:
        """Lower bound (s) on the sync tail of a pipeline, in any plan of ``pipelines`` pipelines:
        replicas have the best possible links, and other pipelines may own all optimizer states."""
        exposed_seconds, drain, saved, last = 0.0, 0.0, 0.0, len(shape.stages) - 1
        update = self.update_seconds if pipelines > 1 else 0.0
        for s, stage in enumerate(shape.stages):
            reduce, latency, optimizer = self.stage_sync_tail(stage, pipelines, s == 0, s == last)
            priced = self.scorer.stage(stage, shape.micro_batch_size, s == 0, s == last)
            exposed_seconds, update = (
                max(exposed_seconds, exposed(reduce, priced.backward, stage.layers) + latency - drain),
                max(update, optimizer),
            )
            drain += priced.backward + (links[s][1] if s < last else 0.0)
            saved = max(saved, priced.saved)
        return exposed_seconds + update - saved

    @cached_property
    def update_seconds(self) -> float:
        """Least seconds in which all chips together update all parameters, however the states are divided."""
        costs, chips = self.scorer.costs, [(g.chip, g.chips) for g in self.scorer.pool.groups]
        total = costs.memory.trained(1, costs.model.num_layers, True, True)

        def most(seconds_: float) -> float:
            computing = [(n, chip, seconds_ - costs.chip_rates(chip).step_seconds) for chip, n in chips]
            return sum(n * costs.operators(chip).most_updated(x) for n, chip, x in computing if x > 0)

        low, high = 0.0, 1e-6
        while most(high) < total:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if most(middle) >= total else (middle, high)
        return low

    @cached_by(lambda stage, *more: (stage.group, stage.tp, stage.dp, stage.layers, stage.offload, *more))
    def stage_sync_tail(
        self, stage: StageTemplate, pipelines: int, embed: bool, head: bool
    ) -> tuple[float, float, float]:
        """(least seconds that the stage's gradients travel, latency in seconds, least seconds from the end of reduction
        to updated parameters)."""
        choice = self.scorer.tables.choice(stage, embed, head)
        # Other pipelines may own nearly all states.
        optimizer = self.scorer.costs.optimizer_seconds(choice, math.inf if pipelines > 1 else 1)
        if pipelines * stage.dp == 1 or not stage.layers:
            return 0.0, 0.0, optimizer
        copies, item = pipelines * stage.dp, self.scorer.costs.wide
        elements = self.scorer.costs.memory.trained(stage.tp, stage.layers, False, False)
        moved = elements * (copies - 1) / copies
        # Some may go to copies in the node, the others through its cards, which the TP group shares.
        (inside, a), (outside, b) = (self.links.best(stage.group, same_node) for same_node in (True, False))
        per_node = self.scorer.pool.groups[stage.group].per_node
        if per_node <= stage.tp:
            inside = math.inf
        sharing = min(stage.tp, per_node)
        rate = sum(1 / beta if beta else math.inf for beta in (inside, outside * sharing) if beta < math.inf)
        wire = moved / rate if rate else 0.0
        return wire * item, min(a, b), optimizer + wire * self.scorer.costs.item + min(a, b)


def exposed(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a gradient reduction that are not hidden behind the stage's last backward: a layer's gradients travel
    during the backward of the layers before it, those of the first layer cannot."""
    return max(reduce - backward, reduce / max(1, layers))

ASSUMPTIONS = (
    "all plans; only products of layers and attention take time, at each chip's best rate",
    "rates as given, chips steady (no jitter)",
)


@dataclass(frozen=True)
class LowerBound:
    """No plan has a shorter step than ``seconds``; ``method``: what it is computed from, "work"."""

    seconds: float
    method: str = "work"

    def reached(self, step_seconds: float) -> float:
        """Share of the tokens per second of the bound that a plan reaches, at most 1."""
        return min(1.0, self.seconds / step_seconds)

    def gap(self, step_seconds: float) -> float:
        """Optimality gap of a plan: ``step_seconds / seconds - 1`` (inf without a bound)."""
        return step_seconds / self.seconds - 1 if self.seconds > 0 else math.inf
