"""Proposer for models whose layers cost unlike much (attention beside linear attention): templates count layers, so
here single ones go from stage to stage of the best plan, while its simulated step, in which each stage has the costs of
its own layers, becomes faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan, simulated_plan, simulation_work
from hetero_megatron.plans import Plan, Stage
from hetero_megatron.predictor.simulate.step import predict

MOST = 200  # plans that are simulated


class UnlikeLayers:
    """Moves layers of the incumbent's best plan."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Moves one layer after the other, each time the first that makes the step faster."""
        best, tried = incumbent.plans[0], 0
        while True:
            faster = None
            for plan in _moved(best.plan):
                if tried >= MOST or incumbent.should_stop():
                    break
                tried += 1
                faster = _faster(plan, best, problem, incumbent)
                if faster is not None:
                    break
            if faster is None:
                break
            best = faster
        if best is not incumbent.plans[0]:
            incumbent.take_plan(best)
        return tried < MOST


def _faster(
    plan: Plan, best: SimulatedPlan, problem: PlanningProblem, incumbent: Incumbent
) -> SimulatedPlan | None:
    incumbent.scorer.work.add(simulation_work(plan))
    prediction = predict(plan, problem.model, problem.cluster, problem.dtype, incumbent.scorer.costs)
    if prediction.over or prediction.step_seconds >= best.step_seconds:
        return None
    counts = "; ".join(", ".join(str(s.num_layers) for s in p.stages) for p in plan.pipelines)
    text = f"stages of {counts} layers, which cost unlike much, under {plan.schedule}"
    return simulated_plan(problem, incumbent.scorer, plan, prediction, text)


def _moved(plan: Plan) -> Iterator[Plan]:
    """``plan`` with one layer more or less on one side of a border between stages."""
    for p, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages) - 1):
            for step in (1, -1):
                pair = _border(pipeline.stages[s], pipeline.stages[s + 1], step)
                if pair is None:
                    continue
                stages = (*pipeline.stages[:s], *pair, *pipeline.stages[s + 2 :])
                changed = replace(pipeline, stages=stages)
                yield replace(plan, pipelines=(*plan.pipelines[:p], changed, *plan.pipelines[p + 1 :]))


def _border(up: Stage, down: Stage, step: int) -> tuple[Stage, Stage] | None:
    """Both with the border between them ``step`` layers later; None where they cannot have that."""
    if len(up.layers) != 1 or len(down.layers) != 1 or not (up.num_layers and down.num_layers):
        return None
    if any(stage.activations is not None or stage.recompute.layers for stage in (up, down)):
        return None
    (first, border), (_, last) = up.layers[0], down.layers[0]
    border += step
    if not first < border < last:
        return None
    return replace(up, layers=((first, border),)), replace(down, layers=((border, last),))
