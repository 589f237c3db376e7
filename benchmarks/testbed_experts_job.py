"""What bench_testbed_experts.py runs on every rank: calibrate, measure routing, run plans with divided experts."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.testbed_ranks import DTYPE, Choice, Work, measure
from hetero_megatron.calibration import CalibrationOptions
from hetero_megatron.calibration.pipelines import degrees
from hetero_megatron.cluster import Cluster
from hetero_megatron.model import GPTStage, initial_values
from hetero_megatron.model.moe import Router
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.expert_stages import ExpertStages, with_equal_experts
from hetero_megatron.planner.search.incumbent import Incumbent, simulate_best
from hetero_megatron.planner.search.uniform import top_uniform_plans
from hetero_megatron.plans import Plan
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.plans.routing import Routing
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec, logical_tensors, tensor_box, whole_share

SEQUENCES = 16  # by which routing is measured


def calibration(work: Work, spec: ModelSpec, cluster: Cluster) -> CalibrationOptions:
    length = work["seq_length"]
    return CalibrationOptions(length, DTYPE, tuple(work["sizes"]), degrees(cluster, spec), (length,), 1)


def measured_routing(spec: ModelSpec, length: int) -> Routing:
    """Of the model as it is initialised, over random tokens like those of the runs."""
    built = GPTStage(spec, whole_share(spec), range(spec.num_layers), True, True)
    boxes = {t.name: (t, tensor_box(t, whole_share(spec))) for t in logical_tensors(spec)}
    counts: dict[int, Counter[int]] = {}
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(initial_values(*boxes[name], spec, 0))
        for layer, module in enumerate(m for m in built.modules() if isinstance(m, Router)):

            def count(_: Any, __: Any, out: Any, layer: int = layer) -> None:
                counts.setdefault(layer, Counter()).update(out[1].flatten().tolist())

            module.register_forward_hook(count)
        tokens = torch.randint(0, spec.vocab_size, (SEQUENCES, length))
        positions = torch.arange(length).expand(tokens.shape)
        built(tokens, SimpleNamespace(positions=positions, documents=None, loss_mask=None, draws=None))
    assert spec.moe is not None
    layers = [i for i in range(spec.num_layers) if spec.layer(i).mlp == "moe"]
    return Routing.of({layers[i]: [row[e] for e in range(spec.moe.num_experts)] for i, row in counts.items()})


def choose(cluster: Cluster, spec: ModelSpec, work: Work) -> list[Choice]:
    """With names, predicted seconds and their routing: the planner's plan; the best with divided experts
    in one stage of all chips, the same with equal experts, and with equal sequences too; the two best uniform ones."""
    assert spec.moe is not None
    routing = measured_routing(spec, work["seq_length"])
    options = SearchOptions(dtype=DTYPE, time_limit=30.0, costs=CostOptions(routing=routing))
    problem = PlanningProblem(spec, cluster, work["seq_length"], work["batch"], options)
    plans: list[tuple[str, str, Plan]] = [("planner", "planner", search(problem).best.plan)]
    one = problem.with_space(max_pipelines=1, recompute="none")
    scorer = make_scorer(one)
    incumbent = Incumbent(one, scorer)
    ExpertStages().propose(one, incumbent)
    everyone = [p.plan for p in incumbent.plans if len(p.plan.pipelines[0].stages) == 1 and not p.idle
                and len(p.plan.pipelines) == 1]  # fmt: skip
    if everyone:
        best = everyone[0]
        equal = with_equal_experts(best, spec.moe.num_experts)
        plans += [("experts by speed", "uneven", best), ("equal experts", "equal", equal)]
        both = _equal_rows(equal)
        plans += [("equal experts and sequences", "all equal", both)] if both is not None else []
    uniform = [choice for _, template in top_uniform_plans(problem, make_scorer(problem), 12)[0]
               for choice in simulate_best([(0.0, 0, template)], problem, make_scorer(problem))]  # fmt: skip
    uniform.sort(key=lambda choice: choice.step_seconds)
    plans += [(f"uniform {i + 1}", "uniform", choice.plan) for i, choice in enumerate(uniform[:2])]
    out, seen = [], set[str]()
    for name, kind, plan in plans:
        seconds = predict(plan, spec, cluster, DTYPE, options=options.costs).step_seconds
        if plan.fingerprint() not in seen or kind != "planner":
            seen.add(plan.fingerprint())
            facts = {"name": name, "kind": kind, "predicted": seconds, "routing": routing.layers}
            out.append((facts, to_dict(plan)))
    return out


def _equal_rows(plan: Plan) -> Plan | None:
    """With equally many sequences for each TP group, where they divide."""
    (pipeline,), (stage,) = plan.pipelines, plan.pipelines[0].stages
    each, rest = divmod(pipeline.micro_batch_size, len(stage.units))
    if rest:
        return None
    units = tuple(replace(u, sequences=(i * each, (i + 1) * each)) for i, u in enumerate(stage.units))
    return replace(plan, pipelines=(replace(pipeline, stages=(replace(stage, units=units),)),))


if __name__ == "__main__":
    measure(calibration, choose)
