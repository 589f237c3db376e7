"""Uniform plans that do not fit: which rank exceeds its memory, and by how many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.uniform import UniformPlan, bytes_over, closed_seconds, uniform_plans
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.memory.memory_report import OverLimit
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes
from hetero_megatron.predictor.simulate.step import StepSimulator

SHOWN, LOOKED_AT = 3, 12
Row = tuple[UniformPlan, PlanTemplate]


@dataclass(frozen=True)
class Rejected:
    """A uniform plan that does not fit.

    Attributes:
        of: chip type, for plans on the chips of one type; empty: all chips.
        step_seconds: approximate step time.
        stage: of the worst rank; largest: what takes most of its memory.
    """

    of: str
    text: str
    step_seconds: float
    stage: str
    worst: OverLimit
    largest: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.worst}; most of it is {self.largest}"


def fastest_rejected(rows: Sequence[Row], problem: PlanningProblem, scorer: TemplateScorer) -> list[Rejected]:
    """The plans of ``rows`` that do not fit and would be fastest, one per (TP, PP, DP)."""
    first = {(u.tp, u.pp, u.dp): (u, c) for u, c in reversed(rows)}
    order = sorted(list(first.values())[::-1][:LOOKED_AT], key=lambda row: closed_seconds(scorer, row[1]))
    return _look(order, problem, scorer, "", SHOWN)


def nearest_rejected(chip: str, problem: PlanningProblem, scorer: TemplateScorer) -> list[Rejected]:
    """The uniform plan on chips of one type that exceeds memory by least, where nothing fits."""
    rows = list(uniform_plans(scorer.pool, problem.model, problem.global_batch_size, ("full",), (1,)))
    rows.sort(key=lambda row: bytes_over(scorer, row[1]))
    return _look(rows[:1], problem, scorer, chip, 1)


def _look(
    rows: Iterable[Row], problem: PlanningProblem, scorer: TemplateScorer, of: str, most: int
) -> list[Rejected]:  # fmt: skip
    rejected: list[Rejected] = []
    if scorer.pool.chips < problem.cluster.world_size:
        return rejected
    for uniform, template in rows:
        if len(rejected) == most:
            break
        try:
            plan = from_megatron(uniform.flags(problem.seq_length, problem.global_batch_size), problem.model)
            plan = with_dtypes(plan, scorer.costs)
            validate(plan, problem.model, problem.cluster, dtype=problem.dtype)
        except UserError:
            continue
        step = StepSimulator(plan, scorer.costs)
        if over := step.over:
            largest = step.memory[over[0].rank].largest
            seconds = closed_seconds(scorer, template)
            rejected.append(Rejected(of, uniform.text(), seconds, _stage_of(plan, over[0].rank), over[0], largest))
    return rejected


def _stage_of(plan: Plan, rank: int) -> str:
    places = ((p, s) for p, pipeline in enumerate(plan.pipelines) for s in range(len(pipeline.stages)))
    return next(f"pipeline {p}, stage {s}" for p, s in places if rank in plan.pipelines[p].stages[s].ranks)
