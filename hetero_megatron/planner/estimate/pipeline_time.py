"""Seconds of pipelines with stages of unlike speed: closed-form lower bounds, and the exact time of the schedule.

``seconds`` equals ``schedule.simulate`` on the lowered actions. 1F1B has a recurrence over micro-batches instead of an
event queue, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.schedule import Costs, lowered, simulate

Floats = NDArray[np.float64]
Times = Sequence[float]
Link = tuple[float, float]  # seconds of a transfer over a boundary: of activations, of gradients back
Links = Sequence[Link]
CHECKED = 7  # rounds beyond the period between two comparisons of the clocks


def _directions(link: Links) -> tuple[Times, Times]:
    """(seconds of activations, of gradients back) over each boundary."""
    return [onward for onward, _ in link], [back for _, back in link]


def closed_forms(times: Floats, link: Links, micro_batches: int, schedule: str = "1f1b") -> Floats:
    """Lower bounds (s) on pipelines with the same links, used for ranking -> [ways]; inf where a stage does not fit.

    Stage i waits for the first micro-batch to pass the stages before it, then does all its work. 1f1b keeps P - i
    micro-batches in flight at stage i, so each takes at least the round trip to the last stage divided by that.

    Args:
        times: [ways, stages] forward and backward of one micro-batch (inf: does not fit).
        schedule: any other than 1f1b: what holds for all that respect the dependencies.
    """
    there_and_back = np.array([[sum(x) for x in link]]).reshape(1, -1)
    return closed_forms_of_each(times, there_and_back, micro_batches, schedule == "1f1b" and any(map(any, link)))


def closed_forms_of_each(times: Floats, links: Floats, micro_batches: float | Floats, round_trips: bool) -> Floats:
    """:func:`closed_forms` of pipelines with links of their own -> [ways].

    Args:
        links: [ways or 1, stages - 1] seconds of a transfer there and one back.
        micro_batches: of all, or [ways].
        round_trips: as 1f1b limits the micro-batches in flight.
    """
    count, m = times.shape[1], np.asarray(micro_batches, np.float64).reshape(-1, 1)
    with np.errstate(invalid="ignore"):  # inf - inf: a stage before does not fit
        steps = times.copy()
        steps[:, :-1] += links
        earlier = np.cumsum(steps, axis=1) - steps
        slowest = (earlier + m * times).max(axis=1)
        if round_trips:
            trips = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
            rounds = (m - 1) // np.arange(count, 0, -1) + 1
            slowest = np.maximum(slowest, (earlier + trips * rounds).max(axis=1))
    return np.asarray(np.where(np.isnan(slowest), np.inf, slowest))


def closed_form(forward: Times, backward: Times, link: Links, micro_batches: int, schedule: str = "1f1b") -> float:
    """:func:`closed_forms` of one pipeline, whose transfers over a boundary in one direction are one after the other.
    """
    busiest = micro_batches * max(map(max, link), default=0.0)
    times = np.array([forward]) + [backward]
    return max(busiest, float(closed_forms(times, link, micro_batches, schedule)[0]))


def seconds(forward: Times, backward: Times, link: Links, micro_batches: int, schedule: str = "1f1b") -> float:
    """Exact time (s) from the first start to the last end. Transfers in one direction over a boundary are serialised.
    """
    if schedule == "1f1b":
        return _one_f_one_b(forward, backward, link, micro_batches)
    onward, back = _directions(link)
    costs = Costs(forward, backward, onward, link_back=back)
    return simulate(lowered(schedule, len(forward), micro_batches), costs).step_seconds


def _one_f_one_b(forward: Times, backward: Times, link: Links, m: int) -> float:
    """Round j: every stage i runs B(i, j - P + i), then F(i, j); their inputs come from an earlier round or an earlier
    stage. After the warm-up all clocks advance by the same time every round (or every few rounds, where a round trip is
    the bottleneck). The remaining rounds but the last are then skipped."""
    p = len(forward)
    if p == 1:
        return m * (forward[0] + backward[0])
    onward, back = _directions(link)
    onward, back = [*onward, 0.0], [0.0, *back]  # of stage i, to the next and to the previous stage
    free = [0.0] * p
    # When the last gradient from stage i has arrived at stage i - 1 and their link is free again.
    grad_arrival = [0.0] * (p + 1)
    act_arrival = [0.0] * p  # the same for activations to stage i + 1
    last = p - 1
    periods = _periods(forward, backward, link) if m > 2 * p + 8 else ()
    interval, compared = max(periods, default=0) + CHECKED, None  # rounds between those whose clocks are compared with
    j = 0
    while j < m + p:
        for i in range(max(0, p - j), min(p, m + p - j)):
            start = free[i]
            if grad_arrival[i + 1] > start:
                start = grad_arrival[i + 1]
            free[i] = end = start + backward[i]
            grad_arrival[i] = (grad_arrival[i] if grad_arrival[i] > end else end) + back[i]
        if j < m:
            arrival = 0.0
            for i in range(p):
                start = free[i] if free[i] > arrival else arrival
                free[i] = end = start + forward[i]
                arrival = act_arrival[i] = (act_arrival[i] if act_arrival[i] > end else end) + onward[i]
        j += 1
        if periods and p < j < m:
            since = j % interval
            if compared is not None and since in periods:
                clocks = [*free, *grad_arrival[1:p], *act_arrival[:last]]
                step = _steady(compared, clocks)
                if step is not None:
                    times = (m - j) // since
                    clocks = [t + times * step for t in clocks]
                    free, grad_arrival[1:p], act_arrival[:last] = clocks[:p], clocks[p : 2 * p - 1], clocks[2 * p - 1 :]
                    j, periods = j + times * since, ()
            elif since == 0:
                compared = [*free, *grad_arrival[1:p], *act_arrival[:last]]
    return max(free)


def _periods(forward: Times, backward: Times, link: Links) -> tuple[int, ...]:
    """Numbers of rounds after which all clocks may advance by the same time: 1 where a stage or link is the bottleneck,
    else the micro-batches in flight of the slowest round trip."""
    count, trip, slowest, rounds = len(forward), 0.0, 0.0, 1
    for i in range(count - 1, -1, -1):
        trip += forward[i] + backward[i] + (sum(link[i]) if i < count - 1 else 0.0)
        if trip / (count - i) > slowest * (1 + 1e-12):
            slowest, rounds = trip / (count - i), count - i
    return tuple({1, rounds})


def _steady(before: Sequence[float], now: Sequence[float]) -> float | None:
    """Seconds by which all clocks advanced alike; None if they differ."""
    step, tolerance = now[0] - before[0], 1e-13 * now[0]
    return step if all(abs(a - b - step) <= tolerance for a, b in zip(now, before)) else None
