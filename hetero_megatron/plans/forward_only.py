"""The plan of a second model that only runs forward, beside another one: the same ranks, cut alike. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Interval, Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.plans.canonical import Optimizer as OptimizerPlace
from hetero_megatron.plans.validate import validate

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec


def plan_beside(plan: Plan, spec: ModelSpec, other: ModelSpec, cluster: Cluster | None = None) -> Plan:
    """``plan``, which is of ``spec``, for a model ``other`` that runs forward beside it: micro-batches, shares of
    tensors and tokens are the same, layers and heads in the same proportions. What only training needs is left out;
    weights are whole on each rank, and experts are divided as the plan has it where there are as many.

    Raises:
        UserError: the model cannot be cut so.
    """
    layers, heads = other.num_layers / spec.num_layers, other.num_heads / spec.num_heads
    same_experts = spec.moe is not None and other.moe is not None and spec.moe.num_experts == other.moe.num_experts

    def unit_of(unit: Unit) -> Unit:
        return replace(unit, heads=_scaled(unit.heads, heads))

    def stage_of(stage: Stage) -> Stage:
        return replace(
            stage, layers=tuple(_scaled(run, layers) for run in stage.layers), units=tuple(map(unit_of, stage.units)),
            recompute=Recompute(), optimizer=OptimizerPlace(), kernels=(), dtype=None, weights=None, activations=None,
            experts=stage.experts if same_experts else (),
        )  # fmt: skip

    def pipeline_of(pipeline: Pipeline) -> Pipeline:
        return replace(pipeline, stages=tuple(map(stage_of, pipeline.stages)))

    forward_plan = replace(plan, pipelines=tuple(map(pipeline_of, plan.pipelines)), outer=None)
    try:
        validate(forward_plan, other, cluster)
    except UserError as error:
        problem = f"the plan does not fit it: {error.problem}"
        accepted = "a model that can be cut as the student's plan says, or its log-probabilities in a file"
        raise UserError(problem, field=error.field, value=error.value, accepted=accepted) from None
    return forward_plan


def _scaled(interval: Interval, factor: float) -> Interval:
    return round(interval[0] * factor), round(interval[1] * factor)
