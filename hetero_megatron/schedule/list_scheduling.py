"""List scheduling: in order of time, every stage that is free starts the action that a rule prefers."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from hetero_megatron.schedule.stage_orders import Orders, PipelineTimes, Timing, keeps_memory, keeps_order, time_orders


@dataclass(frozen=True)
class ListRule:
    """What a free stage prefers: B_INPUT before F, F while memory allows, and W where neither can start.

    Args:
        most_in_flight: per stage, forwards whose backward has not been done; memory may allow fewer.
        most_deferred: per stage, W's that may be due before one of them goes first.
        forward_first: per stage, F before B_INPUT where both can start.
        patience: a W does not start where an F or B_INPUT is known to arrive within this part of its seconds.
    """

    most_in_flight: tuple[float, ...]
    most_deferred: tuple[float, ...]
    forward_first: tuple[bool, ...]
    patience: float = 0.0

    @classmethod
    def uniform(cls, num_stages: int, most_deferred: float, forward_first: bool, patience: float) -> ListRule:
        """The same on all stages, with forwards limited by memory alone."""
        return cls((math.inf,) * num_stages, (most_deferred,) * num_stages, (forward_first,) * num_stages, patience)

    def on_stage(self, stage: int, **values: float | bool) -> ListRule:
        """The rule with other values on one stage."""
        changed: dict[str, Any] = {}
        for name, value in values.items():
            column = getattr(self, name)
            changed[name] = (*column[:stage], value, *column[stage + 1 :])
        return replace(self, **changed)


def list_schedule(
    times: PipelineTimes, num_micro_batches: int, rule: ListRule, limit: float = math.inf
) -> tuple[float, Orders]:
    """(seconds of the step, orders) of the schedule that ``rule`` makes; it keeps the stages' memory and never
    deadlocks, as the oldest micro-batch can always go on. Given up, with inf for its seconds and orders that are not
    whole, as soon as it is certain to take more than ``limit`` seconds."""
    run = _Run(times, num_micro_batches, rule)
    ended = run.all_actions(limit)
    seconds = max(end + stage.tail_seconds for end, stage in zip(run.ends, times.stages, strict=True))
    return seconds if ended else math.inf, tuple("".join(row) for row in run.rows)


class _Run:
    """The state of the pipeline at one moment.

    Attributes:
        numbers: of each stage, those of its times and of the rule that every decision needs.
        activations, gradients: arrivals by receiving stage, in order of micro-batches.
        after_free, before_free: when the link after and before a stage is free.
        wake: when a stage decides next: the end of its action, or the next arrival that it knows of.
        left: at least so many seconds take the actions that a stage has not begun; after: what follows the last.
    """

    def __init__(self, times: PipelineTimes, num_micro_batches: int, rule: ListRule) -> None:
        count = len(times.stages)
        self.links = [(x.forward_seconds, x.backward_seconds, x.latency_seconds) for x in times.links]
        self.numbers = [
            (
                x.forward_seconds, x.input_gradient_seconds, x.weight_gradient_seconds, backward, x.activation_bytes,
                x.deferred_bytes, x.memory_bytes, *limits, rule.patience * x.weight_gradient_seconds,
            )
            for x, backward, *limits in zip(
                times.stages, times.backward_seconds, rule.most_in_flight, rule.most_deferred, rule.forward_first
            )
        ]  # fmt: skip
        self.left = [num_micro_batches * (x.forward_seconds + sum(x.least_seconds)) for x in times.stages]
        self.after = [x.tail_seconds for x in times.stages]
        self.rows: list[list[str]] = [[] for _ in range(count)]
        self.ends = [0.0] * count
        self.activations: list[list[float]] = [[] for _ in range(count)]
        self.gradients: list[list[float]] = [[] for _ in range(count)]
        self.activations[0] = [0.0] * num_micro_batches
        self.after_free, self.before_free = [0.0] * count, [0.0] * count
        self.idle, self.wake = [True] * count, [math.inf] * count
        self.wake[0] = 0.0
        self.events = [(0.0, 0)]

    def all_actions(self, limit: float) -> bool:
        """In order of time; False where given up. One loop without calls for each action: most of the time that
        schedules are made in."""
        count = len(self.rows)
        last, links, after_free, before_free = count - 1, self.links, self.after_free, self.before_free
        rows, numbers, events, wake, idle = self.rows, self.numbers, self.events, self.wake, self.idle
        activations, gradients, left, after = self.activations, self.gradients, self.left, self.after
        forwards, backwards, deferred, held_bytes = [0] * count, [0] * count, [0] * count, [0.0] * count
        while events:
            clock, s = heappop(events)
            if clock != wake[s]:
                continue
            forward, inputs, weights, backward, kept_bytes, waiting, memory, flying, most_deferred, first, gap = (
                numbers[s]
            )
            forwards_done, backwards_done, due, full = forwards[s], backwards[s], deferred[s], held_bytes[s]
            activation_arrivals, gradient_arrivals = activations[s], gradients[s]
            ready = (
                forwards_done < len(activation_arrivals)
                and forwards_done - backwards_done < flying
                and full + kept_bytes <= memory
            )
            activation = activation_arrivals[forwards_done] if ready else math.inf
            gradient = gradient_arrivals[backwards_done] if backwards_done < len(gradient_arrivals) else math.inf
            if due > most_deferred:
                letter = "W"
            elif gradient <= clock and not (first and activation <= clock):
                letter = "I" if full - kept_bytes + waiting <= memory else "W" if due else "B"
            elif activation <= clock:
                letter = "F"
            else:
                arrival = activation if activation < gradient else gradient
                # Where a gradient would find no room, W's come first whatever arrives: waiting gains nothing.
                if due and (arrival - clock >= gap or full - kept_bytes + waiting > memory):
                    letter = "W"
                else:
                    idle[s], wake[s] = True, arrival
                    if arrival < math.inf:
                        heappush(events, (arrival, s))
                    continue
            to = -1  # the stage that the output goes to
            if letter == "W":
                deferred[s], held_bytes[s], end = due - 1, full - waiting, clock + weights
            elif letter == "F":
                forwards[s], held_bytes[s], end = forwards_done + 1, full + kept_bytes, clock + forward
                if s == last:
                    gradient_arrivals.append(end)
                else:
                    seconds, _, latency = links[s]
                    free = after_free[s]
                    after_free[s] = free = (end if end > free else free) + seconds
                    to, arrivals = s + 1, activations[s + 1]
            else:
                if letter == "B":
                    held_bytes[s], end = full - kept_bytes, clock + backward
                else:
                    deferred[s], held_bytes[s], end = due + 1, full - kept_bytes + waiting, clock + inputs
                backwards[s] = backwards_done + 1
                if s:
                    _, seconds, latency = links[s - 1]
                    free = before_free[s]
                    before_free[s] = free = (end if end > free else free) + seconds
                    to, arrivals = s - 1, gradients[s - 1]
            if to >= 0:
                arrival = free + latency
                arrivals.append(arrival)
                if idle[to] and arrival < wake[to]:
                    wake[to] = arrival
                    heappush(events, (arrival, to))
            left[s] -= end - clock
            if end + left[s] + after[s] > limit:
                return False
            rows[s].append(letter)
            idle[s], wake[s], self.ends[s] = False, end, end
            heappush(events, (end, s))
        return True


Block = tuple[int, int, int]  # stage, first and last place in its order: actions that follow without a pause
Move = tuple[int, int, int]  # stage, place of an action, place where it is put


def improve_orders(
    times: PipelineTimes, orders: Orders, goal_seconds: float, most_actions: int, patience: int
) -> tuple[float, Orders, int]:
    """Go from order to order, to no faster one only where there is no other, and never to one seen before.

    Args:
        orders: where to begin; no deadlock.
        goal_seconds: stop when reached.
        most_actions: stop when so many actions have been timed.
        patience: stop when so many orders in succession were no faster than the fastest.

    Returns:
        (seconds, orders) of the fastest seen, and the actions timed.
    """
    draw = random.Random(0)
    current, timing = orders, time_orders(times, orders)
    assert timing is not None, "starts from a deadlock"
    best, size = (timing.seconds, orders), sum(map(len, orders))
    tried_orders, timed, since = {orders}, size, 0
    while best[0] > goal_seconds and since < patience:
        following: tuple[Orders, Timing] | None = None
        for move in _moves(times, current, timing, draw):
            candidate = _moved(times, current, move)
            if candidate is None or candidate in tried_orders:
                continue
            if timed + size > most_actions or since >= patience:
                return *best, timed
            tried_orders.add(candidate)
            candidate_timing = time_orders(times, candidate)
            timed, since = timed + size, since + 1
            if candidate_timing is None:
                continue
            if candidate_timing.seconds <= timing.seconds:
                following = candidate, candidate_timing
                break
            if following is None or candidate_timing.seconds < following[1].seconds:
                following = candidate, candidate_timing
        if following is None:
            break
        current, timing = following
        if timing.seconds < best[0]:
            best, since = (timing.seconds, current), 0
    return *best, timed


def _moved(times: PipelineTimes, orders: Orders, move: Move) -> Orders | None:
    """The orders with one action elsewhere; None where that breaks the stage's order or memory, or changes nothing."""
    stage, source, target = move
    row = orders[stage]
    others = row[:source] + row[source + 1 :]
    moved = others[:target] + row[source] + others[target:]
    if moved == row or not keeps_order(moved) or not keeps_memory(times.stages[stage], moved):
        return None
    return (*orders[:stage], moved, *orders[stage + 1 :])


