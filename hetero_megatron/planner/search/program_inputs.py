"""What the programs over layers share: the stages of each group, their rates, and the seconds of synchronisation."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.stage_table import StageKind, per_layer
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.planner.template.search_space import options
from hetero_megatron.plans.buckets import BUCKET_BYTES, IN_FLIGHT
from hetero_megatron.utils.cached_method import cached_method

Floats = NDArray[np.float64]
Layers = NDArray[np.float32]  # whole numbers, so exact

FEW = 6  # chips of a small cluster


def rounded(replicas: int) -> int:
    """Rounded down to a power of four: fewer tables."""
    return 4 ** int(math.log(replicas, 4) + 1e-9)


class ProgramInputs:
    """What the programs of one search share: chips, stage options and their speeds.

    Attributes:
        counts: usable chips per group; few: the cluster is so small that nothing is rounded.
        capacities: cache of :meth:`LayersProgram.capacity`: (first grid position, layers [tau, in flight]).
    """

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer, counts: tuple[int, ...] | None = None) -> None:
        self.scorer, self.pool, self.model, self.space = scorer, scorer.pool, problem.model, problem.space
        self.batch, self.counts = problem.global_batch_size, counts or scorer.pool.counts
        self.few = sum(self.counts) <= FEW
        self.capacities: dict[tuple[object, ...], tuple[int, Layers]] = {}

    @property
    def most_pipelines(self) -> int:
        return max(1, min(self.batch, sum(self.counts), self.space.max_pipelines or sum(self.counts)))

    @cached_method
    def options(self, group: int, size: int) -> list[StageTemplate]:
        stage_options = options(
            self.pool, group, self.model, self.space, size, every=self.pool.groups[group].per_node <= 4
        )
        return [o for o in stage_options if o.dp <= 4]

    @cached_method
    def rates(self, group: int, size: int) -> list[tuple[int, float]]:
        """(chips, layers per second and chip) of a group's options, with memory as with the most replicas."""
        rates, replicas = [], self.most_pipelines if self.few else rounded(self.most_pipelines)
        stages, recompute = self.options(group, size), self.space.recompute
        kinds = [StageKind(group, x.tp, x.dp, size, False, False, replicas, recompute) for x in stages]
        for stage, table in zip(stages, self.scorer.tables.tables(kinds, 1), strict=True):
            per = per_layer(table.seconds[0])
            if np.isfinite(per) and per > 0:
                rates.append((stage.chips, 1 / (per * stage.chips)))
        return rates

    def sync_seconds(self, held: float, holders: Floats, groups: Iterable[int]) -> tuple[Floats, Floats]:
        """Estimated seconds of (reducing gradients, spreading parameters), as ``holders``. The holders of a stage send
        to each other bucket by bucket, inside a node where they fit into one.

        Args:
            held: elements on a rank; holders: ranks with elements of the same stage.
        """
        costs, links, message = self.scorer.costs, self.scorer.link_table, 0.0
        port, latency = np.zeros_like(holders), np.zeros_like(holders)  # seconds per byte of a rank; seconds
        for g in groups:
            group = self.pool.groups[g]
            (inside_rate, inside_latency), (outside_rate, outside_latency) = links.best(g, True), links.best(g, False)
            inside = (holders <= group.per_node) | math.isinf(outside_rate)
            port = np.maximum(
                port,
                np.where(inside, inside_rate if math.isfinite(inside_rate) else 0.0, outside_rate * group.per_node),
            )
            latency = np.maximum(
                latency, np.where(inside, inside_latency if math.isfinite(inside_latency) else 0.0, outside_latency)
            )
            message = max(message, costs.links.least_message(group.home))
        bucket_seconds = math.ceil(held * 4 / BUCKET_BYTES) / IN_FLIGHT * (latency + (holders - 1) * message)
        return held * costs.wide * port + bucket_seconds, held * costs.item * port + bucket_seconds


def added_seconds(sync: tuple[Floats, Floats], taus: Floats) -> Floats:
    """What reducing and spreading add to a step: the last backward, about two thirds of the bottleneck ``taus`` (s),
    hides a part of the reduction."""
    reduce, spread = sync
    return np.asarray(np.maximum(reduce - taus * (2 / 3), 0.0) + spread)
