"""Seconds of one pipeline of a template: stages, transfers between them, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.planner.estimate.pipeline_time import Link, seconds
from hetero_megatron.planner.estimate.stage_table import StageTables
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, StageTemplate
from hetero_megatron.utils.cached_method import cached_method

EXACT = 400_000  # micro-batches x stages of one pipeline above which its time is extrapolated


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in a stage.

    Attributes:
        forward, backward: including the host's time for sends and receives.
        own: backward without messages; layer: backward of one layer; plain: backward without the embedding.
        saved: by how much the first backward of a step is shorter (it writes gradients, the others add to them).
    """

    forward: float
    backward: float
    own: float
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
        messages = costs.chip_rates(choice.chip).message_seconds * ((not embed) + (not head))
        own = costs.backward_seconds(choice, size)
        bare, plain = (costs.backward_seconds(self.tables.choice(stage, False, end), size) for end in (False, head))
        layer = (bare - costs.chip_rates(choice.chip).action_seconds) / stage.layers if stage.layers else 0.0
        saved = costs.memory.trained(*choice.cut) * costs.item * costs.chip_rates(choice.chip).accumulate_beta
        return StageSeconds(costs.forward_seconds(choice, size) + messages, own + messages, own, layer, plain, saved)

    def saved_seconds(self, stage: StageTemplate, embed: bool, head: bool) -> float:
        """By how much the first backward of a step is shorter than the others."""
        return self.stage(stage, stage.dp, embed, head).saved

    def _each(self, shape: PipelineTemplate) -> list[StageSeconds]:
        last = len(shape.stages) - 1
        return [self.stage(x, shape.micro_batch_size, s == 0, s == last) for s, x in enumerate(shape.stages)]

    def stage_seconds(self, shape: PipelineTemplate) -> tuple[list[float], list[float]]:
        """(forward, backward) of one micro-batch per stage, including the host's message time."""
        found = self._each(shape)
        return [x.forward for x in found], [x.backward for x in found]

    def links(self, shape: PipelineTemplate, sharing: Sequence[int] | None = None) -> list[Link]:
        """Seconds of (forward, backward) transfers over each stage boundary. ``sharing``: per boundary, 0: inside one
        node, else how many pipelines share the node's network cards; None: as likely placed."""
        found = []
        for s, (a, b) in enumerate(zip(shape.stages, shape.stages[1:])):
            count = sharing[s] if sharing is not None else int(not self.tables.likely_same_node(a, b))
            found.append(self.tables.boundary(a, b, shape.micro_batch_size, count == 0, max(1, count)))
        return found

    @cached_method
    def pipeline_seconds(
        self, shape: PipelineTemplate, micro_batches: int, schedule: str, sharing: tuple[int, ...] | None = None
    ) -> float:
        """``sharing``: as in :meth:`links`."""
        forward, backward = self.stage_seconds(shape)
        link = self.links(shape, sharing)
        if len(forward) * micro_batches <= EXACT:
            return seconds(forward, backward, link, micro_batches, schedule)
        few = max(8 * len(forward), EXACT // len(forward) // 2)
        a, b = (seconds(forward, backward, link, n, schedule) for n in (few, 2 * few))
        return b + (b - a) / few * (micro_batches - 2 * few)