def _moves(times: PipelineTimes, orders: Orders, timing: Timing, draw: random.Random) -> list[Move]:
    """Of each block of the critical path: neighbours exchanged, and actions put at its begin or end."""
    moves: set[Move] = set()
    for stage, first, last in _critical_blocks(times, orders, timing):
        row = orders[stage]
        for place in range(max(0, first - 1), min(last + 1, len(row) - 1)):
            if row[place] != row[place + 1]:
                moves.add((stage, place, place + 1))
        moves.update((stage, place, end) for place in range(first, last + 1) for end in (first, last) if place != end)
    ordered = sorted(moves)
    draw.shuffle(ordered)
    return ordered


def _critical_blocks(times: PipelineTimes, orders: Orders, timing: Timing) -> Iterator[Block]:
    """The chain of actions that determines the step, from its end: blocks on stages, linked by transfers."""
    forwards = [[p for p, letter in enumerate(row) if letter == "F"] for row in orders]
    backwards = [[p for p, letter in enumerate(row) if letter in "IB"] for row in orders]
    final = [
        (row[-1] if row else 0.0) + stage.tail_seconds for row, stage in zip(timing.ends, times.stages, strict=True)
    ]
    s = final.index(timing.seconds)
    last = len(orders[s]) - 1
    while last >= 0:
        first = _block_start(orders[s], forwards[s], backwards[s], s, timing, last)
        yield s, first, last
        forward = orders[s][first] == "F"
        if forward and s == 0:
            return
        micro_batch = bisect_left(forwards[s] if forward else backwards[s], first)
        if not forward and s == len(orders) - 1:
            last = forwards[s][micro_batch]
            continue
        sender, link = (s - 1, times.links[s - 1]) if forward else (s + 1, times.links[s])
        occupied = link.forward_seconds if forward else link.backward_seconds
        arrivals, sent = (timing.activations, forwards) if forward else (timing.gradients, backwards)
        ends = timing.ends[sender]
        # Where the link was busy with the micro-batch before, that one's sender is what to look at.
        while (
            micro_batch and ends[sent[sender][micro_batch]] + occupied + link.latency_seconds < arrivals[s][micro_batch]
        ):
            micro_batch -= 1
        s, last = sender, sent[sender][micro_batch]


def _block_start(row: str, forwards: list[int], backwards: list[int], s: int, timing: Timing, place: int) -> int:
    """The first of the actions that follow each other without waiting for an arrival, up to ``place``."""
    while place:
        if row[place] == "W":
            place -= 1
            continue
        forward = row[place] == "F"
        arrivals = timing.activations[s] if forward else timing.gradients[s]
        if arrivals[bisect_left(forwards if forward else backwards, place)] > timing.ends[s][place - 1]:
            break
        place -= 1
    return place
