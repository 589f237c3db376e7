"""How many layers each stage gets: exact, for stages of unlike speed and memory.

Minimises ``max_i (time of the stages before i + micro-batches x time of stage i)``, the closed form of a pipeline's
time, where the time of a stage is any increasing function of its layers (inf: they do not fit).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LISTED = 6000  # up to so many splits are simply listed


@lru_cache(maxsize=64)
def splits(layers: int, stages: int) -> NDArray[np.int32]:
    """All ways to give ``stages`` stages ``layers`` layers in all, [ways, stages]; inner stages get at least one."""
    if stages == 1:
        return np.array([[layers]], np.int32)
    low = np.array([0] + [1] * (stages - 2) + [0])
    rest = layers - int(low.sum())
    if rest < 0:
        return np.zeros((0, stages), np.int32)
    rows = np.zeros((1, 0), np.int32)
    used = np.zeros(1, np.int32)
    for _ in range(stages - 1):
        counts = rest - used + 1
        base = np.repeat(np.arange(len(rows)), counts)
        value = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.concatenate([rows[base], value[:, None].astype(np.int32)], axis=1)
        used = used[base] + value.astype(np.int32)
    last = (rest - used)[:, None].astype(np.int32)
    return np.asarray(np.concatenate([rows, last], axis=1) + low, np.int32)


def count_splits(layers: int, stages: int) -> int:
    from math import comb

    inner = max(0, stages - 2)
    return comb(layers - inner + stages - 1, stages - 1) if layers >= inner else 0


def best_split(
    seconds: list[Floats],
    links: list[float],
    micro_batches: int,
    schedule: str = "1f1b",
    forward: list[Floats] | None = None,
) -> tuple[float, tuple[int, ...]] | None:
    """(closed form, layers per stage), or None when no split fits.

    Args:
        seconds: per stage, [layers + 1]: time of one micro-batch with so many layers; forward: of its forward alone,
            which only gpipe needs.
    """
    layers, count = len(seconds[0]) - 1, len(seconds)
    if count_splits(layers, count) <= LISTED:
        ways, worst, _ = listed(seconds, links, micro_batches, schedule, forward)
        if not len(ways):
            return None
        at = int(np.argmin(worst))
        return (float(worst[at]), tuple(int(x) for x in ways[at])) if np.isfinite(worst[at]) else None
    return _bisect(seconds, links, micro_batches)


def listed(
    seconds: list[Floats],
    links: list[float],
    micro_batches: int,
    schedule: str = "1f1b",
    forward: list[Floats] | None = None,
) -> tuple[NDArray[np.int32], Floats, Floats]:
    """(all splits [ways, stages], their closed forms [ways], seconds of their stages [ways, stages])."""
    count = len(seconds)
    ways = splits(len(seconds[0]) - 1, count)
    if not len(ways):
        return ways, np.zeros(0), np.zeros((0, count))
    times = np.stack([seconds[i][ways[:, i]] for i in range(count)], axis=1)
    worst = closed_forms(times, links, micro_batches)
    if schedule == "1f1b" and any(links):
        worst = np.maximum(worst, _round_trips(times, links, micro_batches))
    elif schedule == "gpipe" and forward is not None:
        first = np.stack([forward[i][ways[:, i]] for i in range(count)], axis=1)
        slow = max([*links, 0.0])
        phases = np.maximum(first.max(axis=1), slow) + np.maximum((times - first).max(axis=1), slow)
        worst = np.maximum(worst, micro_batches * phases)
    return ways, worst, times


def closed_forms(times: Floats, links: list[float], micro_batches: int) -> Floats:
    """[ways, stages] -> [ways]."""
    with np.errstate(invalid="ignore"):  # inf - inf: a stage before does not fit
        return _closed_forms(times, links, micro_batches)


def _closed_forms(times: Floats, links: list[float], micro_batches: int) -> Floats:
    steps = times.copy()
    steps[:, :-1] += 2 * np.asarray(links)
    before = np.cumsum(steps, axis=1) - steps
    worst: Floats = np.max(before + micro_batches * times, axis=1)
    return np.where(np.isnan(worst), np.inf, worst)


def _round_trips(times: Floats, links: list[float], m: int) -> Floats:
    """[ways, stages] -> [ways]: stage i has P - i micro-batches in flight, which go to the end and back."""
    with np.errstate(invalid="ignore"):
        steps = times.copy()
        steps[:, :-1] += 2 * np.asarray(links)
        before = np.cumsum(steps, axis=1) - steps
        trips = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
        rounds = (m - 1) // np.arange(times.shape[1], 0, -1) + 1
        worst: Floats = np.max(before + trips * rounds, axis=1)
    return np.where(np.isnan(worst), np.inf, worst)


def _bisect(seconds: list[Floats], links: list[float], micro_batches: int) -> tuple[float, tuple[int, ...]] | None:
    """Bisection on the time; for each, a dynamic program over (stage, layers so far) keeps the least time before."""
    layers = len(seconds[0]) - 1
    low = max(float(sum(np.min(s) for s in seconds)), micro_batches * _least_bottleneck(seconds))
    finite = [float(s[np.isfinite(s)].max()) if np.isfinite(s).any() else np.inf for s in seconds]
    high = sum(finite) * (micro_batches + len(seconds)) + 2 * sum(links)
    best, limit = None, low
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
        found = _feasible(seconds, links, micro_batches, middle, layers)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, found[0])
    return best


def _least_bottleneck(seconds: list[Floats]) -> float:
    """No split has a slowest stage below this: all stages busy at their best rate of layers per second."""
    layers = len(seconds[0]) - 1
    rate = 0.0
    for time in seconds:
        with np.errstate(divide="ignore"):
            rate += float(np.max(np.arange(1, layers + 1) / time[1:]))
    return layers / rate if rate > 0 else 0.0


def _feasible(
    seconds: list[Floats], links: list[float], m: int, limit: float, layers: int
) -> tuple[float, tuple[int, ...]] | None:
    before = np.full(layers + 1, np.inf)
    before[0] = 0.0
    choices = []
    last = len(seconds) - 1
    grid = np.arange(layers + 1)
    for i, time in enumerate(seconds):
        low = 0 if i in (0, last) else 1
        top = int(np.searchsorted(time * m, limit, side="right")) if np.isfinite(time).any() else 0
        if top <= low:
            return None
        take = np.arange(low, top)
        source = grid[:, None] - take[None, :]
        came = np.where(source >= 0, before[np.maximum(source, 0)], np.inf)
        own = time[take][None, :]
        value = np.where(came + m * own <= limit * (1 + 1e-12), came + own, np.inf)
        pick = np.argmin(value, axis=1)
        choices.append(take[pick])
        before = value[grid, pick] + (2 * links[i] if i < last else 0.0)
    if not np.isfinite(before[layers]):
        return None
    at, found = layers, []
    for taken in choices[::-1]:
        found.append(int(taken[at]))
        at -= found[-1]
    split = tuple(found[::-1])
    times = np.array([[seconds[i][n] for i, n in enumerate(split)]])
    return float(closed_forms(times, links, m)[0]), split
