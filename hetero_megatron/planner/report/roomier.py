"""A plan that leaves more memory free, beside one that nearly fills a chip: what the room costs in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hetero_megatron.planner.estimate.template_score import best_recompute
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.driver import SearchResult
from hetero_megatron.planner.search.incumbent import SimulatedPlan, simulate_template
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.step import Prediction

TIGHT, ROOMY = 0.1, 0.15  # shares of a chip's limit: a plan that leaves less is tight, one that leaves more is roomy


@dataclass(frozen=True)
class Roomier:
    """``text``: of the plan, empty where none is at hand; ``free``: bytes on the rank that has least; ``before``: the
    same of the best plan; ``margin``: the --memory-margin that searches such plans."""

    before: int
    margin: float
    text: str = ""
    step_seconds: float = 0.0
    free: int = 0


def least_free(prediction: Prediction) -> tuple[float, int]:
    """(least share of its limit, least bytes) that a rank has left; not always the same rank."""
    limits = prediction.limits
    rows = [(limits[rank] - memory.total, limits[rank]) for rank, memory in prediction.memory.items()]
    return min(free / limit for free, limit in rows), min(free for free, _ in rows)


def roomier(
    result: SearchResult, problem: PlanningProblem, describe: Callable[[SimulatedPlan], str]
) -> Roomier | None:
    """The fastest plan at hand that leaves every rank ``ROOMY`` of its limit: one that the search has simulated, or the
    best plan with more recomputed. None where the best one is not tight."""
    share, least_bytes = least_free(result.best.prediction)
    if share >= TIGHT:
        return None
    described = [(plan, describe(plan)) for plan in result.others]
    described += _recomputed(result, problem)
    roomy = [row for row in described if not row[0].prediction.over and least_free(row[0].prediction)[0] >= ROOMY]
    margin = _margin(problem.options.costs.margin, ROOMY)
    if not roomy:
        return Roomier(least_bytes, margin)
    plan, text = min(roomy, key=lambda row: row[0].step_seconds)
    return Roomier(least_bytes, margin, text, plan.step_seconds, least_free(plan.prediction)[1])


def _margin(margin: float, share: float) -> float:
    """Share of the memory that is free where so much of the limit is."""
    return 1 - (1 - margin) * (1 - share)


def _recomputed(result: SearchResult, problem: PlanningProblem) -> Iterator[tuple[SimulatedPlan, str]]:
    """The best plan with the recompute that fits into less memory, where it comes from a template."""
    template, scorer = result.best.template, result.scorer
    if result.best.text or problem.space.recompute is not None:
        return
    for share in (ROOMY, 1.5 * ROOMY):  # the estimate is slightly below what is simulated
        options = replace(scorer.costs.options, margin=_margin(scorer.costs.options.margin, share))
        costs = CostModel(
            scorer.costs.model, scorer.costs.cluster, scorer.costs.seq_length, scorer.costs.dtype, options
        )
        tables = scorer.tables.for_pool(scorer.pool, costs)
        parts = []
        for part in template.parts:
            shape, count = part.shape.plain, part.num_micro_batches
            fitting = best_recompute(tables, shape, template.schedule, count, template.pipelines)
            if fitting is None:
                return
            parts.append(replace(part, shape=fitting))
        changed: PlanTemplate = replace(template, parts=tuple(parts))
        plan = simulate_template(changed, problem, scorer)
        if plan is not None:
            yield plan, f"the same with more recomputed ({', '.join(_levels(changed))})"


def _levels(template: PlanTemplate) -> list[str]:
    stages = (stage for part in template.parts for stage in part.shape.stages)
    return list(dict.fromkeys(
        (f"first {s.first}" if s.recompute == "first" else s.recompute)
        + (f", activations of {s.away} layers in host memory" if s.away else "")
        for s in stages
    ))  # fmt: skip
