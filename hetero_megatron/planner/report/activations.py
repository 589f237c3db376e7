"""What the report says of activations in host memory: what they need and save, what recompute would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero_megatron.cluster import format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import SimulatedPlan
from hetero_megatron.plans import Plan, Stage
from hetero_megatron.plans.canonical import Pipeline, Recompute
from hetero_megatron.plans.memory.micro_batches import host_layers
from hetero_megatron.plans.memory.of_plan import plan_activations
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.utils.text import format_seconds


def activation_lines(best: SimulatedPlan, problem: PlanningProblem, costs: CostModel) -> tuple[str, ...]:
    """Lines of the report; none where no activations are in host memory, nor would be if a chip's link were known.

    Args:
        costs: of the search, whose cluster may be another one than the plan's.
    """
    if costs.cluster is not best.cluster:
        costs = CostModel(costs.model, best.cluster, costs.seq_length, costs.dtype, costs.options)
    lines = [*_needs(best.plan, costs)]
    if lines:
        lines += _instead(best, costs)
    unknown = _unknown(best, problem)
    if unknown:
        names, key = ", ".join(unknown), f"chips: {{{unknown[0]}: {{host_bandwidth: 25 GB/s}}}}"
        lines.append(
            f"not tried on {names}, whose link to the host is unknown: {key} in the cluster file, or "
            "--offload-activations always"
        )
    return tuple(lines)


def _needs(plan: Plan, costs: CostModel) -> Iterator[str]:
    """By stage, alike ones once."""
    options, prices = costs.options, StageCosts(plan, costs)
    sizes = costs.item, options.logits_bytes, options.routing, options.fp8
    offloaded = plan_activations(plan, costs.model, *sizes)
    resident = plan_activations(plan.with_stages(lambda s: replace(s, activations=None)), costs.model, *sizes)
    texts = set[str]()
    for p, pipeline in enumerate(plan.pipelines):
        forward = prices.of(pipeline).costs.forward
        for s, stage in enumerate(pipeline.stages):
            if stage.activations is None:
                continue
            bytes_of = host_layers(stage, costs.model, plan.seq_length, costs.item, options.routing, options.fp8)
            rank = max(stage.ranks, key=lambda r: (sum(map(sum, bytes_of[r])), -r))
            rate, host_rate = (
                sum(map(sum, bytes_of[rank])) / forward[s],
                costs.host_rate(costs.cluster.ranks[rank].chip),
            )
            saved = resident[rank].activations - offloaded[rank].activations
            stated = costs.cluster.group_of(rank).host_memory
            text = (
                f"offloads the activations of {stage.activations.layers} of {stage.num_layers} layers: needs "
                f"{rate / 1e9:.3g} GB/s of {host_rate / 1e9:.3g} of the host link, saves {format_bytes(max(saved, 0))} "
                f"({format_bytes(offloaded[rank].host)} of host memory per chip"
                f"{')' if stated else ', which nodes without host_memory: in the cluster file are taken to have)'}"
            )
            if text not in texts:
                texts.add(text)
                yield f"stage {p}.{s} {text}"


def _instead(best: SimulatedPlan, costs: CostModel) -> Iterator[str]:
    """What the fastest recompute would cost that fits instead."""
    pipelines = (
        replace(pipeline, stages=tuple(_recomputed(stage, pipeline, best, costs) for stage in pipeline.stages))
        for pipeline in best.plan.pipelines
    )
    plan = replace(best.plan, pipelines=tuple(pipelines))
    if any(stage.activations is not None for stage in plan.stages):
        yield "without it no recompute fits in its place"
        return
    try:
        prediction = predict(plan, costs.model, costs.cluster, costs.dtype, costs)
    except UserError:  # an adaptive schedule that is not for these stages
        return
    kinds = dict.fromkeys(
        str(b.recompute) for a, b in zip(best.plan.stages, plan.stages, strict=True) if a.activations is not None
    )
    slower = prediction.step_seconds - best.step_seconds
    yield f"recompute ({', '.join(kinds)}) in its place would take {format_seconds(max(slower, 0.0))} more per step"


def _recomputed(stage: Stage, pipeline: Pipeline, best: SimulatedPlan, costs: CostModel) -> Stage:
    """The stage with the least recompute that fits in place of host memory; itself where none does."""
    if stage.activations is None:
        return stage
    levels = [Recompute("selective"), Recompute("elementwise")]
    levels += [Recompute("first", n) for n in range(1, stage.num_layers)] if stage.recompute.kind == "none" else []
    fitting = list[tuple[float, Stage]]()
    prices = StageCosts(best.plan, costs)
    for level in [*levels, Recompute("full")]:
        candidate = replace(stage, recompute=level, activations=None)
        if (not fitting or level.kind != "first" or fitting[-1][1].recompute.kind != "first") and _fits(
            candidate, pipeline, best, costs
        ):
            fitting.append((prices.stage_seconds(candidate), candidate))
    return min(fitting, key=lambda row: row[0])[1] if fitting else stage


def _fits(stage: Stage, pipeline: Pipeline, best: SimulatedPlan, costs: CostModel) -> bool:
    """Whether a stage in the place of that with its ranks does."""
    stages, options = tuple(stage if s.ranks == stage.ranks else s for s in pipeline.stages), costs.options
    plan = replace(best.plan, pipelines=(replace(pipeline, stages=stages),))
    needs = plan_activations(plan, costs.model, costs.item, options.logits_bytes, options.routing, options.fp8)
    prediction: Prediction = best.prediction

    def total(rank: int) -> int:
        return replace(prediction.memory[rank], activations=needs[rank].activations).total

    return all(total(rank) <= prediction.limits[rank] for rank in stage.ranks)


def _unknown(best: SimulatedPlan, problem: PlanningProblem) -> list[str]:
    """Chips of stages that recompute because nothing is known of their links to hosts."""
    if problem.space.offload_activations != "auto" or problem.space.recompute is not None or problem.model.mtp_layers:
        return []
    chips = {
        best.cluster.ranks[rank].chip
        for stage in best.plan.stages for rank in stage.ranks if stage.recompute.kind != "none"
    }  # fmt: skip
    return sorted(chips - problem.space.activations_away(best.cluster.chips))
