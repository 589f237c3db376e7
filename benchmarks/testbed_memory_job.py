"""What bench_testbed_memory.py runs on every rank: calibrate, run the planner's plan and the best of what divides
weights equally, or not at all; compare with prediction."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_job import calibration, predicted
from benchmarks.testbed_ranks import DTYPE, Choice, Work, measure
from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.divided_stages import DividedStages
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.plans import Plan
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec


def choose(cluster: Cluster, spec: ModelSpec, work: Work) -> list[Choice]:
    """The planner's plan; of plans that divide weights the best one and the best of equal shares, the latter also with
    equal sequences; the best plan without divided weights. Plans that are found twice run once per kind."""
    problem = PlanningProblem(spec, cluster, work["seq_length"], work["batch"], SearchOptions(dtype=DTYPE))
    best = search(problem).best
    plans: list[tuple[str, str, SimulatedPlan]] = [("planner", "planner", best)]
    divided = _divided(problem)
    if divided is not None and divided.plan.fingerprint() != best.plan.fingerprint():
        plans.append(("divided by room", "divided", divided))
    if (equal := _divided(problem.with_space(weights="equal"))) is not None:
        plans.append(("equal shares", "equal", equal))
    plans.append(("not divided", "whole", search(problem.with_space(weights="never")).best))
    rows = []
    for kind, key, found in plans:
        rows.append(_row(f"{kind}: {found.text}", key, found.plan, spec, cluster))
    if equal is not None and (same := _equal_rows(equal.plan)) is not None and same != equal.plan:
        if not predict(same, spec, cluster, DTYPE).over:
            rows.append(_row("equal shares and sequences", "all equal", same, spec, cluster))
    return rows


def _divided(problem: PlanningProblem) -> SimulatedPlan | None:
    """The best plan that divides weights; None where none fits."""
    incumbent = Incumbent(problem, make_scorer(problem))
    DividedStages().propose(problem, incumbent)
    return incumbent.plans[0] if incumbent.plans else None


def _equal_rows(plan: Plan) -> Plan | None:
    """With equally many sequences for each replica of a stage, where they divide."""
    (pipeline,) = plan.pipelines
    if any(pipeline.micro_batch_size % len(stage.units) for stage in pipeline.stages):
        return None

    def equal(stage):  # type: ignore[no-untyped-def]
        each = pipeline.micro_batch_size // len(stage.units)
        units = tuple(replace(u, sequences=(i * each, (i + 1) * each)) for i, u in enumerate(stage.units))
        return replace(stage, units=units)

    return plan.with_stages(equal)


def _row(name: str, kind: str, plan: Plan, spec: ModelSpec, cluster: Cluster) -> Choice:
    return predicted(name, kind, to_dict(plan), spec, cluster)


if __name__ == "__main__":
    measure(calibration, choose)
