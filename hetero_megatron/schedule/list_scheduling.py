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
    run.all_actions()
    seconds = max(end + stage.tail_seconds for end, stage in zip(run.ends, times.stages, strict=True))
    return seconds, tuple("".join(row) for row in run.rows)


class _Run:
    """The state of the pipeline at one moment.

    Attributes:
        numbers: of each stage, those of its times and of the rule that every decision needs.
        activations, gradients: arrivals by receiving stage, in order of micro-batches.
        after_free, before_free: when the link after and before a stage is free.
        wake: when a stage decides next: the end of its action, or the next arrival that it knows of.
    """

    def __init__(self, times: PipelineTimes, num_micro_batches: int, rule: ListRule) -> None:
        count = len(times.stages)
        self.links = [(x.forward_seconds, x.backward_seconds, x.latency_seconds) for x in times.links]
        self.numbers = [
            (
                x.forward_seconds, x.input_gradient_seconds, x.weight_gradient_seconds, whole, x.activation_bytes,
                x.deferred_bytes, x.memory_bytes, *limits, rule.patience * x.weight_gradient_seconds,
            )
            for x, whole, *limits in zip(
                times.stages, times.backward_seconds, rule.most_in_flight, rule.most_deferred, rule.forward_first
            )
        ]  # fmt: skip
        self.rows: list[list[str]] = [[] for _ in range(count)]
        self.ends = [0.0] * count
        self.activations: list[list[float]] = [[] for _ in range(count)]
        self.gradients: list[list[float]] = [[] for _ in range(count)]
        self.activations[0] = [0.0] * num_micro_batches
        self.after_free, self.before_free = [0.0] * count, [0.0] * count
        self.idle, self.wake = [True] * count, [math.inf] * count
        self.wake[0] = 0.0
        self.events = [(0.0, 0)]

    def all_actions(self) -> None:
        """In order of time. One loop without calls for each action: most of the time that schedules are made in."""
        count = len(self.rows)
        rows, numbers, events, wake, idle = self.rows, self.numbers, self.events, self.wake, self.idle
        activations, gradients = self.activations, self.gradients
        forwards, backwards, deferred, held = [0] * count, [0] * count, [0] * count, [0.0] * count
        while events:
            clock, s = heappop(events)
            if clock != wake[s]:
                continue
            forward, inputs, weights, whole, kept, waiting, memory, flying, most, first, gap = numbers[s]
            done, back, due, full = forwards[s], backwards[s], deferred[s], held[s]
            here, there, letter = activations[s], gradients[s], ""
            ready = done < len(here) and done - back < flying and full + kept <= memory
            activation = here[done] if ready else math.inf
            gradient = there[back] if back < len(there) else math.inf
            if due > most:
                letter = "W"
            elif gradient <= clock and not (first and activation <= clock):
                letter = "I" if full - kept + waiting <= memory else "W" if due else "B"
            elif activation <= clock:
                letter = "F"
            else:
                arrival = activation if activation < gradient else gradient
                # Where a gradient would find no room, W's come first whatever arrives: waiting gains nothing.
                if due and (arrival - clock >= gap or full - kept + waiting > memory):
                    letter = "W"
                else:
                    idle[s], wake[s] = True, arrival
                    if arrival < math.inf:
                        heappush(events, (arrival, s))
                    continue
            if letter == "F":
                forwards[s], held[s], end = done + 1, full + kept, clock + forward
                self._sent_forward(s, end)
            elif letter == "W":
                deferred[s], held[s], end = due - 1, full - waiting, clock + weights
            else:
                backwards[s], held[s], end = back + 1, full - kept, clock + whole
                if letter == "I":
                    deferred[s], held[s], end = due + 1, full - kept + waiting, clock + inputs
                if s:
                    self._sent_backward(s, end)
            rows[s].append(letter)
            idle[s], wake[s], self.ends[s] = False, end, end
            heappush(events, (end, s))

    def _sent_forward(self, s: int, end: float) -> None:
        if s == len(self.rows) - 1:
            self.gradients[s].append(end)
            return
        seconds, _, latency = self.links[s]
        free = self.after_free[s]
        self.after_free[s] = free = (end if end > free else free) + seconds
        self._arrives(s + 1, self.activations[s + 1], free + latency)

    def _sent_backward(self, s: int, end: float) -> None:
        _, seconds, latency = self.links[s - 1]
        free = self.before_free[s]
        self.before_free[s] = free = (end if end > free else free) + seconds
        self._arrives(s - 1, self.gradients[s - 1], free + latency)

    def _arrives(self, s: int, arrivals: list[float], arrival: float) -> None:
        arrivals.append(arrival)
        if self.idle[s] and arrival < self.wake[s]:
            self.wake[s] = arrival
            heappush(self.events, (arrival, s))
