"""Objectives beside speed: tokens per currency unit, and the cheapest plan that meets a deadline.

Both ask which part of the cluster to rent: sub-clusters (every set of node groups, and of each group all, a half or a
quarter of its nodes) are searched for speed, and the best by the objective is taken. ``cost_per_hour`` stands at the
chips of the cluster file and is paid for the chips that a plan uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.place import shrink
from hetero_megatron.planner.search import Choice, Progress, Result, SearchOptions, search
from hetero_megatron.spec import ModelSpec

MOST_CLUSTERS = 48


@dataclass(frozen=True)
class Deadline:
    """``tokens`` in all within ``hours``."""

    tokens: float
    hours: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (3600 * self.hours)


def cost_per_hour(choice: Choice) -> float:
    """Of the chips that a plan uses.

    Raises:
        UserError: a chip without ``cost_per_hour``.
    """
    total = 0.0
    for rank in choice.plan.ranks:
        chip = choice.cluster.chip_of(rank)
        if chip.cost_per_hour is None:
            raise UserError(
                "the objective needs it", field=f"chips.{chip.name}.cost_per_hour", where=choice.cluster.file,
                accepted="cost of one chip per hour, the same currency for all chips",
            )  # fmt: skip
        total += chip.cost_per_hour
    return total


def tokens_per_cost(choice: Choice) -> float:
    return choice.prediction.tokens_per_second * 3600 / cost_per_hour(choice)


def sub_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """The whole cluster first, then smaller ones."""
    for chip in cluster.chips.values():
        if chip.cost_per_hour is None:
            raise UserError(
                "the objective needs it", field=f"chips.{chip.name}.cost_per_hour", where=cluster.file,
                accepted="cost of one chip per hour, the same currency for all chips",
            )  # fmt: skip
    shares = [
        sorted({g.count, g.count // 2, g.count // 4, 0} - ({0} if len(cluster.nodes) == 1 else set()))
        for g in cluster.nodes
    ]
    rows = sorted(itertools.product(*(s[::-1] for s in shares)), key=lambda row: -sum(row))
    for row in rows[:MOST_CLUSTERS]:
        if not any(row):
            continue
        keep, seen = [], dict(zip((g.name for g in cluster.nodes), row))
        for rank in cluster.ranks:
            group = next(g for g in cluster.nodes if g.name == rank.group)
            index = 0 if group.count == 1 else int(rank.node.rpartition("-")[2])
            if index < seen[rank.group]:
                keep.append(rank.rank)
        yield cluster if len(keep) == cluster.world_size else shrink(cluster, keep)


def search_objective(
    model: ModelSpec,
    cluster: Cluster,
    seq_length: int,
    batch: int,
    options: SearchOptions,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
) -> Result:
    """The plan with the most tokens per currency unit; with ``deadline`` the cheapest that meets it.

    Raises:
        UserError: chips without a cost, a deadline that nothing meets, and what ``search`` raises.
    """
    best: tuple[float, Result] | None = None
    fastest = 0.0
    failure: UserError | None = None
    for part in sub_clusters(cluster):
        try:
            result = search(model, part, seq_length, batch, options)
        except UserError as error:
            failure = failure or error
            continue
        for choice in (result.best, *result.others):
            speed = choice.prediction.tokens_per_second
            fastest = max(fastest, speed)
            if deadline is not None and speed < deadline.tokens_per_second:
                continue
            value = -cost_per_hour(choice) if deadline is not None else tokens_per_cost(choice)
            if best is None or value > best[0]:
                others = [c for c in (result.best, *result.others) if c is not choice]
                result.best, result.others = choice, others
                best = (value, result)
                if progress is not None:
                    progress(
                        f"{tokens_per_cost(choice):.4g} tokens per currency unit on {choice.plan.world_size} chips"
                    )
    if best is not None:
        return best[1]
    if deadline is not None and fastest:
        hours = deadline.tokens / fastest / 3600
        raise UserError(
            f"no plan is that fast: the best computes {fastest:.4g} tokens/s, the deadline needs "
            f"{deadline.tokens_per_second:.4g}",
            field="--deadline-hours", value=deadline.hours, accepted=f"{hours:.4g} or more, or more chips",
        )  # fmt: skip
    assert failure is not None
    raise failure
