"""A schedule made for one pipeline: list scheduling under many rules, then local search, from 1F1B on."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Schedule
from hetero_megatron.schedule.generators import generate
from hetero_megatron.schedule.list_scheduling import ListRule, improve_orders, list_schedule
from hetero_megatron.schedule.stage_orders import (
    ROUNDING,
    Orders,
    PipelineTimes,
    join_backwards,
    keeps_memory,
    lower_bound_seconds,
    orders_of,
    schedule_of,
    time_orders,
)

EFFORT = 1_000_000  # 32 stages x 256 micro-batches: 40 schedules, about a second
# (most deferred W's, patience, F before B_INPUT) on all stages: first those which together are best most often.
UNIFORM = (
    (math.inf, 0, False), (1, 1, True), (math.inf, 0, True), (math.inf, 0.5, False), (math.inf, 0.5, True),
    (1, 0.5, True), (2, 1, True), (2, 0.5, True),
)  # fmt: skip
RULES_TRIED = 300  # changes of single values of the best rule
ORDERS_TRIED = 1_500  # in succession, none of them faster


@dataclass(frozen=True)
class AdaptiveResult:
    """What :func:`search_adaptive` found.

    Attributes:
        schedule: compute actions; named ``1f1b`` where it is 1F1B, else ``adaptive``.
        seconds: of the step, tails included.
        one_f_one_b_seconds: of 1F1B in the same memory, with a shorter warm-up where memory is short.
        bound_seconds: no schedule takes less.
        timed_actions: the effort taken.
    """

    schedule: Schedule
    seconds: float
    one_f_one_b_seconds: float
    bound_seconds: float
    timed_actions: int


def adaptive(times: PipelineTimes, num_micro_batches: int, effort: int = EFFORT) -> Schedule:
    """The schedule of :func:`search_adaptive`."""
    return search_adaptive(times, num_micro_batches, effort).schedule


def search_adaptive(
    times: PipelineTimes, num_micro_batches: int, effort: int = EFFORT, near: float = ROUNDING
) -> AdaptiveResult:
    """The fastest schedule found of those that keep every stage's memory; never slower than 1F1B in the same memory.

    Equal arguments give equal schedules: the effort is counted in actions, not seconds.

    Args:
        effort: about how many actions may be timed; 0 gives 1F1B. The search ends earlier near the lower bound, and on
            small pipelines when nothing faster is found for long.
        near: part of the lower bound by which a schedule may be slower that nothing faster is looked for; by default
            what sums of seconds differ by in their last digits.

    Raises:
        UserError: a negative number of micro-batches or effort.
    """
    search, plain = _searched(times, num_micro_batches, effort, near)
    full = generate("1f1b", len(times.stages), num_micro_batches)
    schedule = schedule_of("adaptive", search.orders)
    return AdaptiveResult(
        full if schedule.stages == full.stages else schedule, search.seconds, plain, search.bound, search.timed
    )


def adaptive_seconds(
    times: PipelineTimes, num_micro_batches: int, effort: int, near: float, rule: ListRule | None = None
) -> tuple[float, ListRule, int]:
    """(seconds of the schedule that :func:`search_adaptive` would find, its best rule, actions timed). ``rule``: that
    of a similar pipeline, tried before the others and instead of zero-bubble."""
    search, _ = _searched(times, num_micro_batches, effort, near, rule)
    return search.seconds, search.rule, search.timed


def _searched(
    times: PipelineTimes, num_micro_batches: int, effort: int, near: float, rule: ListRule | None = None
) -> tuple[_Search, float]:
    """(what the search found, seconds of 1F1B in the same memory)."""
    if num_micro_batches < 0:
        raise UserError("is negative", field="num_micro_batches", value=num_micro_batches, accepted="0 or more")
    if effort < 0:
        raise UserError("is negative", field="effort", value=effort, accepted="0 or more")
    search = _Search(times, num_micro_batches, effort, near)
    plain = search.seconds
    if rule is None or len(rule.forward_first) != len(times.stages):
        search.try_zero_bubble()
    else:
        search.try_rule(rule)
    search.try_uniform_rules()
    search.try_other_rules()
    search.improve()
    search.join_backwards()
    return search, plain


def one_f_one_b_orders(times: PipelineTimes, num_micro_batches: int) -> Orders:
    """1F1B, with a shorter warm-up on stages whose memory holds fewer micro-batches than it wants, and on those after
    them, which would wait for forwards that need their own backward."""
    rows = []
    warm_up = num_micro_batches
    for s, stage in enumerate(times.stages):
        warm_up = int(min(len(times.stages) - s - 1, stage.capacity - 1, warm_up))
        rows.append("F" * warm_up + "FB" * (num_micro_batches - warm_up) + "B" * warm_up)
    return tuple(rows)


class _Search:
    """The best orders so far, and how many actions have been timed."""

    def __init__(self, times: PipelineTimes, num_micro_batches: int, effort: int, near: float) -> None:
        self.times, self.count, self.effort = times, num_micro_batches, effort
        self.bound = lower_bound_seconds(times, num_micro_batches)
        self.goal = self.bound * (1 + near)
        self.size = 3 * len(times.stages) * num_micro_batches  # actions of a schedule, at most
        self.orders = one_f_one_b_orders(times, num_micro_batches)
        timing = time_orders(times, self.orders)
        assert timing is not None, "1F1B does not deadlock"
        self.seconds, self.timed = timing.seconds, self.size
        self.splits_cost = any(s.split_seconds > 0 for s in times.stages)
        self.rule, self.rule_seconds = ListRule.uniform(len(times.stages), math.inf, False, 0.0), math.inf

    def ended(self) -> bool:
        return self.seconds <= self.goal or self.timed + self.size > self.effort

    def try_zero_bubble(self) -> None:
        """Zero-bubble with as many micro-batches per stage as fit."""
        if self.ended():
            return
        caps = [int(min(stage.capacity, max(self.count, 1))) for stage in self.times.stages]
        orders = orders_of(generate("zero-bubble", len(caps), self.count, caps=caps))
        timing = time_orders(self.times, orders)
        self.timed += self.size
        if timing is not None and all(map(keeps_memory, self.times.stages, orders)):
            self._offer(timing.seconds, orders)

    def try_uniform_rules(self) -> None:
        """The same rule on all stages."""
        combinations = itertools.product((math.inf, 0, 1, 2), (0, 0.5, 1), (False, True))
        for deferred, patience, forward_first in dict.fromkeys((*UNIFORM, *combinations)):
            self.try_rule(ListRule.uniform(len(self.times.stages), deferred, forward_first, patience))

    def try_other_rules(self) -> None:
        """Change the best rule on one or two stages; half of what is left of the effort."""
        draw = random.Random(0)
        effort, self.effort = self.effort, (self.effort + self.timed) // 2
        for _ in range(RULES_TRIED):
            if self.ended():
                break
            rule = self.rule
            for _ in range(draw.choice((1, 1, 2))):
                rule = self._changed(rule, draw)
            self.try_rule(rule)
        self.effort = effort

    def _changed(self, rule: ListRule, draw: random.Random) -> ListRule:
        stage = draw.randrange(len(self.times.stages))
        field = draw.randrange(4)
        if field == 0:
            return rule.on_stage(stage, most_deferred=draw.choice((0, 1, 2, 3, 4, math.inf)))
        if field == 1:
            capacity = int(min(self.times.stages[stage].capacity, self.count))
            return rule.on_stage(stage, most_in_flight=draw.choice((math.inf, *range(1, capacity + 1))))
        if field == 2:
            return rule.on_stage(stage, forward_first=not rule.forward_first[stage])
        return replace(rule, patience=draw.choice((0, 0.25, 0.5, 0.75, 1)))

    def try_rule(self, rule: ListRule) -> None:
        if self.ended():
            return
        # With whole backwards it may be the fastest though it is not so yet.
        limit = math.inf if self.splits_cost else self.rule_seconds * (1 + ROUNDING)
        seconds, orders = list_schedule(self.times, self.count, rule, limit)
        self.timed += sum(map(len, orders))
        if self.splits_cost and self.timed + self.size <= self.effort:
            joined = tuple(map(join_backwards, orders))
            timing = time_orders(self.times, joined)
            self.timed += self.size
            if timing is not None and timing.seconds < seconds:
                seconds, orders = timing.seconds, joined
        if seconds <= self.rule_seconds:
            self.rule, self.rule_seconds = rule, seconds
        self._offer(seconds, orders)

    def _offer(self, seconds: float, orders: Orders) -> None:
        if seconds < self.seconds * (1 - ROUNDING):
            self.seconds, self.orders = seconds, orders

    def improve(self) -> None:
        """Local search from the best orders."""
        if self.ended():
            return
        seconds, orders, timed = improve_orders(
            self.times, self.orders, self.goal, self.effort - self.timed, ORDERS_TRIED
        )
        self.timed += timed
        self._offer(seconds, orders)

    def join_backwards(self) -> None:
        """Whole backwards where splitting them gains nothing: on all stages, on the first, whose gradient nobody waits
        for, then on single ones as far as the effort reaches."""
        for stages in (range(len(self.orders)), *([s] for s in range(len(self.orders)))):
            if self.timed + self.size > self.effort and stages != [0]:
                continue
            joined = tuple(join_backwards(row) if s in stages else row for s, row in enumerate(self.orders))
            if joined == self.orders:
                continue
            timing = time_orders(self.times, joined)
            self.timed += self.size
            if timing is not None and timing.seconds <= self.seconds * (1 + ROUNDING):
                self.seconds, self.orders = timing.seconds, joined
