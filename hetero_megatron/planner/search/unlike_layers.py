"""Proposer for models whose layers cost unlike much (attention beside linear attention): templates count layers, so
here single ones go from stage to stage of the best plan, while its simulated step, in which each stage has the costs of
its own layers, becomes faster.

Whole steps take most of the time of a simulation to divide gradients anew, so moves are chosen by what they do to the
pipelines, and only what makes these faster is simulated as a whole.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan, simulated_plan, simulation_work
from hetero_megatron.plans import Plan, Stage
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import StepSimulator, predict

MOST = 200  # plans of which the pipelines are simulated
WHOLE = 3  # of one move, of which the whole step is
PIPELINES = 1 / 8  # of the work of a whole step


class UnlikeLayers:
    """Moves layers of the incumbent's best plan."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Moves one layer after the other, each time the one after which pipelines are fastest."""
        best, left = incumbent.plans[0], MOST
        while left > 0 and not incumbent.should_stop():
            plans = list(itertools.islice(_moved(best.plan, incumbent), left))
            left -= len(plans)
            fastest = _fastest(plans, best, problem, incumbent)
            if fastest is None:
                break
            best = fastest
        if best is not incumbent.plans[0]:
            incumbent.take_plan(best)
        return left > 0


def _fastest(
    plans: Sequence[Plan], best: SimulatedPlan, problem: PlanningProblem, incumbent: Incumbent
) -> SimulatedPlan | None:
    """The first of ``plans``, fastest pipelines first, that fits and is faster than ``best``; None: of a few none."""
    seconds = [_pipeline_seconds(plan, incumbent) for plan in plans]
    order = sorted(range(len(plans)), key=seconds.__getitem__)
    least = sorted(best.prediction.pipeline_seconds, reverse=True)
    for i in order[:WHOLE]:
        if seconds[i] >= least or incumbent.should_stop():
            return None
        incumbent.scorer.work.add(simulation_work(plans[i]))
        prediction = predict(plans[i], problem.model, problem.cluster, problem.dtype, incumbent.scorer.costs)
        if not prediction.over and prediction.step_seconds < best.step_seconds:
            counts = "; ".join(", ".join(str(s.num_layers) for s in p.stages) for p in plans[i].pipelines)
            text = f"stages of {counts} layers, which cost unlike much, under {plans[i].schedule}"
            return simulated_plan(problem, incumbent.scorer, plans[i], prediction, text)
    return None


def _pipeline_seconds(plan: Plan, incumbent: Incumbent) -> list[float]:
    """Of each pipeline, the slowest first: what all wait for, and then what is left to gain."""
    incumbent.scorer.work.add(PIPELINES * simulation_work(plan))
    timelines = StepSimulator(plan, incumbent.scorer.costs).timelines
    return sorted((timeline.step_seconds for timeline in timelines), reverse=True)


def _moved(plan: Plan, incumbent: Incumbent) -> Iterator[Plan]:
    """``plan`` with one border between stages a layer earlier or later, in all pipelines that have the same layers, and
    in those of them that cost the same."""
    costs, groups = StageCosts(plan, incumbent.scorer.costs), defaultdict[object, list[int]](list)
    for p, pipeline in enumerate(plan.pipelines):
        groups[tuple(stage.layers for stage in pipeline.stages)].append(p)
        groups[costs.signature(pipeline)].append(p)
    equal = incumbent.problem.space.equal_pipelines != "no"
    for alike in dict.fromkeys(map(tuple, groups.values())):
        if equal and len(alike) < len(plan.pipelines):
            continue
        for s, step in itertools.product(range(len(plan.pipelines[alike[0]].stages) - 1), (1, -1)):
            pipelines = list(plan.pipelines)
            for p in alike:
                stages = pipelines[p].stages
                pair = _border(stages[s], stages[s + 1], step)
                if pair is None:
                    break
                pipelines[p] = replace(pipelines[p], stages=(*stages[:s], *pair, *stages[s + 2 :]))
            else:
                yield replace(plan, pipelines=tuple(pipelines))


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
