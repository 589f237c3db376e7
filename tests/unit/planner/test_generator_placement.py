"""Where answers are sampled: no placement of all there are on three chips makes a faster step than the one found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.whatif.forward_plans import ForwardQuestion
from hetero_megatron.planner.whatif.generator_placement import GeneratorSearch
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.forward_only import role_of
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.simulate.rollouts import predict_rollouts
from hetero_megatron.spec import load_model
from hetero_megatron.spec.grpo import Grpo
from tests.support.selection import quick

MODEL = replace(load_model("tiny"), num_layers=2)
SEQ, BATCH, DTYPE, COSTS = 64, 4, "fp32", CostOptions()
OPTIONS = SearchOptions(dtype=DTYPE, space=SearchSpace(micro_batch_sizes=(1,), more_schedules="never"))
CHIP = {"memory": "4 GiB", "tflops": {"fp32": 1}, "memory_bandwidth": "20 GB/s"}
QUICK = CHIP | {"tflops": {"fp32": 2}, "memory_bandwidth": "40 GB/s"}
Pipelines = list[dict[str, Any]]


def cluster_of(network: str) -> Cluster:
    nodes = [{"name": "new", "chip": "quick"}, {"name": "old", "chip": "slow", "chips_per_node": 2}]
    links = {"intra_node": {"bandwidth": "1 GB/s"}, "inter_node": {"bandwidth": network}}
    return cluster_from_dict({"version": 1, "nodes": nodes, "chips": {"quick": QUICK, "slow": CHIP}, "links": links})


def pipelines(ranks: Sequence[int], sizes: Sequence[int]) -> Iterator[Pipelines]:
    """Every division of the two layers and the batch over one rank or two, in micro-batches of these sizes: TP, stages
    in either order, replicas."""

    def one(size: int, count: int, *stages: dict[str, Any]) -> dict[str, Any]:
        return {"micro_batch_size": size, "num_micro_batches": count, "stages": list(stages)}

    def whole(on: int | list[int], tp: int = 1) -> dict[str, Any]:
        return {"ranks": on, "layers": [0, 2], "tp": tp}

    if len(ranks) == 1:
        yield from ([one(size, BATCH // size, whole(ranks[0]))] for size in sizes)
        return
    for size in sizes:
        yield [one(size, BATCH // size, whole(list(ranks), 2))]
        for a, b in itertools.permutations(ranks):
            halves = {"ranks": a, "layers": [0, 1]}, {"ranks": b, "layers": [1, 2]}
            yield [one(size, BATCH // size, *halves)]
    for share in range(1, BATCH):
        for a, b in itertools.product(sizes, sizes):
            if share % a == 0 and (BATCH - share) % b == 0:
                yield [one(a, share // a, whole(ranks[0])), one(b, (BATCH - share) // b, whole(ranks[1]))]


def placements(cluster: Cluster) -> Iterator[Plan]:
    """Every generator on some of the chips beside every way to train on the others, by the ranks that sample."""
    for count in (1, 2):
        for chosen in itertools.combinations(range(3), count):
            rest = [rank for rank in range(3) if rank not in chosen]
            used = [rest, *([rank] for rank in rest if len(rest) > 1)]  # or one of two is left idle
            trainings = [training for ranks in used for training in pipelines(ranks, (1,))]
            for sampling, training in itertools.product(pipelines(chosen, (1, BATCH)), trainings):
                data = {"seq_length": SEQ, "global_batch_size": BATCH, "pipelines": training,
                        "roles": {GENERATOR: {"pipelines": sampling}}}  # fmt: skip
                try:
                    yield plan_from_dict(data, MODEL, cluster, roles={GENERATOR: MODEL})
                except UserError:  # a TP group over the slow link of unlike chips, for example
                    continue


def searched(cluster: Cluster, g: Grpo) -> tuple[GeneratorSearch, Callable[[Plan], float]]:
    """And seconds of a step of any plan with a generator; inf: it does not fit."""

    def step_seconds(plan: Plan) -> float:
        role = role_of(plan, MODEL, GENERATOR, MODEL, 0, cluster)
        predicted = predict_rollouts(plan, MODEL, cluster, DTYPE, COSTS, g, role)
        return math.inf if predicted.over else predicted.step_seconds

    problem = PlanningProblem(MODEL, cluster, SEQ, BATCH, OPTIONS)
    asked = ForwardQuestion(GENERATOR, MODEL, SEQ, BATCH, DTYPE, COSTS, 0)
    return GeneratorSearch(problem, asked, g, None), step_seconds


@pytest.mark.parametrize("ahead", quick([False, True], [False]))
def test_no_placement_on_three_chips_is_faster(ahead: bool) -> None:
    """Whatever trains and samples where, with one chip idle or none."""
    cluster = cluster_of("10 GB/s")
    search, step_seconds = searched(cluster, Grpo(max_new_tokens=32, rows=BATCH, ahead=ahead))
    placed = search.placed()
    seconds = {one.way: one.step_seconds for one in placed.alternatives}
    assert seconds.keys() == {"own chips", "same chips"} and placed.best.step_seconds == min(seconds.values())
    every = [step_seconds(plan) for plan in placements(cluster)]
    assert len(every) > 40 and seconds["own chips"] <= 1.001 * min(every)


def test_over_a_slow_network_no_generator_of_the_same_chips_is_faster() -> None:
    """Where weights take longer to arrive than answers to be sampled, one TP group gets them once; and the two splits
    of the chips are ranked with their way."""
    cluster = cluster_of("100 MB/s")
    search, step_seconds = searched(cluster, Grpo(max_new_tokens=32, rows=BATCH))
    splits = [search.on_ranks(frozenset(ranks)) for ranks in ([0], [1, 2])]
    for found in splits:
        assert found.plan is not None
        for other in pipelines(found.ranks, (1, BATCH)):
            data = {"seq_length": SEQ, "global_batch_size": BATCH, "pipelines": other}
            plan = replace(found.plan, roles=((GENERATOR, plan_from_dict(data, MODEL, cluster, DTYPE)),))
            assert found.step_seconds <= 1.001 * step_seconds(plan), other
    own = next(one for one in search.placed().alternatives if one.way == "own chips")
    assert own.step_seconds <= 1.001 * min(one.step_seconds for one in splits)
