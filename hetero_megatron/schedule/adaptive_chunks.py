"""A schedule made for one pipeline with several chunks of layers per stage: interleaved 1F1B, zero-bubble, list
scheduling under many rules, then moves of single actions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Schedule
from hetero_megatron.schedule.chunk_scheduling import ChunkRule, list_schedule_chunks
from hetero_megatron.schedule.chunk_times import (
    ChunkedTimes,
    ChunkOrders,
    chunked_lower_bound_seconds,
    keeps_chunk_memory,
    time_chunk_orders,
)
from hetero_megatron.schedule.generators import generate
from hetero_megatron.schedule.stage_orders import (
    ROUNDING,
    StageTimes,
    chunk_orders_of,
    joined,
    keeps_order,
    schedule_of,
    split_letter,
)
from hetero_megatron.schedule.zero_bubble import MOST_COMPARED

EFFORT = 100_000  # 32 stages of two chunks x 256 micro-batches: two schedules, about a second
RULES_TRIED, EXCHANGES_TRIED = 60, 400  # in succession, none of them faster


@dataclass(frozen=True)
class ChunkedResult:
    """What :func:`search_adaptive_chunks` found.

    Attributes:
        schedule: compute actions; named ``interleaved`` where it is that, else ``adaptive``.
        seconds: of the step, tails included.
        interleaved_seconds: of interleaved 1F1B; inf where it does not keep the memory.
        bound_seconds: no schedule takes less.
        timed_actions: the effort taken.
    """

    schedule: Schedule
    seconds: float
    interleaved_seconds: float
    bound_seconds: float
    timed_actions: int


def search_adaptive_chunks(
    times: ChunkedTimes, num_micro_batches: int, effort: int = EFFORT, near: float = ROUNDING
) -> ChunkedResult:
    """The fastest schedule found of those that keep every stage's memory; never slower than interleaved 1F1B, where
    that keeps it, nor, if the effort is that of ten schedules, than zero-bubble with as many micro-batches per stage as
    fit. Equal arguments give equal schedules.

    Args:
        effort: about how many actions may be timed, besides those of zero-bubble; at least one schedule is.
        near: part of the lower bound by which a schedule may be slower that nothing faster is looked for.

    Raises:
        UserError: a negative number of micro-batches or effort.
    """
    search, plain = _searched(times, num_micro_batches, effort, near)
    schedule = schedule_of("adaptive", search.orders, times.chunks)
    name = "interleaved" if search.orders == search.interleaved else "adaptive"
    return ChunkedResult(replace(schedule, name=name), search.seconds, plain, search.bound, search.timed)


def adaptive_chunks_seconds(
    times: ChunkedTimes, num_micro_batches: int, effort: int, near: float, rule: ChunkRule | None = None
) -> tuple[float, ChunkRule, int]:
    """(seconds of the schedule that :func:`search_adaptive_chunks` would find, its best rule, actions timed).
    ``rule``: that of a similar pipeline, tried before the others and instead of zero-bubble."""
    search, _ = _searched(times, num_micro_batches, effort, near, rule)
    return search.seconds, search.rule, search.timed


def _searched(
    times: ChunkedTimes, num_micro_batches: int, effort: int, near: float, rule: ChunkRule | None = None
) -> tuple[_Search, float]:
    """(what the search found, seconds of interleaved 1F1B)."""
    for name, value in (("num_micro_batches", num_micro_batches), ("effort", effort)):
        if value < 0:
            raise UserError("is negative", field=name, value=value, accepted="0 or more")
    search = _Search(times, num_micro_batches, effort, near)
    plain = search.seconds
    if rule is None:
        search.try_zero_bubble()
    else:
        search.try_rule(rule)
    search.try_rules()
    search.change_rules()
    search.join_backwards()
    search.exchange()
    return search, plain


class _Search:
    """The best orders so far, and how many actions have been timed."""

    def __init__(self, times: ChunkedTimes, num_micro_batches: int, effort: int, near: float) -> None:
        self.times, self.count, self.effort = times, num_micro_batches, effort
        self.bound = chunked_lower_bound_seconds(times, num_micro_batches)
        self.goal = self.bound * (1 + near)
        self.size = 3 * len(times.stages) * times.chunks * num_micro_batches  # actions of a schedule, at most
        self.timed, self.draw = self.size, random.Random(0)
        schedule = generate("interleaved", len(times.stages), num_micro_batches, times.chunks)
        self.interleaved = self.orders = chunk_orders_of(schedule)
        self.seconds, self.rule_seconds = math.inf, math.inf
        self.rule = ChunkRule(len(times.stages))
        if all(map(keeps_chunk_memory, times.stages, self.orders)):
            self.seconds = time_chunk_orders(times, self.orders) or 0.0

    def ended(self) -> bool:
        if math.isinf(self.seconds):
            return False
        return self.seconds <= self.goal or self.timed + self.size > self.effort

    def _offer(self, seconds: float | None, orders: ChunkOrders) -> bool:
        if seconds is None or not seconds < self.seconds * (1 - ROUNDING):
            return False
        self.seconds, self.orders = seconds, orders
        return True

    def try_rule(self, rule: ChunkRule) -> None:
        if self.ended():
            return
        seconds, orders = list_schedule_chunks(self.times, self.count, rule, self.rule_seconds)
        self.timed += sum(map(len, orders))
        if seconds < self.rule_seconds:
            self.rule, self.rule_seconds = rule, seconds
        self._offer(seconds, orders)

    def try_zero_bubble(self) -> None:
        """Zero-bubble with as many micro-batches per stage as fit in all chunks; not where choosing it may take more
        than the effort."""
        if self.ended() or self.timed + MOST_COMPARED * self.size > self.effort:
            return
        caps = [_most_micro_batches(chunks, max(self.count, 1)) for chunks in self.times.stages]
        orders = chunk_orders_of(generate("zero-bubble", len(caps), self.count, self.times.chunks, caps))
        if all(map(keeps_chunk_memory, self.times.stages, orders)):
            self._offer(time_chunk_orders(self.times, orders), orders)

    def try_rules(self) -> None:
        """Groups as interleaved 1F1B has them, twice as large, and single micro-batches; W at once or put off."""
        stages = len(self.times.stages)
        for group, deferred in itertools.product((stages, 1, 2 * stages), (math.inf, 0)):
            self.try_rule(ChunkRule(group, 2 * stages, deferred))
            self.try_rule(ChunkRule(group, most_deferred=deferred))

    def change_rules(self) -> None:
        """Change the best rule; half of what is left of the effort."""
        effort, self.effort = self.effort, (self.effort + self.timed) // 2
        tried_rules, since = set[ChunkRule](), 0
        while since < RULES_TRIED and not self.ended():
            rule, seconds_before = self._changed(self.rule), self.rule_seconds
            since += 1
            if rule not in tried_rules:
                tried_rules.add(rule)
                self.try_rule(rule)
                since = 0 if self.rule_seconds < seconds_before else since
        self.effort = effort

    def _changed(self, rule: ChunkRule) -> ChunkRule:
        draw, stages = self.draw, len(self.times.stages)
        field = draw.randrange(5)
        if field == 0:
            return replace(rule, group=draw.randint(1, 2 * stages))
        if field == 1:
            return replace(rule, most_ahead=draw.choice((math.inf, *range(2 * stages + 1))))
        if field == 2:
            return replace(rule, most_deferred=draw.choice((0, 1, 2, 3, 4, math.inf)))
        if field == 3:
            return replace(rule, forward_first=not rule.forward_first)
        return replace(rule, patience=draw.choice((0.0, 0.25, 0.5, 0.75, 1.0)))

    def join_backwards(self) -> None:
        """Whole backwards where splitting them gains nothing: on all stages, then on single ones."""
        for stages in (range(len(self.orders)), *([s] for s in range(len(self.orders)))):
            orders = tuple(tuple(joined(row)) if s in stages else row for s, row in enumerate(self.orders))
            if orders == self.orders or self.timed + self.size > self.effort:
                continue
            seconds = time_chunk_orders(self.times, orders)
            self.timed += self.size
            if seconds is not None and seconds <= self.seconds * (1 + ROUNDING):
                self.seconds, self.orders = seconds, orders

    def exchange(self) -> None:
        """Move single actions of a stage by a few places, from order to order that is no slower."""
        since = 0
        orders, seconds = self.orders, self.seconds
        while since < EXCHANGES_TRIED and not self.ended():
            since += 1
            s = self.draw.randrange(len(orders))
            row = _moved(orders[s], self.draw)
            if row is None or not keeps_chunk_memory(self.times.stages[s], row):
                continue
            candidate = (*orders[:s], row, *orders[s + 1 :])
            candidate_seconds = time_chunk_orders(self.times, candidate)
            self.timed += self.size
            if candidate_seconds is not None and candidate_seconds <= seconds:
                orders, seconds = candidate, candidate_seconds
                since = 0 if self._offer(candidate_seconds, candidate) else since


def _most_micro_batches(chunks: Sequence[StageTimes], most: int) -> int:
    """That a stage has memory for in all its chunks, each until its W; at most so many."""
    micro_batch_bytes = sum(max(chunk.activation_bytes, chunk.deferred_bytes) for chunk in chunks)
    return int(max(min(chunks[0].memory_bytes / micro_batch_bytes if micro_batch_bytes else most, most), 1))


def _moved(row: tuple[str, ...], draw: random.Random) -> tuple[str, ...] | None:
    """The row with one action elsewhere; None where the stage's order does not allow it, or nothing changed."""
    if len(row) < 2:
        return None
    source = draw.randrange(len(row))
    target = min(max(source + draw.choice((-3, -2, -1, 1, 2, 3)), 0), len(row) - 1)
    passed = row[source + 1 : target + 1] if target > source else row[target:source]
    if all(action == row[source] for action in passed) or not _may_pass(row, source, target):
        return None
    others = row[:source] + row[source + 1 :]
    return (*others[:target], row[source], *others[target:])


def _may_pass(row: tuple[str, ...], at: int, to: int) -> bool:
    """No backward comes before its forward and no W before its B_INPUT when the action at ``at`` is put at ``to``."""
    others = row[:at] + row[at + 1 :]
    moved = (*others[:to], row[at], *others[to:])
    chunk = split_letter(row[at])[1]
    return keeps_order("".join(letter for letter, c in map(split_letter, moved) if c == chunk))
