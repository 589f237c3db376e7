"""Chips of unlike vendors in a cluster file: messages cost what the bridge does, and no layer's group crosses it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.cluster import BRIDGE_RATE, BRIDGE_SMALLEST_CHUNK, CHIPS, Cluster, cluster_from_dict
from hetero_megatron.cluster.dump import document
from hetero_megatron.errors import UserError
from hetero_megatron.plans.islands import add_islands, replicas
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.predictor.cost.link_model import capped_bridges
from hetero_megatron.predictor.cost.rates import LINK_BANDWIDTH
from hetero_megatron.spec import load_model
from hetero_megatron.training.rank_platform import transport_of
from tests.support.planner_reference import Case, random_case
from tests.support.selection import each, quick
from tests.unit.planner.test_host_staged import search_as_good_as_exhaustive, seconds
from tests.unit.training.test_islands_of_vendors import one_stage, plan

SPEEDS = {"A100-80-SXM": 40e9, "MI300X": 10e9, "MetaX-C500": 25e9}  # of host links, as written here
WIRE, LATENCY = 20e9, 10e-6


def unlike(per_node: int = 1, chips: tuple[str, ...] = tuple(SPEEDS), **link: Any) -> Cluster:
    """A node of each chip; all links between nodes are alike."""
    nodes = [{"name": chip[:2], "chip": chip, "chips_per_node": per_node} for chip in chips]
    hosts = {chip: {"host_bandwidth": f"{SPEEDS[chip] / 1e9} GB/s"} for chip in chips}
    inter = {"bandwidth": f"{WIRE / 1e9} GB/s", "latency": f"{1e6 * LATENCY} us", **link}
    return cluster_from_dict({"nodes": nodes, "chips": hosts, "links": {"inter_node": inter}})


@pytest.mark.parametrize(("a", "b", "slowest"), [(0, 1, 10e9), (1, 0, 10e9), (0, 2, 20e9), (1, 2, 10e9)])
def test_a_bridge_is_as_fast_as_its_slowest_part(a: int, b: int, slowest: float) -> None:
    """After the copies of the first chunk; what is not said is the bridge."""
    hosts = list(SPEEDS.values())
    first = BRIDGE_SMALLEST_CHUNK / hosts[a] + BRIDGE_SMALLEST_CHUNK / hosts[b]
    expected = 1e9 / min(slowest * LINK_BANDWIDTH, BRIDGE_RATE) + first + LATENCY
    flows = [(a, b, 1e9)]
    assert seconds(unlike(), flows) == pytest.approx(expected, rel=1e-9)
    assert seconds(unlike(transport="bridge"), flows) == pytest.approx(expected, rel=1e-9)
    assert seconds(unlike(transport="direct"), flows) == pytest.approx(1e9 / 16e9 + LATENCY, rel=1e-9)


@each("seed", range(20))
def test_of_three_ways_direct_is_the_fastest_and_whole_copies_the_slowest(seed: int) -> None:
    rng = random.Random(seed)
    per_node = rng.choice([1, 2, 4])
    ranks = range(3 * per_node)
    flows = [(rng.choice(ranks), rng.choice(ranks), rng.uniform(1e8, 1e9)) for _ in range(rng.randint(1, 9))]
    ways = ("direct", "bridge", "host-staged")
    direct, bridge, staged = (seconds(unlike(per_node, transport=way), flows) for way in ways)
    assert direct <= bridge <= staged


def test_one_vendor_is_direct_and_so_is_what_nothing_is_known_of() -> None:
    nodes = [{"name": "a", "chip": "A100-80-SXM"}, {"name": "h", "chip": "H100-SXM"}, {"name": "o", "chip": "own"}]
    own: dict[str, Any] = {"memory": "8 GiB", "tflops": {"bf16": 100}, "memory_bandwidth": "1 TB/s"}
    data = {"nodes": nodes, "chips": {"own": own}, "links": {"inter_node": {"bandwidth": "20 GB/s"}}}
    cluster = cluster_from_dict(data)
    assert {cluster.library_of(r) for r in range(3)} == {cluster.library_of(0)}
    own["vendor"] = "AMD"
    with pytest.raises(UserError, match=r"a and o are of unlike vendors.*how fast chip own reaches its host"):
        cluster_from_dict(data)
    own["host_bandwidth"] = "10 GB/s"
    cluster = cluster_from_dict(data)
    assert cluster.library_of(0) == cluster.library_of(1) != cluster.library_of(2)
    assert cluster_from_dict(document(cluster)).chips == cluster.chips
    del own["vendor"]
    own["emulate"] = {"speed": 0.5}
    assert cluster_from_dict(data).library_of(2) == 0, "a core of this machine"


def test_a_direct_link_joins_vendors() -> None:
    nodes = [{"name": chip[:2], "chip": chip} for chip in SPEEDS]
    pairs = [{"between": ["A1", "Me"], "bandwidth": "20 GB/s", "transport": "direct"}]
    links = {"inter_node": {"bandwidth": "20 GB/s"}, "pairs": pairs}
    cluster = cluster_from_dict({"nodes": nodes, "links": links})
    assert cluster.library_of(0) == cluster.library_of(2) != cluster.library_of(1)


def test_the_catalogue_names_vendors_as_plugins_do() -> None:
    assert {chip.vendor for chip in CHIPS.values()} <= {p.vendor for p in load_plugins().platforms.values()}
    assert {CHIPS[c].vendor for c in ("H20", "GH200-96", "T4", "V100-16-SXM2", "RTX3090", "L4")} == {"NVIDIA"}
    assert CHIPS["Hygon-K100"].vendor == "Hygon" and CHIPS["Ascend-910B"].vendor == "Huawei"


def test_gradients_are_summed_in_a_vendor_s_ranks_first_and_no_layer_s_group_has_two_vendors() -> None:
    cluster, model = unlike(2, ("A100-80-SXM", "MI300X")), load_model("tiny")
    four = plan(*(one_stage(r) for r in range(4)))
    assert add_islands(four, model, cluster).islands == ((0, 1), (2, 3))
    assert add_islands(replace(four, islands=((0, 2), (1, 3))), model, cluster).islands == ((0,), (1,), (2,), (3,))
    direct = unlike(2, ("A100-80-SXM", "MI300X"), transport="direct")
    assert add_islands(plan(one_stage(0), one_stage(1, 2, tp=2)), model, direct).ranks == (0, 1, 2)
    halves = [{"ranks": [r], "tokens": [8], "heads": [8]} for r in (1, 2)]
    for group in (one_stage(1, 2, tp=2), one_stage(1, 2, context=halves)):
        with pytest.raises(UserError, match=r"rank 1 \(A100-80-SXM\) and rank 2 \(MI300X\) have no communication libr"):
            add_islands(plan(one_stage(0), group), model, cluster)
        assert add_islands(plan(one_stage(0), group, allow_bridge=True), model, cluster).allow_bridge


def test_a_link_that_is_written_to_use_the_bridge_forces_it() -> None:
    assert transport_of("auto", unlike(transport="bridge")) == "bridge"
    assert transport_of("auto", unlike()) == "auto" == transport_of("auto", None)


def of_vendors(case: Case, seed: int) -> Case:
    """The same with chips of two vendors, whose host links are slow."""
    rng = random.Random(seed)
    names = sorted(case.cluster.chips)
    chips = {
        n: replace(case.cluster.chips[n], vendor="AB"[i % 2], host_bandwidth=rng.choice([0.5, 2, 15]) * 1e9)
        for i, n in enumerate(names)
    }
    return replace(case, cluster=replace(case.cluster, chips=chips))


UNLIKE = [i for i in range(100, 160) if len({g.chip for g in random_case(i, "open").cluster.nodes}) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(UNLIKE[:12], UNLIKE[:2], UNLIKE[2:6]))
def test_plans_over_vendors(seed: int) -> None:
    """As good as exhaustive search, no better than over one vendor's links, and without groups that cross."""
    plain = random_case(seed, "open")
    case = of_vendors(plain, seed)
    if (found := search_as_good_as_exhaustive(case)) is None:
        return
    result, *_ = found
    library = case.cluster.library_of
    for choice in (result.best, *result.others):
        assert all(len({library(r) for r in group}) == 1 for group in replicas(choice.plan))
        assert add_islands(choice.plan, case.model, case.cluster) == choice.plan


def test_what_nobody_measured_of_a_bridge_is_capped_and_said() -> None:
    (said, *_) = capped_bridges(unlike())
    assert "8 GB/s per pair of ranks (4 connections), not the link's 20 GB/s" in said
    assert capped_bridges(unlike(bandwidth="5 GB/s")) == [] and capped_bridges(unlike(transport="direct")) == []
