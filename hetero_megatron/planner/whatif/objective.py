"""Objectives other than speed: tokens per currency unit, and the cheapest plan that meets a deadline.

Both choose which part of the cluster to rent: parts (of each node group all, a half, a quarter or none of its nodes)
are searched for speed, and the best plan by the objective is taken. ``cost_per_hour`` is a field of the cluster file's
chips and is paid for the chips that a plan uses. Parts are ranked by an upper bound on the throughput of all their
chips (``most_tokens``); parts that cannot beat the best known plan are skipped, and at most :data:`MOST_SEARCHED` are
searched. ``SearchResult.parts`` says how many were searched and what is left open.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import most_tokens
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.search.driver import SearchResult, search, search_or_error
from hetero_megatron.planner.search.incumbent import Progress
from hetero_megatron.predictor.cost.layer_cost import CostModel

MOST_SEARCHED = 48
MOST_PARTS = 1 << 16  # parts that are ranked; if there are more, groups are only halved, or not divided
DIVISORS = ((1, 2, 4), (1, 2), (1,))


@dataclass(frozen=True)
class Deadline:
    """``tokens`` in all within ``hours``."""

    tokens: float
    hours: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (3600 * self.hours)


@dataclass(frozen=True)
class ClusterPart:
    """Attributes:
        counts: nodes of each node group.
        cost: of all its chips per hour.
        most: upper bound on tokens per second of its plans."""

    counts: tuple[int, ...]
    cost: float
    most: float


def parts(problem: PlanningProblem, costs: CostModel) -> list[ClusterPart]:
    """All parts of the cluster whose memory holds at least the states.

    Raises:
        UserError: a chip without ``cost_per_hour``, or too many node groups.
    """
    cluster, prices = problem.cluster, []
    for group in cluster.nodes:
        price = cluster.chips[group.chip].cost_per_hour
        if price is None:
            raise UserError(
                "the objective needs it", field=f"chips.{group.chip}.cost_per_hour", where=cluster.file,
                accepted="cost of one chip per hour, the same currency for all chips",
            )  # fmt: skip
        prices.append(price)
    for divisors in DIVISORS:
        shares = [sorted({0, *(group.count // d for d in divisors)}) for group in cluster.nodes]
        if math.prod(map(len, shares)) <= MOST_PARTS:
            break
    else:
        raise UserError(
            f"too many node groups for an objective: {len(cluster.nodes)}", field="--cluster", where=cluster.file,
            accepted=f"at most {int(math.log2(MOST_PARTS))}, or --objective tokens",
        )  # fmt: skip
    rows = [row for row in itertools.product(*shares) if any(row)]
    chips = np.array(rows, float) * [group.chips_per_node for group in cluster.nodes]
    usable = [problem.dtype in cluster.chips[group.chip].dtypes for group in cluster.nodes]
    kinds = sorted({group.chip for group, use in zip(cluster.nodes, usable) if use})
    by_kind = np.array([[group.chip == kind for kind in kinds] for group in cluster.nodes], float)
    most_speed = most_tokens(costs, kinds, chips @ by_kind) if kinds else np.zeros(len(rows))
    room = chips @ [
        max(0, costs.memory_limit(group.chip) - costs.overhead(group.chip)) if use else 0
        for group, use in zip(cluster.nodes, usable)
    ]
    least_bytes = _least_bytes(problem, costs)
    return [
        ClusterPart(row, float(cost), float(speed))
        for row, cost, speed, bytes_ in zip(rows, chips @ prices, most_speed, room, strict=True)
        if bytes_ >= least_bytes and speed > 0
    ]


def _least_bytes(problem: PlanningProblem, costs: CostModel) -> float:
    weights, gradients, optimizer = costs.memory.whole
    away = problem.space.offload != "never" and problem.can_offload
    return weights + gradients + (0 if away else optimizer)


def _of(cluster: Cluster, part: ClusterPart) -> Cluster:
    start, keep = 0, list[int]()
    for group, count in zip(cluster.nodes, part.counts, strict=True):
        keep += range(start, start + count * group.chips_per_node)
        start += group.count * group.chips_per_node
    return cluster if len(keep) == cluster.world_size else shrink(cluster, keep)


class _ByObjective:
    """The best plan by the objective, and the order in which parts are searched."""

    def __init__(self, deadline: Deadline | None) -> None:
        self.deadline = deadline
        self.best: tuple[float, SearchResult] | None = None
        self.fastest = 0.0

    def take(self, result: SearchResult) -> bool:
        """Consider the plans of a result; returns whether one is the best so far."""
        improved = False
        for choice in (result.best, *result.others):
            speed, cost = choice.prediction.tokens_per_second, choice.cost_per_hour
            assert cost is not None, "checked for all chips"
            self.fastest = max(self.fastest, speed)
            value = self._value(speed, cost)
            if value is not None and (self.best is None or value > self.best[0]):
                others = [c for c in (result.best, *result.others) if c is not choice]
                result.best, result.others = choice, others
                self.best, improved = (value, result), True
        return improved

    def text(self) -> str:
        """A progress message."""
        assert self.best is not None
        best = self.best[1].best
        return f"{best.tokens_per_cost:.4g} tokens per currency unit on {best.plan.world_size} chips"

    def _value(self, speed: float, cost: float) -> float | None:
        if self.deadline is None:
            return speed * 3600 / cost
        return -cost if speed >= self.deadline.tokens_per_second else None

    def can_be_better(self, part: ClusterPart) -> bool:
        """Whether a plan that uses all chips of the part can beat the best so far."""
        value = self._value(part.most, part.cost)
        return value is not None and (self.best is None or value > self.best[0])

    def order(self, part: ClusterPart, reached: float) -> tuple[float, ...]:
        """Sort key of parts to search; ``reached``: the whole cluster's throughput over its bound. With a deadline,
        parts that should meet it first, cheapest first; otherwise single groups first, then by tokens per cost of the
        bound."""
        if self.deadline is not None:
            return float(part.most * reached < self.deadline.tokens_per_second), part.cost
        return float(sum(map(bool, part.counts)) > 1), -part.most / part.cost


def search_objective(
    problem: PlanningProblem,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    budget: TimeBudget | None = None,
) -> SearchResult:
    """The plan with the most tokens per currency unit; with ``deadline`` the cheapest plan that meets it.

    Raises:
        UserError: chips without a cost, a deadline that no plan meets, and the errors of ``search``.
        KeyboardInterrupt: Ctrl-C before any plan was found.
    """
    budget, started = budget or TimeBudget(problem.options.time_limit), time.monotonic()
    cluster = problem.cluster
    costs = CostModel(problem.model, cluster, problem.seq_length, problem.dtype, problem.options.costs)
    remaining = parts(problem, costs)
    all_nodes = tuple(group.count for group in cluster.nodes)
    by_objective, failure, total, reached, searched = _ByObjective(deadline), None, len(remaining), 1.0, 0
    while remaining and searched < MOST_SEARCHED:
        if searched and budget.over():
            break
        # The whole cluster first: its plan is usually the fastest.
        part = min(remaining, key=lambda p: (p.counts != all_nodes, by_objective.order(p, reached), p.counts[::-1]))
        try:
            result = search_or_error(problem.on(_of(cluster, part)), budget)
            if isinstance(result, UserError):
                failure = failure or result
            else:
                if part.counts == all_nodes:
                    reached = result.best.prediction.tokens_per_second / part.most
                if by_objective.take(result) and progress is not None:
                    progress(by_objective.text())
        except KeyboardInterrupt:
            if by_objective.best is None or budget.interrupted:
                raise
            budget.stop()
            break
        searched += 1
        remaining = [p for p in remaining if p is not part and by_objective.can_be_better(p)]
    if by_objective.best is not None:
        result = by_objective.best[1]
        result.complete, result.seconds = result.complete and not budget.cut, time.monotonic() - started
        result.parts = _progress_text(searched, total, len(remaining), budget)
        return result
    if deadline is not None and by_objective.fastest:
        raise _too_slow(deadline, by_objective.fastest, searched, total, budget)
    if failure is None:  # not even all chips have enough memory: search raises the error that says what is missing
        return search(problem, budget=budget)
    raise failure


def _progress_text(searched: int, total: int, open_: int, budget: TimeBudget) -> str:
    text = f"{searched} of {total} parts of the cluster searched (all, a half, a quarter or none of each node group)"
    if not open_:
        return text + "; no other can be better with all of its chips in use, by their speeds"
    why = "the search was cut short" if budget.cut else f"{MOST_SEARCHED} are searched at most"
    return text + f"; {open_} others could be better by the speeds of their chips, but {why}"


def _too_slow(deadline: Deadline, fastest: float, searched: int, total: int, budget: TimeBudget) -> UserError:
    hours = deadline.tokens / fastest / 3600
    cut = " (the search was cut short)" if budget.cut else ""
    return UserError(
        f"no plan found is that fast: the best of {searched} of {total} parts of the cluster{cut} "
        f"computes {fastest:.4g} tokens/s, the deadline needs {deadline.tokens_per_second:.4g}",
        field="--deadline-hours", value=deadline.hours, accepted=f"{hours:.4g} or more, or more chips",
    )  # fmt: skip
