"""Seconds of one pipeline of a template: stages, transfers between them, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.planner.estimate.pipeline_time import Link, seconds
from hetero_megatron.planner.estimate.stage_tables import StageTables
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, StageTemplate
from hetero_megatron.utils.cached_method import cached_method

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
