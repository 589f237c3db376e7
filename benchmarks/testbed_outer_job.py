"""What bench_outer_testbed.py runs on every rank: calibrate, choose plans with and without outer steps, run each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_job import calibration
from benchmarks.testbed_ranks import DTYPE, Choice, Work, measure
from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.whatif.islands_apart import WORTH, best_apart
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.canonical import Outer
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.plans.islands import crossing
from hetero_megatron.plans.outer import exchanged, fragment_tensors, owners_by_island
from hetero_megatron.plans.shares import Islands
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec

ALONE, SYNCHRONOUS = 2, 2  # measured steps; of outer steps one round of all fragments


def choose(cluster: Cluster, spec: ModelSpec, work: Work) -> list[Choice]:
    """The search's plan with outer steps and its plan without; the former's inner plans with other exchanges, and with
    gradients summed over all islands in every step, straight or in two hops; each island alone."""
    options = SearchOptions(dtype=DTYPE, time_limit=60.0)
    problem = PlanningProblem(spec, cluster, work["seq_length"], work["batch"], options)
    together = search(problem).best.plan
    found = best_apart(problem, work["every"])
    apart, outer = found.plan, found.plan.outer
    assert outer is not None
    inner, islands = replace(apart, outer=None, islands=()), outer.islands
    plans: list[tuple[str, str, Plan]] = [
        ("search's plan without outer steps", "synchronous", together),
        ("inner plans, gradients straight", "synchronous", inner),
        ("inner plans, gradients in two hops", "synchronous", replace(inner, islands=islands)),
        (f"search's outer steps: {text_of(outer)}", "outer", apart),
    ]
    for compress in ("none", "int8"):
        changed = Outer(islands, work["every"], work["fragments"], compress=compress)
        if changed != outer:
            plans.append((f"outer steps: {text_of(changed)}", "outer", replace(apart, outer=changed)))
    for i, ranks in enumerate(islands):
        plans.append((f"island {i} alone", "alone", alone(inner, ranks)))
    seconds = predict(together, spec, cluster, DTYPE).step_seconds
    chosen = apart if seconds >= WORTH * found.prediction.step_seconds else together
    return [choice(name, kind, plan, plan is chosen, islands, spec, cluster) for name, kind, plan in plans]


def text_of(outer: Outer) -> str:
    late = f", delay {outer.delay}" if outer.delay else ""
    return f"{outer.compress}, every {outer.every}, {outer.fragments} fragments{late}"


def alone(inner: Plan, ranks: tuple[int, ...]) -> Plan:
    """What one island does, without the others."""
    pipelines = tuple(p for p in inner.pipelines if p.ranks[0] in ranks)
    batch = sum(p.micro_batch_size * p.num_micro_batches for p in pipelines)
    return replace(inner, pipelines=pipelines, global_batch_size=batch)


def choice(
    name: str, kind: str, plan: Plan, chosen: bool, islands: Islands, spec: ModelSpec, cluster: Cluster
) -> Choice:
    """With what is predicted, and the bytes that cross between islands in a step, both ways together."""
    data = to_dict(plan)
    found = predict(plan_from_dict(data, spec, cluster), spec, cluster, DTYPE)
    if plan.outer is not None:
        steps, buckets = plan.outer.every, make_buckets(plan, spec)
        owners = owners_by_island(plan.outer, buckets)
        size = sum(
            sum(exchanged(plan.outer, owners, names, 4).values()) for names in fragment_tensors(spec, plan.outer)
        ) / steps
    else:
        steps = ALONE if kind == "alone" else SYNCHRONOUS
        size = crossing_bytes(plan, islands, spec)
    facts = {
        "name": name, "kind": kind, "predicted": found.step_seconds, "parts": dict(found.parts), "count": steps,
        "across": size, "batch": plan.global_batch_size, "chosen": chosen,
    }  # fmt: skip
    return facts, data


def crossing_bytes(plan: Plan, islands: Islands, spec: ModelSpec) -> float:
    """Gradients to their owners, and as many bytes of weights back (activations of a pipeline over both are left
    out)."""
    planned = replace(plan, islands=islands)
    found = crossing(CompiledPlan(planned, spec))
    return 2 * (found.planned if plan.islands else found.direct)


if __name__ == "__main__":
    measure(calibration, choose)
