"""The fast estimate of gradient reduction against the step simulator, on random plans of unlike pipelines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    place,
    to_plan,
)
from hetero_megatron.predictor.simulate.step import StepSimulator
from hetero_megatron.spec import Lora, adapted
from hetero_megatron.spec.lora import all_linear
from tests.support.planner_reference import Case, random_case


def _unlike_pipelines(case: Case, counts: tuple[int, ...], rng: random.Random, bare: bool) -> PlanTemplate:
    """Two or three pipelines with random stages and layers, on all chips or all but a few; ``bare``: last stages may
    have the head alone."""
    chips = [g for g, n in enumerate(counts) for _ in range(n)]
    rng.shuffle(chips)
    number, parts = rng.choice([2, 3]), []
    for p in range(number):
        groups = chips[p::number]
        each, whole = [(g, 1) for g in groups], [(g, groups.count(g)) for g in dict.fromkeys(groups)]
        stages = rng.choice([each, whole])[: case.model.num_layers]
        cuts = sorted(rng.sample(range(1, case.model.num_layers), len(stages) - 1))
        layers = [b - a for a, b in zip([0, *cuts], [*cuts, case.model.num_layers])]
        if bare and len(layers) > 1:
            layers[-2:] = [layers[-2] + layers[-1], 0]
        shape = tuple(StageTemplate(g, tp, 1, n) for (g, tp), n in zip(stages, layers))
        parts.append(PipelineReplicas(PipelineTemplate(1, shape), 1, rng.randint(1, 3)))
    return PlanTemplate(tuple(parts), order=rng.choice(["stage", "pipeline"]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapters"), [("fixed", False), ("open", False), ("open", True)])
def test_unlike_pipelines_are_estimated_as_they_are_simulated(kind: str, adapters: bool) -> None:
    """Gradients of a layer are complete together, at the end of its backward; ports serve what is ready first; a rank
    sums what came before while it sends the next; a TP group over several nodes uses the cards of all of them. With
    adapters, embedding and head have no gradients."""
    errors = []
    for seed in range(700, 712):
        case = random_case(seed, kind)
        if adapters:
            case = replace(case, model=adapted(case.model, Lora(8, 8.0, all_linear(case.model.gated))))
        scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, case.batch))
        rng = random.Random(seed)
        for _ in range(3 if sum(scorer.pool.counts) > 2 else 0):
            template = _unlike_pipelines(case, scorer.pool.counts, rng, adapters)
            placed = place(template, scorer.pool)
            if placed is None:
                continue
            plan = to_plan(placed, case.cluster, case.seq_length, case.model.num_heads)
            exact = StepSimulator(plan, scorer.costs).times.end
            errors.append(abs(scorer.score_placed(placed).step_seconds / exact - 1))
    assert len(errors) > 10
    assert sum(errors) / len(errors) < 0.015 and max(errors) < 0.12
