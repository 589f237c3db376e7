"""Links whose messages go through the hosts of sender and receiver, as the planner prices them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.cluster import CHIPS, Cluster, cluster_from_dict
from hetero_megatron.cluster.dump import document
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import work_bound
from hetero_megatron.planner.estimate.template_score import TemplateScorer, make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.plans import plan_from_dict, validate
from hetero_megatron.plans.islands import divisions
from hetero_megatron.predictor.cost.link_model import LinkModel
from hetero_megatron.predictor.cost.rates import LINK_BANDWIDTH, load_rates
from hetero_megatron.predictor.simulate.step import predict
from tests.distributed.parallel.test_islands import SPEC, replicas
from tests.support.planner_reference import Case, Exhaustive, random_case
from tests.support.selection import each, quick

SPEEDS = {"A100-80-SXM": 40e9, "MI300X": 10e9}  # of host links, as written here


def two(per_node: int, transport: str, **rates: Any) -> Cluster:
    """Two nodes of unlike vendors."""
    nodes = [{"name": chip[0], "chip": chip, "chips_per_node": per_node} for chip in SPEEDS]
    pair = {"between": ["A", "M"], "bandwidth": "20 GB/s", "latency": "10 us", "transport": transport}
    chips = {chip: {"host_bandwidth": f"{speed / 1e9} GB/s"} for chip, speed in SPEEDS.items()}
    data = {"version": 1, "nodes": nodes, "chips": chips, "links": {"pairs": [pair]}, **rates}
    return cluster_from_dict(data)


def seconds(cluster: Cluster, flows: list[tuple[int, int, float]]) -> float:
    found = LinkModel(load_rates(cluster, "bf16")).exchange(flows)
    return found.seconds + found.latency


@pytest.mark.parametrize("per_node", [1, 4])
def test_a_message_crosses_three_links_one_after_the_other(per_node: int) -> None:
    """Alone; and of all chips of a node at a time, which share the network but not their host links."""
    cluster, n = two(per_node, "host-staged"), 1e9
    for a, b in ((0, per_node), (per_node, 0)):
        alone = (n / 40e9 + n / 20e9 + n / 10e9) / LINK_BANDWIDTH + 10e-6
        assert seconds(cluster, [(a, b, n)]) == pytest.approx(alone, rel=1e-12)
    together = (n / 40e9 + per_node * n / 20e9 + n / 10e9) / LINK_BANDWIDTH + 10e-6
    assert seconds(cluster, [(i, per_node + i, n) for i in range(per_node)]) == pytest.approx(together, rel=1e-12)


@each("seed", range(40))
def test_through_hosts_is_never_faster(seed: int) -> None:
    rng = random.Random(seed)
    per_node = rng.choice([1, 2, 4])
    ranks = range(2 * per_node)
    flows = [(rng.choice(ranks), rng.choice(ranks), rng.uniform(1e3, 1e9)) for _ in range(rng.randint(1, 12))]
    staged, direct = (seconds(two(per_node, way), flows) for way in ("host-staged", "direct"))
    crossing = [size for a, b, size in flows if (a < per_node) != (b < per_node)]
    assert staged >= direct
    if crossing:  # the largest of them takes all three at least
        assert staged >= max(crossing) * (1 / 40e9 + 1 / 20e9 + 1 / 10e9) / LINK_BANDWIDTH
    else:
        assert staged == direct


def test_measured_rates_win() -> None:
    link = {"between": ["A", "M"], "alpha": 1e-5, "beta": 1e-10}
    staged, direct = (two(2, way, rates={"links": [link]}) for way in ("host-staged", "direct"))
    assert seconds(staged, [(0, 2, 1e9)]) == seconds(direct, [(0, 2, 1e9)]) == pytest.approx(0.1 + 1e-5)


def test_inside_a_node() -> None:
    """As chips on PCIe that cannot reach one another: each has its own links."""
    data: dict[str, Any] = {"nodes": [{"name": "n", "chip": "L40S", "chips_per_node": 2}]}
    data["links"] = {"intra_node": {"bandwidth": "20 GB/s", "latency": "10 us", "transport": "host-staged"}}
    host = CHIPS["L40S"].host_bandwidth
    assert host is not None and host == pytest.approx(31.5e9, rel=1e-3)
    expected = 1e9 * (1 / 20e9 + 2 / host) / LINK_BANDWIDTH + 10e-6
    assert seconds(cluster_from_dict(data), [(0, 1, 1e9)]) == pytest.approx(expected, rel=1e-12)


def test_it_survives_being_written() -> None:
    cluster = two(2, "host-staged")
    again = cluster_from_dict(document(cluster))
    assert again.pairs == cluster.pairs and again.chips == cluster.chips
    assert next(iter(again.pairs.values())).transport == "host-staged"


def test_islands_are_cut_along_staged_links() -> None:
    """All links between nodes have one bandwidth; what goes through hosts is slower."""
    for way, found in (("direct", []), ("host-staged", [((0, 1), (2, 3))])):
        data = {
            "nodes": [{"name": n, "chip": c, "count": 2} for n, c in (("a", "A100-80-SXM"), ("m", "MI300X"))],
            "links": {
                "inter_node": {"bandwidth": "25 GB/s"},
                "pairs": [{"between": ["a", "m"], "bandwidth": "25 GB/s", "transport": way}],
            },
        }
        cluster = cluster_from_dict(data)
        assert divisions(plan_from_dict(replicas(4), SPEC).ranks, cluster) == found


def staged(case: Case, seed: int) -> Case:
    """The same with all links between nodes through hosts."""
    rng = random.Random(seed)
    assert case.cluster.inter_node is not None
    link = replace(case.cluster.inter_node, transport="host-staged")
    chips = {n: replace(c, host_bandwidth=rng.choice([0.5, 2, 15]) * 1e9) for n, c in case.cluster.chips.items()}
    return replace(case, cluster=replace(case.cluster, inter_node=link, chips=chips))


def search_as_good_as_exhaustive(case: Case) -> tuple[SearchResult, TemplateScorer, float, float] | None:
    """(result, scorer, its best seconds, those of exhaustive search) of a search, asserted to be within 1 % of that
    and to have a bound that holds; None where nothing fits."""
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    options = SearchOptions(space=SearchSpace(offload="never", more_schedules="never", weights="never"))
    problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, options)
    try:
        result = search(problem, scorer=scorer)
    except UserError:
        return None
    mine = min(s.step_seconds for c in (result.best, *result.others) if (s := scorer.score(c.template)))
    best = Exhaustive(case, scorer, mine).run()
    assert work_bound(scorer, case.model, case.batch) <= best and mine <= 1.01 * best
    return result, scorer, mine, best


SEVERAL_NODES = [i for i in range(100, 140) if sum(g.count for g in random_case(i, "open").cluster.nodes) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(SEVERAL_NODES[:12], SEVERAL_NODES[:2], SEVERAL_NODES[2:6]))
def test_plans_over_staged_links(seed: int) -> None:
    """As good as exhaustive search; bounds hold; the plan is never predicted faster than over direct links."""
    plain = random_case(seed, "open")
    case = staged(plain, seed)
    if (found := search_as_good_as_exhaustive(case)) is None:
        return
    result, scorer, mine, best = found
    for choice in (result.best, *result.others):
        plan = validate_on(choice.plan, plain)
        assert predict(plan, case.model, plain.cluster).step_seconds <= choice.step_seconds
        score = scorer.score(choice.template)
        assert score is not None and score.step_seconds == pytest.approx(choice.step_seconds, rel=0.06)
        assert scorer.bounds.lower_bound(choice.template) <= score.step_seconds * (1 + 1e-9)


def validate_on(plan: Any, case: Case) -> Any:
    validate(plan, case.model, case.cluster, dtype="bf16")
    return replace(plan)


@pytest.mark.parametrize(("tp", "per_node"), [(1, 4), (2, 4), (1, 1)])
def test_the_search_prices_a_boundary_as_prediction_does(tp: int, per_node: int) -> None:
    """One chip's message to one other; two chips' at a time."""
    cluster, model = two(per_node, "host-staged"), random_case(0, "open").model
    scorer = make_scorer(PlanningProblem(model, cluster, 1024, 1))
    size = 1024 * model.hidden_size * 2 / tp
    for here, there in ((0, 1), (1, 0)):
        a, b = (StageTemplate(g, tp, 1) for g in (here, there))
        flows = [(here * per_node + t, there * per_node + t, size) for t in range(tp)]
        found = scorer.tables.boundary(a, b, 1, False)[0]
        assert found == pytest.approx(seconds(cluster, flows), rel=1e-9) and math.isfinite(found)
