"""Plans with optimizers in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS, GraphPartition
from hetero_megatron.planner.search.incumbent import Incumbent, Proposer
from hetero_megatron.planner.search.local_search import LocalSearch
from hetero_megatron.planner.search.pipeline_dp import EachTypeDP, PipelineDP

EVERY_SUBSET = 3  # up to so many chip types, every subset is tried


class Offloaded:
    """Proposes plans with the optimizers of all, then of some chip types in host memory, then moves single stages."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        pool = incumbent.scorer.pool
        many, chips = len(pool.groups) > MOST_GROUPS, sorted({g.chip for g in pool.groups})
        for away in self._sets(chips):
            there = incumbent.on(incumbent.scorer.offloading(away))
            proposers: list[Proposer] = [GraphPartition() if many else PipelineDP()]
            if len(away) == len(chips) and not many:  # results for single types do not depend on the set
                proposers.append(EachTypeDP(incumbent))
            if not all(proposer.propose(problem, there) for proposer in proposers):
                return False
        return LocalSearch().propose(problem, incumbent)

    @staticmethod
    def _sets(chips: Sequence[str]) -> list[frozenset[str]]:
        counts = range(len(chips), 0, -1) if len(chips) <= EVERY_SUBSET else (len(chips), 1)
        return [frozenset(x) for n in counts for x in itertools.combinations(chips, n)]
