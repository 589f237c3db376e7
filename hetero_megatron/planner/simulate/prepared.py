"""A compiled plan with what all its predictions have in common: fits predict the same plans with many rates."""

from __future__ import annotations

from hetero_megatron.plan import Pipeline
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.link_model import LinkModel
from hetero_megatron.planner.simulate.stage_cost import StageTransfers
from hetero_megatron.planner.simulate.sync_structure import SyncStructure
from hetero_megatron.schedule import Schedule, lowered


class PreparedPlan:
    """Independent of rates; of one cluster at a time.

    Attributes:
        transfers: at boundaries and in context groups, filled as they are priced.
    """

    def __init__(self, compiled: CompiledPlan) -> None:
        self.compiled, self.plan = compiled, compiled.plan
        self.transfers = StageTransfers()
        self._schedules: dict[tuple[int, int, int], Schedule] = {}
        self._structure: SyncStructure | None = None

    def schedule(self, pipeline: Pipeline) -> Schedule:
        """Of a pipeline of the plan, up to the last backward."""
        shape = (len(pipeline.stages), pipeline.num_micro_batches, pipeline.chunks)
        if shape not in self._schedules:
            self._schedules[shape] = lowered(self.plan.schedule, *shape)
        return self._schedules[shape]

    def structure(self, costs: CostModel, network: LinkModel) -> SyncStructure:
        """Participants and element counts of every exchange of gradients."""
        if self._structure is None or not self._structure.serves(costs):
            self._structure = SyncStructure(self.plan, costs, network, self.compiled.buckets)
        return self._structure
