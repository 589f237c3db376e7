"""What a plan's division of experts gains over equal experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero_megatron.plan import Plan
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.report.prediction import format_seconds
from hetero_megatron.planner.search.expert_stages import with_equal_experts
from hetero_megatron.planner.search.incumbent import JudgedPlan
from hetero_megatron.planner.simulate.step import predict


@dataclass(frozen=True)
class ExpertGain:
    """Attributes:
    counts: experts per rank of the first stage that divides them.
    equal_seconds: of a step of the same plan with equal experts; problem: why those do not fit, else empty.
    """

    counts: tuple[int, ...]
    step_seconds: float
    equal_seconds: float
    problem: str = ""

    @property
    def over_equal(self) -> float:
        """How many times as fast as equal experts."""
        return self.equal_seconds / self.step_seconds

    def __str__(self) -> str:
        counts = ",".join(map(str, self.counts))
        if len(set(self.counts)) == 1:
            return f"{counts} per rank, all alike"
        if self.problem:
            return f"{counts} per rank; equal experts do not fit: {self.problem}"
        equal = format_seconds(self.equal_seconds)
        return f"{counts} per rank, {self.over_equal:.2f} x as fast as the same plan with equal experts ({equal})"

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": list(self.counts), "equal_step_seconds": self.equal_seconds, "over_equal": self.over_equal,
            "equal_does_not_fit": self.problem or None,
        }  # fmt: skip


def expert_gain(best: JudgedPlan, costs: CostModel) -> ExpertGain | None:
    """None for a plan that divides no experts."""
    moe, counts = costs.model.moe, _counts(best.plan)
    if moe is None or not counts:
        return None
    found = predict(with_equal_experts(best.plan, moe.num_experts), costs.model, costs.cluster, costs.dtype, costs)
    problem = str(max(found.over, key=lambda o: o.over)) if found.over else ""
    return ExpertGain(counts, best.step_seconds, found.step_seconds, problem)


def _counts(plan: Plan) -> tuple[int, ...]:
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages if stage.experts)
    first = next(stages, None)
    return () if first is None else tuple(
        m.experts[1] - m.experts[0] for group in first.experts for m in group.members
    )  # fmt: skip
