"""More chips are never worse: no part of a cluster, by number of nodes, has a faster plan than the whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.subset import without
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.spec import ModelSpec, load_model
from tests.support.planner_reference import Case, random_case
from tests.support.selection import quick

OPTIONS = SearchOptions(space=SearchSpace(more_schedules="never"))
LARGER = (  # (chip, nodes, chips of each) by group, model, batch, parts by nodes: slow links make a part the fastest
    ((("RTX4090", 2, 4),), "gpt2", 48, ((1,),)),
    ((("H100-SXM", 3, 4), ("H100-SXM", 3, 1)), "llama2-7b", 32, ((3, 0), (3, 1))),  # groups of one chip type
    ((("H100-SXM", 1, 2), ("RTX4090", 3, 2)), "llama2-7b", 48, ((1, 1),)),  # a node of each
)


def _seconds(case: Case, cluster: Cluster) -> float:
    try:
        return search(PlanningProblem(case.model, cluster, case.seq_length, case.batch, OPTIONS)).best.step_seconds
    except UserError:
        return math.inf


def _parts(cluster: Cluster) -> list[Cluster]:
    """All with fewer nodes, at least one."""
    have, found = [group.count for group in cluster.nodes], []
    for counts in itertools.product(*(range(n + 1) for n in have)):
        if any(counts) and list(counts) != have:
            gone = [
                f"{group.name}-{i}" if group.count > 1 else group.name
                for group, n in zip(cluster.nodes, counts) for i in range(n, group.count)
            ]  # fmt: skip
            found.append(without(cluster, gone))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(range(16), (1, 3), (4, 6, 9)))
def test_no_part_of_a_cluster_is_faster(seed: int) -> None:
    """Of 1 to 6 chips in up to three groups of nodes."""
    case = random_case(seed, "fixed" if seed % 5 == 0 else "open")
    whole = _seconds(case, case.cluster)
    for part in _parts(case.cluster):
        assert whole <= _seconds(case, part) * (1 + 1e-9), [(g.name, g.count) for g in part.nodes]


@pytest.mark.parametrize("case", quick(LARGER, [], LARGER[:1]))
def test_no_part_of_a_larger_cluster_is_faster(case: tuple[Any, str, int, Any]) -> None:
    groups, model, batch, parts = case

    def seconds(counts: tuple[int, ...]) -> float:
        nodes = [
            {"name": f"n{i}", "chip": chip, "count": count, "chips_per_node": size}
            for i, ((chip, _, size), count) in enumerate(zip(groups, counts)) if count
        ]  # fmt: skip
        link = {"bandwidth": "1 GB/s", "latency": "20 us"}
        cluster = cluster_from_dict({"nodes": nodes, "links": {"inter_node": link}})
        return search(PlanningProblem(load_model(model), cluster, 1024, batch, OPTIONS)).best.step_seconds

    whole = seconds(tuple(count for _, count, _ in groups))
    assert all(whole <= seconds(part) * (1 + 1e-9) for part in parts)


def test_parts_whose_chips_have_no_room() -> None:
    """A cluster for which nothing fits is refused, not ended by a part of it."""
    chips = {
        name: {"memory": f"{size} GiB", "tflops": {"bf16": 40, "fp32": 40}, "memory_bandwidth": "1 TB/s",
               "communicators": {"each": "1 B", "peer": "1 B"}}
        for name, size in (("a", 10), ("b", 20))
    }  # fmt: skip
    nodes = [{"name": name, "chip": name, "count": 2} for name in chips]
    link = {"bandwidth": "10 GB/s", "latency": "10 us"}
    cluster = cluster_from_dict({"nodes": nodes, "chips": chips, "links": {"inter_node": link}})
    model = ModelSpec("small", "llama", 48, 1024, 4096, 1, 1, 1024, 8000, 1 << 20)
    options = SearchOptions(space=SearchSpace(more_schedules="never", context="never"))
    with pytest.raises(UserError, match="fits in no plan"):
        search(PlanningProblem(model, cluster, 262144, 2, options))
