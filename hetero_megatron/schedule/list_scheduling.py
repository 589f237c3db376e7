"""List scheduling: in order of time, every stage that is free starts the action that a rule prefers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from hetero_megatron.schedule.pipeline_times import PipelineTimes
from hetero_megatron.schedule.stage_orders import Orders


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


def list_schedule(times: PipelineTimes, num_micro_batches: int, rule: ListRule) -> tuple[float, Orders]:
    """(seconds of the step, orders) of the schedule that ``rule`` makes; it keeps the stages' memory and never
    deadlocks, as the oldest micro-batch can always go on."""
    run = _Run(times, num_micro_batches, rule)
    while run.events:
        clock, stage = heappop(run.events)
        if clock == run.wake[stage]:
            run.start(stage, clock)
    seconds = max(end + stage.tail_seconds for end, stage in zip(run.ends, times.stages, strict=True))
    return seconds, tuple("".join(row) for row in run.rows)


class _Run:
    """The state of the pipeline at one moment. ``wake``: when a stage decides next: the end of its action, or the next
    arrival that it knows of."""

    def __init__(self, times: PipelineTimes, num_micro_batches: int, rule: ListRule) -> None:
        count = len(times.stages)
        self.times, self.rule, self.last = times, rule, count - 1
        self.rows: list[list[str]] = [[] for _ in range(count)]
        self.ends = [0.0] * count
        self.forwards, self.backwards, self.deferred = [0] * count, [0] * count, [0] * count
        self.held_bytes = [0.0] * count
        # Arrivals by receiving stage, in order of micro-batches; when the link after and before a stage is free.
        self.activations: list[list[float]] = [[] for _ in range(count)]
        self.gradients: list[list[float]] = [[] for _ in range(count)]
        self.activations[0] = [0.0] * num_micro_batches
        self.after_free, self.before_free = [0.0] * count, [0.0] * count
        self.idle, self.wake = [True] * count, [math.inf] * count
        self.wake[0] = 0.0
        self.events = [(0.0, 0)]

    def start(self, s: int, clock: float) -> None:
        """Stage ``s`` is free at ``clock``: start an action, or wait."""
        stage, rule = self.times.stages[s], self.rule
        forwards, backwards, deferred = self.forwards[s], self.backwards[s], self.deferred[s]
        held, arrivals = self.held_bytes[s], self.activations[s]
        activation = gradient = math.inf
        if (
            forwards < len(arrivals)
            and forwards - backwards < rule.most_in_flight[s]
            and held + stage.activation_bytes <= stage.memory_bytes
        ):
            activation = arrivals[forwards]
        if backwards < len(self.gradients[s]):
            gradient = self.gradients[s][backwards]
        may_split = held - stage.activation_bytes + stage.deferred_bytes <= stage.memory_bytes
        if deferred > rule.most_deferred[s]:
            self._weight_gradient(s, clock)
        elif gradient <= clock and not (rule.forward_first[s] and activation <= clock):
            if may_split:
                self._backward(s, clock, "I")
            elif deferred:
                self._weight_gradient(s, clock)
            else:
                self._backward(s, clock, "B")
        elif activation <= clock:
            self._forward(s, clock)
        else:
            arrival = min(activation, gradient)
            # Where a gradient would find no room, W's come first whatever arrives: waiting gains nothing.
            if deferred and (not may_split or arrival - clock >= rule.patience * stage.weight_gradient_seconds):
                self._weight_gradient(s, clock)
                return
            self.idle[s], self.wake[s] = True, arrival
            if arrival < math.inf:
                heappush(self.events, (arrival, s))

    def _forward(self, s: int, clock: float) -> None:
        stage = self.times.stages[s]
        self.forwards[s] += 1
        self.held_bytes[s] += stage.activation_bytes
        end = clock + stage.forward_seconds
        self._ends(s, "F", end)
        if s == self.last:
            self.gradients[s].append(end)
            return
        link = self.times.links[s]
        self.after_free[s] = free = max(end, self.after_free[s]) + link.forward_seconds
        self._arrives(s + 1, self.activations[s + 1], free + link.latency_seconds)

    def _backward(self, s: int, clock: float, letter: str) -> None:
        stage = self.times.stages[s]
        self.backwards[s] += 1
        self.held_bytes[s] -= stage.activation_bytes
        if letter == "I":
            self.deferred[s] += 1
            self.held_bytes[s] += stage.deferred_bytes
        end = clock + (stage.input_gradient_seconds if letter == "I" else self.times.backward_seconds[s])
        self._ends(s, letter, end)
        if s:
            link = self.times.links[s - 1]
            self.before_free[s] = free = max(end, self.before_free[s]) + link.backward_seconds
            self._arrives(s - 1, self.gradients[s - 1], free + link.latency_seconds)

    def _weight_gradient(self, s: int, clock: float) -> None:
        stage = self.times.stages[s]
        self.deferred[s] -= 1
        self.held_bytes[s] -= stage.deferred_bytes
        self._ends(s, "W", clock + stage.weight_gradient_seconds)

    def _ends(self, s: int, letter: str, end: float) -> None:
        self.rows[s].append(letter)
        self.idle[s], self.wake[s], self.ends[s] = False, end, end
        heappush(self.events, (end, s))

    def _arrives(self, s: int, arrivals: list[float], arrival: float) -> None:
        arrivals.append(arrival)
        if self.idle[s] and arrival < self.wake[s]:
            self.wake[s] = arrival
            heappush(self.events, (arrival, s))
