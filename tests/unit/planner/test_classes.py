"""What makes planning of large clusters quick gives what the plain way gives: classes of equal ranks and nodes, arrays
over ranks, periods of a schedule, lower bounds."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.layout import reduction
from hetero_megatron.planner.estimate.pipeline_time import Link, seconds
from hetero_megatron.planner.estimate.template_score import TemplateScorer, make_scorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlacedTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
    place,
    to_plan,
)
from hetero_megatron.plans import validate
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.predictor.cost.link_model import LinkModel, Port, RankHost, RankHosts
from hetero_megatron.predictor.simulate.bucket_flows import (
    PortIndex,
    bucket_flows,
    port_traffic,
    price,
)
from hetero_megatron.predictor.simulate.grad_sync import SyncStructure
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.schedule import Costs, generate, lower, schedule_names, simulate
from hetero_megatron.schedule import in_flight as of_schedule
from hetero_megatron.spec import load_model

TIMES = st.floats(0.01, 10)
LINK = st.tuples(st.floats(0, 5), st.floats(0, 5))  # there and back
MODEL, SEQ = load_model("tiny"), 64


def there(count: int = 2) -> Cluster:
    return cluster_from_dict(
        {
            "nodes": [
                {"name": "a", "count": count, "chip": "A100-80-SXM", "chips_per_node": 4},
                {"name": "b", "count": count, "chip": "L40S", "chips_per_node": 2},
            ],
            "links": {
                "intra_node": {"bandwidth": "100 GB/s", "latency": "5 us"},
                "inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"},
                "pairs": [{"between": ["a", "b"], "bandwidth": "3 GB/s"}],
            },
        }
    )


def random_candidate(rng: random.Random, scorer: TemplateScorer) -> tuple[PlanTemplate, PlacedTemplate]:
    """Pipelines of unlike stages, some several times, with all TP degrees and inner replicas."""
    while True:
        parts = []
        for _ in range(rng.randint(1, 3)):
            count = rng.randint(1, min(3, MODEL.num_layers))
            cuts = sorted(rng.sample(range(1, MODEL.num_layers), count - 1))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, MODEL.num_layers])]
            stages = tuple(
                StageTemplate(rng.randint(0, 1), rng.choice([1, 1, 2]), rng.choice([1, 1, 2]), n) for n in sizes
            )
            parts.append(PipelineReplicas(PipelineTemplate(2, stages), rng.randint(1, 2), rng.randint(1, 40)))
        candidate = PlanTemplate(tuple(parts), "1f1b", rng.choice(["stage", "pipeline"])).merged()
        usage = candidate.usage(2)
        placed = place(candidate, scorer.pool) if all(n <= m for n, m in zip(usage, scorer.pool.counts)) else None
        if placed is not None:
            return candidate, placed


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES, LINK), min_size=2, max_size=5), st.integers(30, 90))
def test_rounds_that_repeat_are_skipped(rows: list[tuple[float, float, Link]], m: int) -> None:
    f, b, x = (list(column) for column in zip(*rows))
    there, back = ([link[i] for link in x[:-1]] for i in (0, 1))
    exact = simulate(lower(generate("1f1b", len(f), m)), Costs(f, b, there, link_back=back)).step_seconds
    assert seconds(f, b, x[:-1], m) == pytest.approx(exact, rel=1e-10)


def test_ten_thousand_rounds_take_no_longer_than_a_hundred() -> None:
    """By what a stage that limits takes per micro-batch, counted, not timed."""
    few, many = (seconds([1.0, 1.5, 1.2], [2.0, 2.5, 2.2], [(0.1, 0.1), (0.3, 0.3)], m) for m in (100, 10_100))
    assert many - few == pytest.approx(10_000 * 4.0, rel=1e-9)


@pytest.mark.parametrize("schedule", schedule_names())
def test_micro_batches_in_flight_are_the_schedules(schedule: str) -> None:
    for stages in range(1, 7):
        for m in range(1, 30):
            assert in_flight(schedule, stages, m) == of_schedule(generate(schedule, stages, m))


@pytest.mark.parametrize("seed", range(6))
def test_flows_by_class_are_those_of_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    cluster = there()
    scorer = make_scorer(PlanningProblem(MODEL, cluster, SEQ, 1))
    _, placed = random_candidate(rng, scorer)
    plan = to_plan(placed, cluster, SEQ, MODEL.num_heads)
    network = LinkModel(scorer.costs.rates)
    structure = SyncStructure(plan, scorer.costs)
    held: dict[int, int] = defaultdict(int)
    owned: dict[int, int] = defaultdict(int)
    for bucket in structure.buckets:
        pairs: dict[tuple[int, int], int] = defaultdict(int)
        for name, layout in bucket.holders.items():
            for piece in reduction(layout, bucket.owners[name]).pieces:
                pairs[piece.src, piece.dst] += piece.box.size
            for rank in bucket.ranks:
                held[rank] += layout.elements(rank)
                owned[rank] += bucket.owners[name].elements(rank)
        flows = bucket_flows(bucket, structure.at(bucket))
        for i, rank in enumerate(bucket.ranks):
            assert flows.given[i] == sum(n for (a, b), n in pairs.items() if a == rank != b)
            assert flows.taken[i] == sum(n for (a, b), n in pairs.items() if b == rank != a)
            assert flows.owned[i] == pairs.get((rank, rank), 0)
        for spread in (False, True):
            mine = port_traffic(flows, structure.places, spread)
            each = [(b, a, float(n)) if spread else (a, b, float(n)) for (a, b), n in pairs.items()]
            old, new = network.exchange(each, collective="all_to_all"), price(mine, 1.0, network)
            assert new.seconds == pytest.approx(old.seconds) and new.latency == old.latency
            assert new.link == pytest.approx(old.link)
            busy = {_number(port, structure.places): seconds for port, seconds in old.ports.items()}
            assert dict(zip(new.ports.tolist(), new.busy.tolist())) == pytest.approx(busy)
    places: PortIndex = structure.places
    assert dict(zip(places.ranks.tolist(), structure.held.tolist())) == held
    assert dict(zip(places.ranks.tolist(), structure.owned.tolist())) == owned


def _number(port: Port, places: PortIndex) -> int:
    """Two ports per rank, out and in, then two per node."""
    end, where = port
    at = len(places.ranks) + places.nodes[where] if isinstance(where, str) else places.index[where]
    return 2 * at + (end == "in")


def test_hosts_in_arrays_are_hosts() -> None:
    rng = np.random.default_rng(0)
    hosts, plain = RankHosts(3), [RankHost() for _ in range(3)]
    for bucket in range(12):
        at = np.flatnonzero(rng.random(3) < 0.7)
        ready, pack, after, end = rng.random(len(at)) * 9, rng.random(len(at)), rng.random(len(at)), rng.random() * 9
        sent = hosts.start(at, bucket, ready, pack)
        assert sent == pytest.approx([plain[r].send(t, p) for r, t, p in zip(at, ready, pack)])
        hosts.travel(at, bucket, end, after)
        for r, seconds_ in zip(at, after):
            plain[r].under_way.append((end, seconds_))
    assert hosts.finish(np.ones(3)) == pytest.approx([host.finish(1.0) for host in plain])


@pytest.mark.parametrize("seed", range(12))
def test_a_prediction_says_which_plans_fit(seed: int) -> None:
    """Against the memory of every rank of the placed plan."""
    rng = random.Random(seed)
    cluster = there(3)
    scorer = make_scorer(PlanningProblem(MODEL, cluster, SEQ, 1))
    costs = scorer.costs
    _, placed = random_candidate(rng, scorer)
    plan = to_plan(placed, cluster, SEQ, MODEL.num_heads)
    validate(plan, MODEL, cluster, dtype="bf16")
    needs = estimate_memory(plan, MODEL, "bf16")
    chips = {r: cluster.ranks[r].chip for r in plan.ranks}
    exact = max(m.total + costs.overhead(chips[r]) - costs.memory_limit(chips[r]) for r, m in needs.items())
    assert bool(predict(plan, MODEL, cluster, "bf16", costs).over) == (exact > 0)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_of_a_candidate_is_not_above_its_score(seed: int) -> None:
    rng = random.Random(seed)
    scorer = make_scorer(PlanningProblem(MODEL, there(3), SEQ, 1))
    for _ in range(12):
        candidate, placed = random_candidate(rng, scorer)
        score = scorer.score(candidate)
        assert score is not None and score == scorer.score_placed(placed)
        assert scorer.bounds.lower_bound(candidate) <= score.step_seconds * (1 + 1e-9)
        cut, whole = scorer.score(candidate, 0.0), scorer.score(candidate, score.step_seconds * (1 + 1e-9))
        assert cut is not None and cut.step_seconds <= score.step_seconds * (1 + 1e-9) and whole == score


def test_memory_is_that_of_the_buckets() -> None:
    """Bucket by bucket and rank by rank, against arrays."""
    cluster = there()
    scorer = make_scorer(PlanningProblem(MODEL, cluster, SEQ, 1))
    _, placed = random_candidate(random.Random(3), scorer)
    plan = to_plan(placed, cluster, SEQ, MODEL.num_heads)
    weights: dict[int, int] = defaultdict(int)
    optimizer: dict[int, int] = defaultdict(int)
    for bucket in make_buckets(plan, MODEL):
        for name, layout in bucket.holders.items():
            for rank in bucket.ranks:
                weights[rank] += 2 * layout.elements(rank)
                optimizer[rank] += 12 * bucket.owners[name].elements(rank)
    for rank, memory in estimate_memory(plan, MODEL, "bf16").items():
        assert (memory.weights, memory.optimizer) == (weights[rank], optimizer[rank])
