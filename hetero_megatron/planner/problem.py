"""The planner's input: model, cluster, batch and sequence length, and the search space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.plans.memory.of_plan import cannot_offload
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.spec import ModelSpec


@dataclass(frozen=True)
class SearchOptions:
    """Args:
        dtype: of weights and activations.
        time_limit: seconds after which the best plan found so far is returned; None: no limit.
        work: up to 64 chips, what a search that has a plan may do in all without a time limit, in actions of schedules
            (:class:`SearchWork`); at least ``LEAST_WORK`` of it for further schedules.
        top: number of best templates that are timed by the step simulator.
        space: the choices that plans may make.
        costs: assumptions of the cost model.
        seed: of graph partitioning, the only randomised part."""

    dtype: str = "bf16"
    time_limit: float | None = None
    work: float = 1_200_000
    top: int = 6
    space: SearchSpace = SearchSpace()
    costs: CostOptions = CostOptions()
    seed: int = 0


DEFAULTS = SearchOptions()


@dataclass(frozen=True)
class PlanningProblem:
    """One question to the planner.

    Args:
        seq_length: tokens per sequence.
        global_batch_size: sequences per optimizer step.
    """

    model: ModelSpec
    cluster: Cluster
    seq_length: int
    global_batch_size: int
    options: SearchOptions = DEFAULTS

    @property
    def space(self) -> SearchSpace:
        return self.options.space

    @property
    def dtype(self) -> str:
        return self.options.dtype

    def on(self, cluster: Cluster) -> PlanningProblem:
        return replace(self, cluster=cluster)

    def with_batch(self, global_batch_size: int) -> PlanningProblem:
        return replace(self, global_batch_size=global_batch_size)

    def with_space(self, **changes: Any) -> PlanningProblem:
        """The same problem with other choices; ``changes``: fields of :class:`SearchSpace`."""
        return replace(self, options=replace(self.options, space=replace(self.space, **changes)))

    def with_margin(self, margin: float) -> PlanningProblem:
        """The same problem with another share of device memory kept free."""
        return replace(self, options=replace(self.options, costs=replace(self.options.costs, margin=margin)))

    def without_fp8(self) -> PlanningProblem:
        """The same problem with all products in the dtype of the run."""
        return replace(self, options=replace(self.options, costs=replace(self.options.costs, fp8=None)))

    @property
    def can_offload(self) -> bool:
        """Whether the runtime can keep this optimizer in host memory."""
        return cannot_offload(self.options.costs.moments, self.dtype, self.options.costs.muon) is None

    def activations_away(self) -> frozenset[str]:
        """Chip types whose stages may have activations in host memory."""
        return frozenset() if self.model.mtp_layers else self.space.activations_away(self.cluster.chips)

    def check(self) -> None:
        """Raise UserError for sequence lengths, batch sizes and offload settings that no plan can have."""
        model, batch, sizes = self.model, self.global_batch_size, self.space.micro_batch_sizes
        if not 1 <= self.seq_length <= model.max_position_embeddings:
            raise UserError(
                f"the model has {model.max_position_embeddings} positions", field="--seq-length", value=self.seq_length,
                accepted=f"1 to {model.max_position_embeddings}",
            )  # fmt: skip
        ways, equal = ("auto", "always", "never"), ("no", "layers", "copies")
        divided = ("auto", "equal", "never")
        for name, values in (("context", ways), ("offload", ways), ("offload_activations", ways),
                             ("more_schedules", ways), ("equal_pipelines", equal), ("weights", divided)):  # fmt: skip
            if (value := getattr(self.space, name)) not in values:
                raise UserError("unknown value", field=name, value=value, accepted=", ".join(values))
        problem = cannot_offload(self.options.costs.moments, self.dtype, self.options.costs.muon)
        if self.space.offload == "always" and problem is not None:
            raise UserError(problem[0], field="--offload", value="always", accepted="auto, never")
        if self.space.offload_activations == "always" and self.space.recompute is not None:
            raise UserError("it is looked for in place of recompute, which is given", field="--offload-activations",
                            value="always", accepted="auto, never, or no --recompute")  # fmt: skip
        if self.space.offload_activations == "always" and model.mtp_layers:
            raise UserError("not built beside modules that predict further tokens", field="--offload-activations",
                            value="always", accepted="auto or never, or --mtp-num-layers 0")  # fmt: skip
        if batch < 1:
            raise UserError("too small", field="--global-batch-size", value=batch, accepted="an integer >= 1")
        if sizes is not None and len(sizes) == 1 and batch % sizes[0]:
            size = sizes[0]
            lower = batch // size * size
            divisible = f"{lower} or {lower + size}" if lower else str(size)
            raise UserError(
                f"cannot be divided into micro-batches of {size} sequences", field="--global-batch-size", value=batch,
                accepted=f"{divisible}, or --micro-batch-size 1",
            )  # fmt: skip
