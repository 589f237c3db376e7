"""More chips are never worse: no part of a cluster, by number of nodes, has a faster plan than the whole."""

from __future__ import annotations

import itertools
import math

import pytest

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import without
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.template.search_space import SearchSpace
from tests.support.planner_reference import Case, random_case
from tests.support.selection import quick


def _seconds(case: Case, cluster: Cluster) -> float:
    options = SearchOptions(space=SearchSpace(more_schedules="never"))
    try:
        return search(PlanningProblem(case.model, cluster, case.seq_length, case.batch, options)).best.step_seconds
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


@pytest.mark.parametrize("seed", quick(range(16), (1, 3, 4, 6)))
def test_no_part_of_a_cluster_is_faster(seed: int) -> None:
    """Of 1 to 6 chips in up to three groups of nodes."""
    case = random_case(seed, "fixed" if seed % 5 == 0 else "open")
    whole = _seconds(case, case.cluster)
    for part in _parts(case.cluster):
        assert whole <= _seconds(case, part) * (1 + 1e-9), [(g.name, g.count) for g in part.nodes]
