"""The division of experts over ranks against trying all, and the planner's plans with divided experts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import BRIEF, summarize
from hetero_megatron.planner.report.text import format_summary, summary_json
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.search.expert_partition import divide_experts
from hetero_megatron.planner.search.expert_stages import with_equal_experts
from hetero_megatron.planner.shares import min_max_counts
from hetero_megatron.plans.routing import Routing, RoutingStats, routing_of, write_routing_stats
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import MoE
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.selection import each
from tests.support.small_plans import LLAMA


def best_of_all(costs: list[list[float]], kinds: list[int], caps: list[int]) -> float | None:
    """Seconds of the slowest rank in the best division: every order of the ranks, every way to cut the experts."""
    count, found = len(costs[0]), list[float]()
    for order in set(itertools.permutations(kinds)):
        for cuts in itertools.combinations_with_replacement(range(count + 1), len(kinds) - 1):
            ends = (0, *cuts, count)
            parts = [(kind, a, b) for kind, a, b in zip(order, ends, ends[1:])]
            if all(b - a <= caps[kind] for kind, a, b in parts):
                found.append(max(sum(costs[kind][a:b]) for kind, a, b in parts))
    return min(found, default=None)


@each("seed", range(40))
def test_no_division_of_experts_is_better(seed: int) -> None:
    rng = random.Random(seed)
    count, ranks, types = rng.randint(1, 7), rng.randint(1, 4), rng.randint(1, 3)
    popular = [rng.choice([0.0, 1.0, rng.random(), 5.0]) for _ in range(count)]
    costs = [[speed * (p + 0.1) for p in popular] for speed in (rng.uniform(0.2, 3.0) for _ in range(types))]
    kinds, caps = [rng.randrange(types) for _ in range(ranks)], [rng.randint(0, count) for _ in range(types)]
    found, best = divide_experts(costs, kinds, caps), best_of_all(costs, kinds, caps)
    if found is None:
        assert best is None
        return
    intervals, slowest = found
    assert best is not None and slowest == pytest.approx(best, rel=1e-12)
    assert sorted(e for a, b in intervals for e in range(a, b)) == list(range(count))
    assert all(b - a <= caps[kind] for kind, (a, b) in zip(kinds, intervals, strict=True))


def test_sequences_are_divided_as_well_as_they_can_be() -> None:
    rng = random.Random(5)
    for _ in range(30):
        units, rows = rng.randint(1, 4), rng.randint(1, 8)
        each = [rng.uniform(0.2, 2.0) for _ in range(units)]
        tables = [[0.1 + n * s for n in range(rows + 1)] for s in each]
        ways = [w for w in itertools.product(range(1, rows + 1), repeat=units) if sum(w) == rows]
        found = min_max_counts(tables, rows)
        if not ways:
            assert found is None
            continue
        assert found is not None and sum(found) == rows

        def slowest(way: tuple[int, ...], tables: list[list[float]] = tables) -> float:
            return max(table[n] for table, n in zip(tables, way, strict=True))

        assert slowest(tuple(found)) == pytest.approx(min(map(slowest, ways)))


MIXTRAL = from_hf_config(MOE_FAMILIES["mixtral"])
LARGE = replace(
    MIXTRAL, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, num_layers=2, max_position_embeddings=512,
    moe=MoE(8, 2, 2048),
)  # fmt: skip


def cluster(memory: str = "8 GiB", count: int = 1) -> Cluster:
    chips = {"fast": 0.6, "slow": 0.2}
    return cluster_from_dict({
        "nodes": [{"name": f"{c}-node", "chip": c, "count": count, "chips_per_node": 1} for c in chips],
        "chips": {c: {"memory": memory, "emulate": {"speed": s}} for c, s in chips.items()},
        "links": {"inter_node": {"bandwidth": "50 GB/s", "latency": "1 us"}},
    })  # fmt: skip


def problem(options: SearchOptions, memory: str = "8 GiB") -> PlanningProblem:
    return PlanningProblem(LARGE, cluster(memory), 512, 16, options)


FP32 = SearchOptions(dtype="fp32")
# One micro-batch of all sequences: pipelines of single chips would need as many replicas of all experts.
ONE_PIPELINE = replace(
    FP32, space=SearchSpace(
        max_pipelines=1, max_tp=1, recompute="none", more_schedules="never", offload="never"
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def divided() -> SearchResult:
    """With all experts chosen alike often."""
    return search(problem(ONE_PIPELINE))


def test_the_planner_divides_experts_by_speed_and_says_what_that_gains(divided: SearchResult) -> None:
    asked, result = problem(ONE_PIPELINE), divided
    counts = [
        m.experts[1] - m.experts[0] for s in result.best.plan.pipelines[0].stages for g in s.experts for m in g.members
    ]
    assert counts and len(set(counts)) > 1, result.best.text
    equal = predict(with_equal_experts(result.best.plan, 8), LARGE, asked.cluster, "fp32").step_seconds
    assert equal > 1.1 * result.best.step_seconds
    summary = summarize(result, asked, BRIEF)
    ratio = f"{equal / result.best.step_seconds:.2f} x"
    assert ratio in next(line for line in format_summary(summary).splitlines() if "equal experts" in line)
    assert summary_json(summary)["experts"]["over_equal"] == pytest.approx(equal / result.best.step_seconds)


@pytest.mark.slow
def test_divided_experts_fit_where_no_chip_holds_them_all() -> None:
    """Memory of about half of a layer's experts per chip: pipelines and replicas of whole layers do not fit."""
    tight = replace(LARGE, num_layers=1, moe=MoE(8, 2, 8192))
    space = replace(ONE_PIPELINE.space, max_pipelines=None, micro_batch_sizes=(4,))
    asked = PlanningProblem(tight, cluster("1.1 GiB", 2), 512, 16, replace(FP32, space=space))
    best = search(asked).best
    assert any(s.experts for p in best.plan.pipelines for s in p.stages) and not best.prediction.over


def test_measured_routing_moves_experts(divided: SearchResult) -> None:
    hot = CostOptions(routing=Routing.of(dict.fromkeys(range(LARGE.num_layers), (37, *((9,) * 7)))))
    even, moved = divided.best, search(problem(replace(ONE_PIPELINE, costs=hot))).best
    under = predict(even.plan, LARGE, even.cluster, "fp32", options=hot).step_seconds
    assert moved.step_seconds < 0.99 * under


def test_routing_is_read_from_what_a_run_wrote(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    write_routing_stats(str(path), RoutingStats(8, {0: (4, 4, 8, 0), 1: (8, 8, 0, 0)}), MIXTRAL)
    assert routing_of(str(path), MIXTRAL) == Routing(((0, (0.25, 0.25, 0.5, 0.0)), (1, (0.5, 0.5, 0.0, 0.0))))
    for spec in (LARGE, from_hf_config(LLAMA)):
        with pytest.raises(UserError):
            routing_of(str(path), spec)
