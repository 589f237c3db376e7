"""Local search on the stages' orders: moves along the critical path, as in tabu search for job shops (Nowicki and
Smutnicki, 1996)."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator

from hetero_megatron.schedule.pipeline_times import PipelineTimes
from hetero_megatron.schedule.stage_orders import Orders, Timing, keeps_memory, keeps_order, time_orders

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
    here, timing = orders, time_orders(times, orders)
    assert timing is not None, "starts from a deadlock"
    best, size = (timing.seconds, orders), sum(map(len, orders))
    seen, timed, since = {orders}, size, 0
    while best[0] > goal_seconds and since < patience:
        following: tuple[Orders, Timing] | None = None
        for move in _moves(times, here, timing, draw):
            candidate = _moved(times, here, move)
            if candidate is None or candidate in seen:
                continue
            if timed + size > most_actions or since >= patience:
                return *best, timed
            seen.add(candidate)
            found = time_orders(times, candidate)
            timed, since = timed + size, since + 1
            if found is None:
                continue
            if found.seconds <= timing.seconds:
                following = candidate, found
                break
            if following is None or found.seconds < following[1].seconds:
                following = candidate, found
        if following is None:
            break
        here, timing = following
        if timing.seconds < best[0]:
            best, since = (timing.seconds, here), 0
    return *best, timed


def _moved(times: PipelineTimes, orders: Orders, move: Move) -> Orders | None:
    """The orders with one action elsewhere; None where that breaks the stage's order or memory, or changes nothing."""
    stage, source, target = move
    row = orders[stage]
    rest = row[:source] + row[source + 1 :]
    new = rest[:target] + row[source] + rest[target:]
    if new == row or not keeps_order(new) or not keeps_memory(times.stages[stage], new):
        return None
    return (*orders[:stage], new, *orders[stage + 1 :])


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
