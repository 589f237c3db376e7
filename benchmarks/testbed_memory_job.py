"""What bench_testbed_memory.py runs on every rank: calibrate, run the planner's plan and the best of what divides
weights equally, or not at all; compare with prediction."""

from __future__ import annotations

import sys
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
from hetero_megatron.planner.template.plan_template import describe
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.spec import ModelSpec


def choose(cluster: Cluster, spec: ModelSpec, work: Work) -> list[Choice]:
    """The planner's plan; of plans that divide weights the best one and the best of equal shares; the best plan without
    divided weights. A plan that is several of these runs once, with all ``kinds``."""
    problem = PlanningProblem(spec, cluster, work["seq_length"], work["batch"], SearchOptions(dtype=DTYPE))
    found = {
        "planner": search(problem).best,
        "divided by room": _divided(problem),
        "equal shares": _divided(problem.with_space(weights="equal")),
        "not divided": search(problem.with_space(weights="never")).best,
    }
    by_plan: dict[str, Choice] = {}
    for kind, best in found.items():
        if best is None:
            print(f"{kind}: none fits", flush=True)
            continue
        key = best.plan.fingerprint()
        if key not in by_plan:
            by_plan[key] = predicted("", "", to_dict(best.plan), spec, cluster)
            by_plan[key][0].update(name=_text(best), kinds=[], limits=best.prediction.limits)
        by_plan[key][0]["kinds"].append(kind)
    return list(by_plan.values())


def _divided(problem: PlanningProblem) -> SimulatedPlan | None:
    """The best plan that divides weights; None where none fits."""
    incumbent = Incumbent(problem, make_scorer(problem))
    DividedStages().propose(problem, incumbent)
    return incumbent.plans[0] if incumbent.plans else None


def _text(best: SimulatedPlan) -> str:
    chips = [node.chip for node in best.cluster.nodes]
    parts = [f"{x.copies} x (m {x.num_micro_batches}, b {x.shape.micro_batch_size}) {describe(x.shape, chips)}"
             for x in best.template.parts]  # fmt: skip
    return best.text or " + ".join(parts)


if __name__ == "__main__":
    measure(calibration, choose)
