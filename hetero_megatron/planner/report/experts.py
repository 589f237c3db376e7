"""What a plan's division of experts gains over equal experts, and its replicas over each expert on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero_megatron.planner.search.expert_stages import with_equal_experts
from hetero_megatron.planner.search.incumbent import SimulatedPlan
from hetero_megatron.plans.experts import replicated_experts
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.report.prediction import format_seconds
from hetero_megatron.predictor.simulate.step import predict


@dataclass(frozen=True)
class ExpertGain:
    """Attributes:
    counts: experts per rank of the first stage that divides them.
    equal_seconds: of a step of the same plan with equal experts; problem: why those do not fit, else empty.
    replicated: how many experts several ranks of a stage hold, in the stage with most; once_seconds: of a step of the
        same plan with each on one rank, divided by speed; None where none is replicated.
    """

    counts: tuple[int, ...]
    step_seconds: float
    equal_seconds: float
    problem: str = ""
    replicated: int = 0
    once_seconds: float | None = None

    @property
    def over_once(self) -> float | None:
        """How many times as fast as without replicas; None where there are none."""
        return None if self.once_seconds is None else self.once_seconds / self.step_seconds

    @property
    def over_equal(self) -> float:
        """How many times as fast as equal experts."""
        return self.equal_seconds / self.step_seconds

    def __str__(self) -> str:
        counts = f"{','.join(map(str, self.counts))} per rank"
        if self.over_once is not None and self.once_seconds is not None:
            once = format_seconds(self.once_seconds)
            counts += f", {self.replicated} replicated ({self.over_once:.2f} x as fast as each on one rank, {once})"
        if len(set(self.counts)) == 1 and not self.replicated:
            return f"{counts}, all alike"
        if self.problem:
            return f"{counts}; equal experts do not fit: {self.problem}"
        equal = format_seconds(self.equal_seconds)
        return f"{counts}, {self.over_equal:.2f} x as fast as the same plan with equal experts ({equal})"

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": list(self.counts), "equal_step_seconds": self.equal_seconds, "over_equal": self.over_equal,
            "equal_does_not_fit": self.problem or None, "replicated": self.replicated,
            "unreplicated_step_seconds": self.once_seconds, "over_unreplicated": self.over_once,
        }  # fmt: skip


def expert_gain(best: SimulatedPlan, costs: CostModel) -> ExpertGain | None:
    """Of a model with experts; None for a plan that divides none."""
    moe = costs.model.moe
    assert moe is not None
    stages = [stage for pipeline in best.plan.pipelines for stage in pipeline.stages if stage.experts]
    if not stages:
        return None
    counts = tuple(m.experts[1] - m.experts[0] for group in stages[0].experts for m in group.members)
    equal_division = predict(
        with_equal_experts(best.plan, moe.num_experts), costs.model, costs.cluster, costs.dtype, costs
    )
    problem = str(max(equal_division.over, key=lambda o: o.over)) if equal_division.over else ""
    replicated = max(len(replicated_experts(stage)) for stage in stages)
    return ExpertGain(counts, best.step_seconds, equal_division.step_seconds, problem, replicated, best.once_seconds)
