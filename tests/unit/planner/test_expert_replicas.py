"""Replicated experts: what the search finds against every assignment of intervals, and in the planner's plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import BRIEF, summarize
from hetero_megatron.planner.report.text import format_summary, summary_json
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.expert_partition import divide_experts, least_seconds
from hetero_megatron.planner.search.expert_price import DivisionPrice
from hetero_megatron.planner.search.expert_replicas import Intervals, best_divisions
from hetero_megatron.planner.shares import min_max_counts
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.experts import replicated_experts
from hetero_megatron.plans.routing import Routing
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec, MoE
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.selection import each
from tests.support.small_plans import pipe, plan, stage

LENGTH = 512
MODEL = replace(
    from_hf_config(MOE_FAMILIES["mixtral"]), hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, num_layers=2,
    max_position_embeddings=LENGTH,
)  # fmt: skip


class Case:
    """One stage on ranks of random speeds, with random routing, and every division of its experts."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        ranks = rng.randint(2, 3)
        self.count, speeds = rng.randint(3, 6 if ranks == 2 else 4), [rng.choice([0.1, 0.2, 0.6]) for _ in range(ranks)]
        self.spec: ModelSpec = replace(MODEL, moe=MoE(self.count, rng.choice([1, 2]), rng.choice([512, 2048])))
        self.cluster = cluster_from_dict({
            "nodes": [{"name": f"n{i}", "chip": f"c{i}", "count": 1, "chips_per_node": 1} for i in range(ranks)],
            "chips": {f"c{i}": {"memory": "8 GiB", "emulate": {"speed": s}} for i, s in enumerate(speeds)},
            "links": {"inter_node": {"bandwidth": rng.choice(["20 MB/s", "2 GB/s"]), "latency": "10 us"}},
        })  # fmt: skip
        routing = Routing.of({i: [rng.choice([1, 1, 2, 8, 20]) for _ in range(self.count)] for i in range(2)})
        self.popular = [sum(row[e] for _, row in routing.layers) / 2 for e in range(self.count)]
        self.costs = CostModel(self.spec, self.cluster, LENGTH, "fp32", CostOptions(routing=routing))
        self.size, self.rounds, self.ranks = rng.randint(ranks, 8), rng.choice([1, 2, 8]), list(range(ranks))
        rows = min_max_counts([[n / s for n in range(self.size + 1)] for s in speeds], self.size)
        self.rows, self.caps = rows, [self.count] * ranks
        row = [self.popular] * ranks
        found = divide_experts([[p / s for p in r] for r, s in zip(row, speeds)], self.ranks, self.caps)
        assert found is not None
        self.start = tuple(found[0])

    def plan(self, held: Intervals) -> Plan:
        experts = [{"ranks": self.ranks, "experts": [[a, b] if a < b else [] for a, b in held]}]
        one = stage(self.ranks, [0, 2], tp=1, dp_split=self.rows, experts=experts)
        return plan_from_dict(plan([pipe(self.size, self.rounds, one)], LENGTH), self.spec)

    def price(self) -> DivisionPrice:
        made = self.plan(self.start)
        return DivisionPrice(StageCosts(made, self.costs), made.pipelines[0].stages[0], self.rounds)

    def seconds(self, held: Intervals) -> float:
        return predict(self.plan(held), self.spec, self.cluster, "fp32", self.costs).step_seconds

    def every(self) -> list[Intervals]:
        intervals = [(0, 0), *itertools.combinations(range(self.count + 1), 2)]
        everything = set(range(self.count))
        ways = itertools.product(intervals, repeat=len(self.ranks))
        return [w for w in ways if {e for a, b in w for e in range(a, b)} == everything]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_division_with_replicas_is_more_than_a_percent_better(seed: int) -> None:
    case = Case(seed)
    every = case.every()
    price = case.price()
    judge: Callable[[Intervals], float] = case.seconds if len(every) <= 40 else lambda held: price(held).seconds
    found = min(map(judge, best_divisions(case.popular, case.caps, price, case.start)))
    assert found <= 1.01 * min(map(judge, every))
    assert found <= judge(case.start)


def test_memory_bounds_the_replicas() -> None:
    case = Case(3)
    caps = [b - a for a, b in case.start]
    for held in best_divisions(case.popular, caps, case.price(), case.start):
        assert all(b - a <= cap for (a, b), cap in zip(held, caps, strict=True))


@each("seed", range(20))
def test_no_fractions_of_experts_are_faster_than_the_bound(seed: int) -> None:
    """Costs of which each rank takes any part of each expert."""
    rng = random.Random(seed)
    kinds = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
    costs = [[rng.uniform(0.1, 3.0) for _ in range(5)] for _ in range(2)]
    parts = [[rng.random() for _ in kinds] for _ in range(5)]
    slowest = max(
        sum(costs[kind][e] * parts[e][r] / sum(parts[e]) for e in range(5)) for r, kind in enumerate(kinds)
    )
    assert least_seconds(costs, kinds) <= slowest * (1 + 1e-12)


@pytest.mark.slow
def test_the_planner_replicates_a_hot_expert_and_says_what_that_gains() -> None:
    """One expert takes nearly half of all tokens: more than any chip can do in the time of the others."""
    routing = Routing.of({0: (30, 5, 5, 5, 5, 5, 5, 5)})
    spec = replace(MODEL, num_layers=1, moe=MoE(8, 2, 4096))
    chips = {"fast": 0.6, "slow": 0.2}
    cluster = cluster_from_dict({
        "nodes": [{"name": f"{c}-node", "chip": c, "count": 2, "chips_per_node": 1} for c in chips],
        "chips": {c: {"memory": "8 GiB", "emulate": {"speed": s}} for c, s in chips.items()},
        "links": {"inter_node": {"bandwidth": "50 GB/s", "latency": "1 us"}},
    })  # fmt: skip
    space = SearchSpace(
        max_pipelines=1, max_tp=1, recompute="none", more_schedules="never", offload="never"
    )
    asked = PlanningProblem(
        spec, cluster, LENGTH, 16, SearchOptions(dtype="fp32", space=space, costs=CostOptions(routing=routing))
    )
    result = search(asked)
    best = result.best
    assert any(0 in replicated_experts(one) for one in best.plan.pipelines[0].stages), best.text
    assert best.once_seconds is not None and best.once_seconds > 1.1 * best.step_seconds
    again = predict(best.plan, spec, cluster, "fp32", options=asked.options.costs)
    assert again.step_seconds == pytest.approx(best.step_seconds) and not again.over
    summary = summarize(result, asked, BRIEF)
    line = next(line for line in format_summary(summary).splitlines() if "  experts:" in line)
    assert f"{best.once_seconds / best.step_seconds:.2f} x as fast as each on one rank" in line
    assert summary_json(summary)["experts"]["replicated"] > 0
