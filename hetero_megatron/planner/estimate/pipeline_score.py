"""Seconds of one pipeline of a template: stages, transfers between them, and the schedule; and lower bounds on them, by
which the search skips templates.

The *sync tail* of a pipeline is the time from the end of its last backward until its parameters are updated: gradient
reduction, optimizer, all-gather of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hetero_megatron.planner.estimate.pipeline_time import Link, Links, closed_form, seconds
from hetero_megatron.planner.estimate.stage_tables import StageTables
from hetero_megatron.planner.estimate.sync_segments import LinkTable
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate
from hetero_megatron.utils.cached_method import cached_by, cached_method

EXACT = 400_000  # micro-batches x stages of one pipeline above which its time is extrapolated


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in a stage, without messages to other stages.

    Attributes:
        layer: backward of one layer; plain: backward without the embedding.
        saved: by how much the first backward of a step is shorter (it writes gradients, the others add to them).
    """

    forward: float
    backward: float
    layer: float
    plain: float
    saved: float


class PipelineScorer:
    """Times pipelines over one pool; results are cached by stage and by pipeline."""

    def __init__(self, tables: StageTables, pool: DevicePool) -> None:
        self.tables, self.pool, self.costs = tables, pool, tables.costs

    @cached_method
    def stage(self, stage: StageTemplate, size: int, embed: bool, head: bool) -> StageSeconds:
        """Of one micro-batch of ``size`` sequences; ``embed``, ``head``: the stage has them."""
        costs = self.costs
        choice = self.tables.choice(stage, embed, head)
        bare, plain = (costs.backward_seconds(self.tables.choice(stage, False, end), size) for end in (False, head))
        layer = (bare - costs.chip_rates(choice.chip).action_seconds) / stage.layers if stage.layers else 0.0
        saved = costs.first_backward_saved(choice.chip, costs.memory.trained(*choice.cut))
        seconds_ = costs.forward_seconds(choice, size), costs.backward_seconds(choice, size)
        return StageSeconds(*seconds_, layer, plain, saved)

    def _each(self, shape: PipelineTemplate) -> list[StageSeconds]:
        last = len(shape.stages) - 1
        return [self.stage(x, shape.micro_batch_size, s == 0, s == last) for s, x in enumerate(shape.stages)]

    def stage_seconds(
        self, shape: PipelineTemplate, sharing: Sequence[int] | None = None
    ) -> tuple[list[float], list[float]]:
        """(forward, backward) of one micro-batch per stage, including the host's message time; ``sharing``: as in
        :meth:`links`."""
        messages = [sum(row) for row in self.messages(shape, sharing)]
        priced = list(zip(self._each(shape), messages, strict=True))
        return [x.forward + host for x, host in priced], [x.backward + host for x, host in priced]

    def least_stage_seconds(self, shape: PipelineTemplate) -> tuple[list[float], list[float]]:
        """The same wherever the stages are placed, at least."""
        last, links = len(shape.stages) - 1, self.costs.links
        hosts = [links.least_message(self.pool.groups[x.group].home) for x in shape.stages]
        rows = [(x, host * ((s > 0) + (s < last))) for s, (x, host) in enumerate(zip(self._each(shape), hosts))]
        return [x.forward + host for x, host in rows], [x.backward + host for x, host in rows]

    def messages(self, shape: PipelineTemplate, sharing: Sequence[int] | None = None) -> list[tuple[float, float]]:
        """Per stage, seconds that its hosts spend on a micro-batch's messages in one direction: to or from the stage
        before, and the one after; ``sharing``: as in :meth:`links`."""
        pairs = zip(self._sharing(shape, sharing), shape.stages, shape.stages[1:])
        boundaries = [self.tables.message_seconds(a, b, count == 0) for count, a, b in pairs]
        return [*zip([0.0, *(late for _, late in boundaries)], [*(early for early, _ in boundaries), 0.0])]

    def links(self, shape: PipelineTemplate, sharing: Sequence[int] | None = None) -> list[Link]:
        """Seconds of (forward, backward) transfers over each stage boundary. ``sharing``: per boundary, 0: inside one
        node, else how many pipelines share the node's network cards; None: as likely placed."""
        pairs, size = zip(self._sharing(shape, sharing), shape.stages, shape.stages[1:]), shape.micro_batch_size
        return [self.tables.boundary(a, b, size, count == 0, max(1, count)) for count, a, b in pairs]

    def _sharing(self, shape: PipelineTemplate, sharing: Sequence[int] | None) -> Sequence[int]:
        if sharing is not None:
            return sharing
        return [int(not self.tables.likely_same_node(a, b)) for a, b in zip(shape.stages, shape.stages[1:])]

    @cached_method
    def pipeline_seconds(
        self, shape: PipelineTemplate, micro_batches: int, schedule: str, sharing: tuple[int, ...] | None = None
    ) -> float:
        """``sharing``: as in :meth:`links`."""
        forward, backward = self.stage_seconds(shape, sharing)
        link = self.links(shape, sharing)
        if len(forward) * micro_batches <= EXACT:
            return seconds(forward, backward, link, micro_batches, schedule)
        few = max(8 * len(forward), EXACT // len(forward) // 2)
        a, b = (seconds(forward, backward, link, n, schedule) for n in (few, 2 * few))
        return b + (b - a) / few * (micro_batches - 2 * few)


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
        until the next step can begin)."""
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
        if not self.scorer.costs.options.gather_ahead:
            optimizer += wire * self.scorer.costs.item + min(a, b)
        return wire * item, min(a, b), optimizer


def exposed(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a gradient reduction that are not hidden behind the stage's last backward: a layer's gradients travel
    during the backward of the layers before it, those of the first layer cannot."""
    return max(reduce - backward, reduce / max(1, layers))
