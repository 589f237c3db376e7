"""Seconds of pipelines with stages of unlike speed (closed-form lower bounds, and the exact time of the schedule), and
the numbers of layers per stage that are best by them.

``seconds`` equals ``schedule.simulate`` on the lowered actions. 1F1B has a recurrence over micro-batches instead of an
event queue, with the same result. Layers are divided so that the closed form is least, ``max_i (time of the stages
before i + micro-batches x time of stage i)``, where the time of a stage is any non-decreasing function of its layers
(inf: they do not fit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

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


LISTED = 6000  # largest number of splits that are enumerated; above, bisection


@lru_cache(maxsize=64)
def splits(layers: int, stages: int) -> NDArray[np.int32]:
    """[ways, stages] int32: all ways to divide ``layers`` among ``stages``; inner stages get at least one layer."""
    if stages == 1:
        return np.array([[layers]], np.int32)
    low = np.array([0] + [1] * (stages - 2) + [0])
    to_divide = layers - int(low.sum())
    if to_divide < 0:
        return np.zeros((0, stages), np.int32)
    rows = np.zeros((1, 0), np.int32)
    used = np.zeros(1, np.int32)
    for _ in range(stages - 1):
        counts = to_divide - used + 1
        base = np.repeat(np.arange(len(rows)), counts)
        value = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.concatenate([rows[base], value[:, None].astype(np.int32)], axis=1)
        used = used[base] + value.astype(np.int32)
    last = (to_divide - used)[:, None].astype(np.int32)
    return np.asarray(np.concatenate([rows, last], axis=1) + low, np.int32)


def count_splits(layers: int, stages: int) -> int:
    inner = max(0, stages - 2)
    return math.comb(layers - inner + stages - 1, stages - 1) if layers >= inner else 0


def best_split(
    seconds: list[Floats], links: Links, micro_batches: int, update: list[Floats] | None = None
) -> tuple[float, tuple[int, ...]] | None:
    """(closed form in seconds, layers per stage), or None when no split fits.

    Args:
        seconds: per stage, [layers + 1]: forward and backward of one micro-batch with so many layers (inf: does not
            fit).
        update: the same of the optimizer's step, by which the step ends later where the splits are few enough to be
            listed; None: it takes no time.
    """
    layers, count = len(seconds[0]) - 1, len(seconds)
    if count_splits(layers, count) > LISTED:
        return _bisect(seconds, links, micro_batches)
    ways = splits(layers, count)
    if not len(ways):
        return None
    times = np.stack([seconds[i][ways[:, i]] for i in range(count)], axis=1)
    step_seconds = closed_forms(times, links, micro_batches)
    if update is not None:
        step_seconds += np.max([update[i][ways[:, i]] for i in range(count)], axis=0)
    fastest = int(np.argmin(step_seconds))
    return (
        (float(step_seconds[fastest]), tuple(int(x) for x in ways[fastest]))
        if np.isfinite(step_seconds[fastest])
        else None
    )


def _bisect(seconds: list[Floats], links: Links, micro_batches: int) -> tuple[float, tuple[int, ...]] | None:
    """Bisection on the pipeline time; a dynamic program over (stage, layers so far) tests feasibility."""
    layers = len(seconds[0]) - 1
    slowest, best = _even_split(seconds, links, micro_batches)
    low = max(float(sum(np.min(s) for s in seconds)), micro_batches * slowest)
    finite = [float(s[np.isfinite(s)].max()) if np.isfinite(s).any() else np.inf for s in seconds]
    high, limit = sum(finite) * (micro_batches + len(seconds)) + sum(map(sum, links)), low
    while best is None and limit < high:
        limit = min(limit * 1.25, high) if limit > 0 else high
        best = _feasible(seconds, links, micro_batches, limit, layers)
        low = low if best is not None else limit
    if best is None:
        return None
    high = best[0]
    for _ in range(40):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        candidate = _feasible(seconds, links, micro_batches, middle, layers)
        if candidate is None:
            low = middle
        else:
            best, high = candidate, min(middle, candidate[0])
    return best


def _even_split(seconds: list[Floats], links: Links, m: int) -> tuple[float, tuple[float, tuple[int, ...]] | None]:
    """(lower bound on the slowest stage's time in any split; a feasible starting split with its closed form, or None).
    The split gives every stage what it can do within the bottleneck time and takes surplus layers from the slowest
    stages."""
    stage_seconds = np.stack(seconds)
    layers, count = stage_seconds.shape[1] - 1, len(stage_seconds)
    # Recompute may make one more layer slightly cheaper; these are monotone upper and lower envelopes.
    rows, lower_rows = (
        np.maximum.accumulate(stage_seconds, axis=1),
        np.minimum.accumulate(stage_seconds[:, ::-1], axis=1)[:, ::-1],
    )
    limit = bottleneck(rows, layers)
    slowest = limit if np.array_equal(rows, lower_rows) else bottleneck(lower_rows, layers)
    if not np.isfinite(limit):
        return (slowest if np.isfinite(slowest) else 0.0), None
    split = (rows <= limit).sum(axis=1) - 1
    fewest = np.minimum(np.arange(count), np.arange(count)[::-1]).clip(0, 1)
    if (split < fewest).any():
        return slowest, None
    for _ in range(int(split.sum()) - layers):
        slowest_stage = int(np.argmax(np.where(split > fewest, rows[np.arange(count), split], -np.inf)))
        split[slowest_stage] -= 1
    if (split < fewest).any():
        return slowest, None
    layers_of = tuple(int(n) for n in split)
    value = float(closed_forms(stage_seconds[np.arange(count), split][None, :], links, m, "any")[0])
    return slowest, (value, layers_of) if np.isfinite(value) else None


def bottleneck(rows: Floats, layers: int) -> float:
    """Least time (s) within which stages with these non-decreasing times [stages, layers + 1] hold all layers; inf:
    impossible."""
    values = np.sort(rows[np.isfinite(rows)])
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if int((rows <= values[middle]).sum()) - len(rows) >= layers:
            high = middle
        else:
            low = middle + 1
    return float(values[low]) if low < len(values) else math.inf


def _feasible(
    seconds: list[Floats], links: Links, m: int, limit: float, layers: int
) -> tuple[float, tuple[int, ...]] | None:
    """A split within ``limit`` seconds, or None. States: layers assigned so far, limited to what the later stages can
    still hold."""
    last = len(seconds) - 1
    tops, limit = [], limit * (1 + 1e-12)
    for time in seconds:  # inf where layers do not fit; not monotone: recompute may make a layer more cheaper
        within_limit = np.flatnonzero(time * m <= limit)
        tops.append(int(within_limit[-1]) if len(within_limit) else -1)
    if min(tops) < 0 or sum(tops) < layers:
        return None
    later_tops, reach = sum(tops), 0
    start, seconds_so_far, choices = 0, np.zeros(1), []
    for i, time in enumerate(seconds):
        low = 0 if i in (0, last) else 1
        later_tops -= tops[i]
        reach = min(reach + tops[i], layers)
        first = max(layers - later_tops, start + low)  # fewest layers so far
        if tops[i] < low or first > reach:
            return None
        take = np.arange(low, tops[i] + 1)
        assigned = np.arange(first, reach + 1)
        source = assigned[:, None] - take[None, :] - start
        inside = (source >= 0) & (source < len(seconds_so_far))
        earlier = np.where(inside, seconds_so_far[np.where(inside, source, 0)], np.inf)
        stage_time = time[take][None, :]
        value = np.where(earlier + m * stage_time <= limit, earlier + stage_time, np.inf)
        pick = np.argmin(value, axis=1)
        choices.append((first, take[pick]))
        seconds_so_far = value[np.arange(len(assigned)), pick] + (sum(links[i]) if i < last else 0.0)
        start = first
    if not np.isfinite(seconds_so_far[layers - start]):
        return None
    so_far, counts = layers, []
    for start, takes in choices[::-1]:
        counts.append(int(takes[so_far - start]))
        so_far -= counts[-1]
    split = tuple(counts[::-1])
    times = np.array([[seconds[i][n] for i, n in enumerate(split)]])
    return float(closed_forms(times, links, m, "any")[0]), split
