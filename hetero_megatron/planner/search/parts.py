"""Parts of a cluster that may be faster than the whole, searched as clusters of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, Proposer
from hetero_megatron.planner.search.local_search import LocalSearch
from hetero_megatron.planner.search.pipeline_dp import PipelineDP, Programs
from hetero_megatron.planner.search.program_inputs import ProgramInputs
from hetero_megatron.planner.search.small_clusters import SmallClusters
from hetero_megatron.planner.search.uniform import UniformSeeds
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PlanTemplate

MANY = 24  # chips up to which parts without single nodes are tried
Counts = tuple[int, ...]  # chips per group, of whole nodes


class Parts:
    """Proposes plans on parts of the chips where their work alone does not rule them out. Programs over all chips rank
    them worse than they turn out after local search, and never leave a stage fewer chips than there are for it. Parts
    are each chip type, each group of nodes, a node of each group, one node, and, of up to ``MANY`` chips, the whole
    with fewer nodes of one group, and then, as long as that is faster, what the best plan uses with fewer.

    Args:
        polished: the incumbent whose scorer local search uses; None: that of :meth:`propose`.
    """

    def __init__(self, polished: Incumbent | None = None) -> None:
        self.polished = polished

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        pool = incumbent.scorer.pool
        single_parts = self._alone(pool)
        if not all(self._try(problem, incumbent, counts) for counts in single_parts):
            return False
        largest, best_before, tried = pool.counts, math.inf, set(single_parts)
        while incumbent.seconds < best_before and pool.chips <= MANY:
            best_before, parts = incumbent.seconds, [x for x in self._with_fewer_nodes(pool, largest) if x not in tried]
            tried.update(parts)
            if not all(self._try(problem, incumbent, counts) for counts in parts):
                return False
            largest = self._nodes_of(incumbent.rows[0][2], pool) if incumbent.rows else largest
        return True

    @staticmethod
    def _alone(pool: DevicePool) -> list[Counts]:
        """Each chip type, each group, one node of each group, and one node."""
        groups, nodes = pool.groups, [g.per_node for g in pool.groups]
        parts = [tuple(g.chips * (g.chip == chip) for g in groups) for chip in sorted({g.chip for g in groups})]
        parts += [tuple(n * (h == g) for h, n in enumerate(pool.counts)) for g in range(len(groups))]
        parts += [tuple(nodes), *(tuple(n * (h == g) for h, n in enumerate(nodes)) for g in range(len(groups)))]
        return [part for part in dict.fromkeys(parts) if part != pool.counts and sum(part) > 1]

    @staticmethod
    def _with_fewer_nodes(pool: DevicePool, counts: Counts) -> Iterator[Counts]:
        """Of one group: one node less, one node, none."""
        for g, group in enumerate(pool.groups):
            for chips_left in sorted(
                {max(counts[g] - group.per_node, 0), min(counts[g], group.per_node), 0}, reverse=True
            ):
                part = tuple(chips_left if h == g else n for h, n in enumerate(counts))
                if part != counts and sum(part) > 1:
                    yield part

    @staticmethod
    def _nodes_of(template: PlanTemplate, pool: DevicePool) -> Counts:
        """Chips of the nodes that a template needs at least."""
        used = template.usage(len(pool.groups))
        return tuple(-(-used[g] // group.per_node) * group.per_node for g, group in enumerate(pool.groups))

    def _try(self, problem: PlanningProblem, incumbent: Incumbent, counts: Counts) -> bool:
        if incumbent.rows:
            programs = Programs(ProgramInputs(problem, incumbent.scorer, counts))
            if any(bound() >= incumbent.seconds for bound in (programs.least_work_seconds, programs.least_seconds)):
                return True
        of_part = Incumbent(problem, incumbent.scorer, incumbent.budget, keep=incumbent.keep, part_of=incumbent)
        polished = of_part.on((self.polished or incumbent).scorer)
        proposers: list[Proposer] = [PipelineDP(counts), LocalSearch()]
        if self.polished is None:  # with optimizers on the chips
            proposers = [UniformSeeds(counts), *proposers, SmallClusters(counts)]
        try:
            complete = all(x.propose(problem, polished if isinstance(x, LocalSearch) else of_part) for x in proposers)
        finally:
            for seconds, _, template in of_part.rows:
                incumbent.take(template, seconds)
        return complete and not incumbent.should_stop()
