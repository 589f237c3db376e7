"""A compiled plan with everything that its predictions under different rates have in common."""

from __future__ import annotations

from hetero_megatron.plan import Pipeline, Stage
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.plan.program import pipeline_schedule
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.ring_traffic import LayerTraffic
from hetero_megatron.predictor.simulate.sync_structure import SyncStructure
from hetero_megatron.schedule import Schedule

Piece = tuple[int, int, int]  # local index upstream, local index downstream, elements


class PreparedPlan:
    """Rate-independent data of a plan on one cluster.

    Attributes:
        boundaries: caches of what moves at stage boundaries; context: and in context groups; filled on first use.
    """

    def __init__(self, compiled: CompiledPlan) -> None:
        self.compiled, self.plan = compiled, compiled.plan
        self.boundaries: dict[object, tuple[Piece, ...]] = {}
        self.context: dict[Stage, list[LayerTraffic]] = {}
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._structure: SyncStructure | None = None

    def schedule(self, pipeline: Pipeline) -> Schedule:
        """The lowered schedule of a pipeline."""
        shape = (len(pipeline.stages), pipeline.num_micro_batches, pipeline.chunks, pipeline.orders, pipeline.in_flight)
        if shape not in self._schedules:
            self._schedules[shape] = pipeline_schedule(self.plan, pipeline)
        return self._schedules[shape]

    def structure(self, costs: CostModel) -> SyncStructure:
        """Participants and element counts of every gradient exchange."""
        if self._structure is None or not self._structure.serves(costs):
            self._structure = SyncStructure(self.plan, costs, self.compiled.buckets)
        return self._structure
