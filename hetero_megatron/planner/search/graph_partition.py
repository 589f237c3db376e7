"""Clusters with many kinds of nodes: cut into islands along slow links, plan each island, run them side by side.

As in HexiScale, node groups are vertices weighted by compute speed and edges are weighted by bandwidth. METIS (pymetis,
optional) cuts the graph into islands of about equal speed along slow links. Pipelines lie inside islands; only
gradients cross them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.materialize import PipelineOutline
from hetero_megatron.planner.search.pipeline_dp import PipelineDP
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import StageTemplate

MOST_GROUPS = 6  # per search: its dynamic programs enumerate all subsets of groups


def islands(pool: DevicePool, speeds: list[float], count: int, seed: int) -> list[list[int]]:
    """Partition the groups into ``count`` islands.

    Args:
        speeds: layers per second of a chip of each group.

    Raises:
        UserError: pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError:
        raise UserError(
            f"the cluster has {len(pool.groups)} unlike node groups, which takes graph partitioning", field="--cluster",
            accepted=f"pip install pymetis, or at most {MOST_GROUPS} kinds of nodes",
        ) from None  # fmt: skip
    size = len(pool.groups)
    fastest = max(link.bandwidth for row in pool.inter for link in row if link is not None)
    neighbours, offsets, weights = [], [0], []
    for g in range(size):
        for h in range(size):
            links = [link for link in (pool.inter[g][h], pool.inter[h][g]) if link is not None]
            if g != h and links:  # METIS' edges have no direction
                neighbours.append(h)
                weights.append(max(1, round(1000 * min(link.bandwidth for link in links) / fastest)))
        offsets.append(len(neighbours))
    vertices = [max(1, round(1000 * s * n / max(speeds))) for s, n in zip(speeds, pool.counts)]
    adjacency = pymetis.CSRAdjacency(offsets, neighbours)
    options = pymetis.Options(seed=seed)
    _, island_of = pymetis.part_graph(count, adjacency, vweights=vertices, eweights=weights, options=options)
    members: list[list[int]] = [[] for _ in range(count)]
    for g, i in enumerate(island_of):
        members[i].append(g)
    return [groups for groups in members if groups]


class GraphPartition:
    """Searches each island alone and proposes their best pipelines side by side."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        for outlines in self._proposals(problem, incumbent):
            if incumbent.should_stop():
                return False
            for template in incumbent.builder.templates(outlines, "1f1b"):
                incumbent.offer(template)
        return not incumbent.should_stop()

    def _proposals(self, problem: PlanningProblem, incumbent: Incumbent) -> Iterator[list[PipelineOutline]]:
        """For several numbers of islands and METIS seeds: the best pipelines of each island."""
        pool = incumbent.scorer.pool
        speeds = [1 / layer_seconds(incumbent.scorer, g) for g in range(len(pool.groups))]
        total_speed = sum(s * n for s, n in zip(speeds, pool.counts))
        fewest_islands = math.ceil(len(pool.groups) / MOST_GROUPS)
        proposed: set[frozenset[tuple[object, ...]]] = set()
        for count in range(max(2, fewest_islands), min(len(pool.groups), fewest_islands + 3) + 1):
            for turn in range(2):
                rows: list[PipelineOutline] = []
                for groups in islands(pool, speeds, count, problem.options.seed + turn):
                    for start in range(0, len(groups), MOST_GROUPS):
                        island = groups[start : start + MOST_GROUPS]
                        share = sum(speeds[g] * pool.counts[g] for g in island) / total_speed
                        batch = max(1, round(problem.global_batch_size * share))
                        rows += self._island(problem.with_batch(batch), incumbent, island)
                key = frozenset((r.stages, r.size, r.copies) for r in rows)
                if rows and key not in proposed:
                    proposed.add(key)
                    yield rows

    @staticmethod
    def _island(problem: PlanningProblem, incumbent: Incumbent, groups: list[int]) -> list[PipelineOutline]:
        """Pipelines of the best plan of one island for its share of the batch; none when the model does not fit."""
        island_best = Incumbent(
            problem, incumbent.scorer.restricted(groups), incumbent.budget, keep=1, part_of=incumbent
        )
        PipelineDP().propose(problem, island_best)
        return [
            PipelineOutline(
                tuple(StageTemplate(groups[s.group], s.tp, s.dp) for s in part.shape.stages),
                part.shape.micro_batch_size,
                part.copies,
            )
            for _, _, template in island_best.rows
            for part in template.parts
        ]


def layer_seconds(scorer: TemplateScorer, group: int, size: int = 1) -> float:
    """Forward and backward seconds of one layer and a micro-batch of ``size`` sequences on one chip of the group."""
    one_layer, two_layers = (scorer.stage(StageTemplate(group, 1, 1, n), size, False, False) for n in (1, 2))
    return two_layers.forward + two_layers.backward - one_layer.forward - one_layer.backward
