"""The context scheduler: groups, tokens, heads and transport that minimise the time of a step within memory.

Two of HexiSeq's three levels: groupings from the topology, and shares of groups and members by their cost. The third,
moving single units between members, gained 0.05 % in the mean under this model, and nothing in simulated plans. All
Ring, Ulysses and USP layouts with equal shards are candidates, so the result is never worse than them under this model.
Deterministic: the same problem gives the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.balance import Balancer, speed_bound
from hetero_megatron.planner.context.cost import ContextCosts, LayoutCost
from hetero_megatron.planner.context.groupings import (
    Grouping,
    block_sizes,
    clusters,
    equal_layouts,
    nodes_by_kind,
    partitions,
    per_kind,
)
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem

SMALL = 6  # up to so many members all groupings are tried
KEPT = 3  # layouts of which all block sizes are tried


@dataclass(frozen=True)
class ContextChoice:
    """The scheduler's result.

    Args:
        baseline: the best of Ring, Ulysses and USP with equal shards; None where none fits in memory.
        bound: seconds that no layout beats, by the members' speeds.
        tried: number of evaluated layouts; rejected: those that do not fit.
    """

    layout: ContextLayout
    evaluation: LayoutCost
    baseline: ContextLayout | None
    baseline_evaluation: LayoutCost | None
    bound: float
    tried: int
    rejected: int

    @property
    def seconds(self) -> float:
        return self.evaluation.seconds

    @property
    def gain(self) -> float | None:
        """Speedup over the baseline; None without a baseline that fits."""
        return None if self.baseline_evaluation is None else self.baseline_evaluation.seconds / self.seconds


class _LayoutSearch:
    def __init__(self, problem: ContextProblem) -> None:
        self.problem, self.costs = problem, ContextCosts(problem)
        self.balancer = Balancer(self.costs)
        self.seen: dict[ContextLayout, LayoutCost] = {}

    def add(self, layout: ContextLayout | None) -> LayoutCost | None:
        if layout is None:
            return None
        if layout not in self.seen:
            self.seen[layout] = self.costs.evaluate(layout)
        return self.seen[layout]

    def best(self, count: int = 1) -> list[ContextLayout]:
        fitting = [layout for layout, cost in self.seen.items() if cost.fits]
        return sorted(fitting, key=lambda layout: self.seen[layout].order)[:count]


def schedule_context(problem: ContextProblem, exhaustive: bool | None = None) -> ContextChoice:
    """Choose the context layout of one stage.

    Args:
        exhaustive: try every grouping of the members; None: for at most :data:`SMALL` members.

    Raises:
        UserError: no layout fits in memory; says how much is missing.
    """
    search = _LayoutSearch(problem)
    for layout in equal_layouts(problem):
        search.add(layout)
    equal = search.best()
    small = len(problem.members) <= SMALL if exhaustive is None else exhaustive
    groupings = [tuple(sorted(g)) for g in partitions(range(len(problem.members)))] if small else clusters(problem)
    balanced = _balanced(search, groupings)
    if not small:
        _sizes_per_kind(search, balanced)
    for layout in search.best(KEPT):
        _try_blocks(search, layout)
    best = search.best()
    if not best:
        raise _does_not_fit(search)
    baseline = equal[0] if equal else None
    return ContextChoice(
        layout=best[0],
        evaluation=search.seen[best[0]],
        baseline=baseline,
        baseline_evaluation=search.seen[baseline] if baseline is not None else None,
        bound=speed_bound(problem),
        tried=len(search.seen),
        rejected=sum(not cost.fits for cost in search.seen.values()),
    )


def _balanced(search: _LayoutSearch, groupings: Iterable[Grouping]) -> dict[Grouping, float]:
    """Evaluate the balanced shares of every grouping: seconds by grouping; inf where they do not fit."""
    seconds_of = {}
    for grouping in groupings:
        cost = search.add(search.balancer.balance(grouping, _first_block(search.problem, len(grouping))))
        seconds_of[grouping] = cost.seconds if cost is not None and cost.fits else math.inf
    return seconds_of


def _first_block(problem: ContextProblem, groups: int) -> int:
    """Half a group's mean share, at least one unit: small compared with the shard, but few messages."""
    return max(problem.unit, problem.seq_length // (2 * groups))


def _sizes_per_kind(search: _LayoutSearch, seconds_of: dict[Grouping, float]) -> None:
    """Coordinate descent over (nodes per group, members of each) of every kind of node, from the best common pair.
    ``seconds_of``: seconds of groupings already tried."""
    problem = search.problem
    kinds = nodes_by_kind(problem)
    if len(kinds) == 1:
        return

    def trial(sizes: dict[int, tuple[int, int]]) -> float:
        grouping = per_kind(problem, sizes)
        if grouping not in seconds_of:
            seconds_of.update(_balanced(search, [grouping]))
        return seconds_of[grouping]

    options = {kind: _pairs(len(row), max(map(len, row))) for kind, row in kinds.items()}
    common = {pair for row in options.values() for pair in row}
    starts = [{kind: _nearest(row, pair) for kind, row in options.items()} for pair in sorted(common)]
    best = min(starts, key=trial)
    for kind, row in options.items():
        best = min([best, *({**best, kind: pair} for pair in row)], key=trial)


def _pairs(nodes: int, width: int) -> list[tuple[int, int]]:
    widths = sorted({1, 2, 4, width} & set(range(1, width + 1)))
    return [(n, e) for n in sorted({1, 2, 4, nodes}) if n <= nodes for e in widths]


def _nearest(pairs: list[tuple[int, int]], to: tuple[int, int]) -> tuple[int, int]:
    return min(pairs, key=lambda p: (abs(math.log(p[0] / to[0])) + abs(math.log(p[1] / to[1])), p))


def _try_blocks(search: _LayoutSearch, layout: ContextLayout) -> None:
    if layout.transport == "ring":
        for block in block_sizes([sum(group.tokens) for group in layout.groups]):
            search.add(replace(layout, block=block, name=""))


def _does_not_fit(search: _LayoutSearch) -> UserError:
    limits = search.costs.limits
    members = search.problem.members
    lacking = [members[i].ranks for i in range(len(members)) if limits[i] < 0]
    if lacking:
        fullest = int(limits.argmin())
        return UserError(
            f"weights, gradients and optimizer alone need {-limits[fullest] / 2**30:.2f} GiB more than rank "
            f"{members[fullest].ranks[0]} has ({len(lacking)} of {len(members)} members are too small)",
            field="memory", value=f"{members[fullest].memory / 2**30:.2f} GiB",
            accepted="fewer layers per stage, larger tp, sharded states, or chips with more memory",
        )  # fmt: skip
    limit = [member.memory for member in members]
    over = min(max(m - x for m, x in zip(cost.memory, limit, strict=True)) for cost in search.seen.values())
    return UserError(
        f"no division of {search.problem.seq_length} tokens over {len(members)} members fits in their memory; "
        f"the closest of {len(search.seen)} layouts lacks {over / 2**30:.2f} GiB",
        field="seq_length", value=search.problem.seq_length,
        accepted="recompute: full, more ranks, fewer layers per stage, or a shorter sequence",
    )  # fmt: skip
