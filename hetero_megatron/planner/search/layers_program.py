"""The dynamic program of :mod:`pipeline_dp`: the most layers that a pipeline on given chips can hold.

Given chips per group, a micro-batch size and a bottleneck time tau, the program over (set of groups used, stages so
far, counted from the last stage) finds the most layers in a pipeline whose stages take at most tau each, over all
orders of groups, TP and inner DP per group, stages per group, and recompute per stage. Memory counts the micro-batches
in flight at that position. A geometric grid of taus is solved at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.stage_table import StageKind, StageTable
from hetero_megatron.planner.search.materialize import Floats, Layers, ProgramInputs, added_seconds, rounded
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.utils.cached_method import cached_method

# Layers of a stage that does not fit, and of a run of stages that is not allowed (far below any sum of the former).
INFEASIBLE, FORBIDDEN = -1e5, -1e7
Bounds = tuple[float, dict[int, float]]  # seconds of pipelines over (the whole budget, by group over that group alone)
RATIO, GRID = 1.06, 44
BLOCK = 11  # taus solved at once
SOLVED = 250  # cells that are filled in the time of an action of a schedule
# Allowed numbers of consecutive stages of one group.
RUNS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def tau_of(steps: NDArray[np.int64]) -> Floats:
    """Bottleneck seconds of grid positions."""
    return np.asarray(RATIO ** steps.astype(np.float64))


def grid(least: float) -> range:
    """The grid positions for a program with this least bottleneck (s)."""
    start = math.ceil(math.log(least, RATIO) - 1e-9)
    return range(start, start + GRID)


@dataclass(frozen=True)
class PipelineFamily:
    """Equal pipelines over the groups in ``mask``, as the program found them.

    Attributes:
        budget: most chips per group of one pipeline.
        size: sequences per micro-batch.
        tau: seconds of the slowest stage and micro-batch; step: its position in the grid.
        replicas: number of such pipelines.
        sync: estimated seconds that gradient reduction adds to a step, if stages have no inner data parallel.
    """

    mask: int
    budget: tuple[int, ...]
    size: int
    tau: float
    stages: int
    replicas: int
    step: int  # place of tau in the grid
    sync: float

    def seconds(self, micro_batches: float) -> float:
        """Without gradient reduction."""
        return (micro_batches + self.stages - 1) * self.tau


class LayersProgram:
    """The program for one budget (chips per group), micro-batch size and number of pipelines."""

    def __init__(self, inputs: ProgramInputs, budget: tuple[int, ...], size: int, replicas: int) -> None:
        self.inputs, self.budget, self.size, self.replicas = inputs, budget, size, replicas
        tables = inputs.scorer.tables
        self.depth = min(tables.depth, inputs.model.num_layers + 2, sum(budget))
        self._replicas = replicas if inputs.few else rounded(replicas)
        share = 1 if inputs.few else self._replicas  # few chips may be divided unevenly
        self._most_depth = min(tables.depth, max(1, sum(inputs.counts) // share))
        self._replicas += tables.lent  # pipelines of other programs may be beside even a single one
        self.options = [[o for o in inputs.options(g, size) if o.chips <= budget[g]] for g in range(len(budget))]

    def table(self, option: StageTemplate, embed: bool, head: bool) -> Floats:
        """[in flight, layers] seconds, with replicas rounded down to a power of four; only the first row for the last
        stage (``head``), which has one micro-batch in flight."""
        return self._tables([option], embed, head)[0].seconds

    def _tables(self, stages: Sequence[StageTemplate], embed: bool, head: bool) -> list[StageTable]:
        recompute = self.inputs.space.recompute
        kinds = [StageKind(x.group, x.tp, x.dp, self.size, embed, head, self._replicas, recompute) for x in stages]
        return self.inputs.scorer.tables.tables(kinds, 1 if head else self._most_depth)

    def least_tau(self) -> float:
        """Lower bound (s) on the bottleneck of a pipeline over the whole budget: all chips always busy at their best
        rate."""
        rate = 0.0
        for g, budget in enumerate(self.budget):
            rates_of_chips = self.inputs.rates(g, self.size)
            rate += budget * max((best for chips, best in rates_of_chips if chips <= budget), default=0.0)
        return self.inputs.model.num_layers / rate if rate else math.inf

    def added_seconds(self, taus: Floats, mask: int) -> Floats:
        """:func:`added_seconds` of pipelines over the groups in ``mask``: ``taus`` [..., stages]."""
        return added_seconds(self._sync_seconds(mask), taus)

    @cached_method
    def _sync_seconds(self, mask: int) -> tuple[Floats, Floats]:
        groups = [g for g, n in enumerate(self.budget) if n and mask >> g & 1]
        chips = sum(self.budget[g] for g in groups)
        if self.replicas == 1 or not chips:
            no_seconds = np.zeros(self.depth + 1)
            return no_seconds, no_seconds
        holders = self.replicas * chips / np.maximum(np.arange(self.depth + 1), 1)
        elements = self.inputs.scorer.costs.memory.trained(1, self.inputs.model.num_layers, True, True)
        return self.inputs.sync_seconds(elements / chips, holders, groups)

    def least_seconds(self, nominal: float) -> tuple[Bounds, Bounds]:
        """Lower bounds (s) for ``nominal`` micro-batches, and estimates of these with gradient reduction. For every
        number of stages, the chips are used by the options with the best rates."""
        layers, count = self.inputs.model.num_layers, np.arange(self.depth + 1.0)
        ticks: Floats = nominal + count[1:] - 1
        gains, by_group = [], dict[int, tuple[float, float]]()
        for g, budget in enumerate(self.budget):
            points = [(chips, chips * rate) for chips, rate in self.inputs.rates(g, self.size) if chips <= budget]
            if points:
                chips, rates = _hull(points)
                rate = count * np.interp(budget / np.maximum(count, 1), chips, rates)  # concave in the number of stages
                gains.append(np.diff(rate))
                by_group[g] = self._least(layers / np.maximum.accumulate(rate[1:]), ticks, 1 << g)
        if not gains:
            return (math.inf, {}), (math.inf, {})
        best = np.cumsum(np.sort(np.maximum(np.concatenate(gains), 0.0))[::-1])[: self.depth]
        all_chips = self._least(layers / best, ticks, -1)
        plain, reduced = ((all_chips[i], {g: row[i] for g, row in by_group.items()}) for i in (0, 1))
        return plain, reduced

    def _least(self, taus: Floats, ticks: Floats, mask: int) -> tuple[float, float]:
        """The least times of pipelines with 1, 2, … stages, whose bottlenecks are at least ``taus``: without and with
        gradient reduction."""
        seconds = taus * ticks
        late = self.added_seconds(np.concatenate([taus[:1], taus]), mask)[1:]
        return float(seconds.min()), float((seconds + late).min())

    def capacity(self, option: StageTemplate, steps: range, embed: bool, head: bool, depth: int) -> Layers:
        """[tau, in flight]: most layers of a stage that takes at most tau; INFEASIBLE where it cannot hold any."""
        cached = self.inputs.capacities
        key = (option, self.size, self._replicas, embed, head)
        low, table = cached.get(key, (steps.start, None))
        if table is None or steps.start < low or steps.stop > low + len(table):
            # Programs with equal rounded replicas need nearly the same part of the grid: compute a wider part once.
            high = max(steps.start + GRID + GRID // 2, low + (0 if table is None else len(table)))
            low = min(steps.start - GRID // 2, low)
            table = self._capacity(option, range(low, high), embed, head)
            cached[key] = low, table
        return table[steps.start - low : steps.stop - low, :depth]

    def _capacity(self, option: StageTemplate, steps: range, embed: bool, head: bool) -> Layers:
        seconds = _monotone(self.table(option, embed, head))
        rows, width = len(seconds), len(steps)
        # [in flight, layers]: first grid position at which the stage is fast enough.
        first = np.ceil(np.log(np.maximum(seconds, 1e-300)) * (1 / math.log(RATIO)) - 1e-9) - steps.start
        cell = np.minimum(np.maximum(first, 0), width).astype(np.int64) + np.arange(rows)[:, None] * (width + 1)
        histogram = np.bincount(cell.ravel(), minlength=rows * (width + 1)).reshape(rows, width + 1)
        counts = np.cumsum(histogram[:, :width], axis=1).T - 1
        fewest = 0 if embed or head else 1
        return np.where(counts >= fewest, counts, INFEASIBLE).astype(np.float32)

    def matrices(self, steps: range, groups: Sequence[int]) -> dict[int, Layers]:
        """Per group [2, tau, stages before, stages after]: most layers of a run of stages of this group placed before a
        given number of later stages; as inner stages, and with the embedding on its first stage."""
        n, size = len(steps), self.depth + 1
        for embed, head in itertools.product((False, True), repeat=2):  # those that capacities are made from, at once
            self._tables([option for g in groups for option in self.options[g]], embed, head)
        by_group = {}
        for g in groups:
            matrix = np.full((2, n, size, size), INFEASIBLE, np.float32)
            inner, ends = matrix
            for option in self.options[g]:
                plain = self.capacity(option, steps, False, False, self.depth)
                first = self.capacity(option, steps, True, False, self.depth)
                single = self.capacity(option, steps, True, True, 1)
                total = np.zeros((n, size), np.float32)
                np.cumsum(plain, axis=1, out=total[:, 1:])
                gain = total[:, None, :] - total[:, :, None]
                gain += _run_lengths(size, min(self.budget[g] // option.chips, self.depth))
                gain[:, 0, :] += self.capacity(option, steps, False, True, 1) - plain[:, :1]
                np.maximum(inner, gain, out=inner)
                last = np.zeros((n, 1, size), np.float32)
                np.subtract(first, plain, out=last[:, 0, 1:])
                gain += last
                gain[:, 0, 1] = single[:, 0]
                np.maximum(ends, gain, out=ends)
            by_group[g] = matrix
        return by_group

    def masks(self) -> list[int]:
        """All sets of groups that a stage fits on, smaller ones first."""
        masks = [0]
        for g in (g for g, options in enumerate(self.options) if options):
            masks += [mask | 1 << g for mask in masks]
        return sorted(masks[1:], key=lambda mask: (bin(mask).count("1"), mask))

    def solve(
        self, steps: range, within: Sequence[int] = (-1,)
    ) -> tuple[dict[int, Layers], dict[int, Layers]]:
        """Solve for the sets of groups in ``within`` (-1: all) and their subsets.

        Returns:
            (by mask, 0 too, [2, tau, stages]: layers of inner parts, and of whole pipelines; :meth:`matrices`).
        """
        masks = [mask for mask in self.masks() if any(not mask & ~row for row in within)]
        groups = [g for g in range(len(self.budget)) if 1 << g in masks]
        cells = len(steps) * (self.depth + 1) ** 2
        ways = sum(len(self.options[g]) for g in groups) + 2 * sum(mask.bit_count() for mask in masks)
        self.inputs.scorer.work.add(cells * ways / SOLVED)
        matrices = self.matrices(steps, groups)
        start = np.full((2, len(steps), self.depth + 1), INFEASIBLE, np.float32)
        start[:, :, 0] = 0.0
        layers: dict[int, Layers] = {0: start}
        for mask in masks:
            most_layers = np.full_like(start, INFEASIBLE)
            for g in groups:
                if mask >> g & 1:
                    earlier = layers[mask & ~(1 << g)][0, :, :, None]
                    np.maximum(most_layers, (earlier + matrices[g]).max(axis=2), out=most_layers)
            layers[mask] = most_layers
        return layers, matrices

    def families(self, nominal: float) -> Iterator[PipelineFamily]:
        """Per set of groups the fastest families for ``nominal`` micro-batches: without gradient reduction, and with
        it."""
        least_tau = self.least_tau()
        if not math.isfinite(least_tau):
            return
        steps = grid(least_tau)
        taus = tau_of(np.array(steps))
        # By mask, smaller ones first, without gradient reduction and with it: (seconds, tau, stages, grid position).
        best = dict.fromkeys(itertools.product(self.masks(), (False, True)), (math.inf, math.inf, 0, 0))
        for start in range(0, len(steps), BLOCK):
            # Greater taus cannot improve masks whose best time is below nominal x tau.
            open_masks = sorted({mask for (mask, _), row in best.items() if nominal * taus[start] < row[0]})
            if not open_masks:
                break
            block = slice(start, start + BLOCK)
            ticks = (nominal + np.arange(self.depth + 1) - 1) * taus[block, None]
            for mask, layers in self.solve(steps[block], open_masks)[0].items():
                holds_all = layers[1] >= self.inputs.model.num_layers
                if not mask or not holds_all.any():
                    continue
                seconds = np.where(holds_all, ticks, np.inf)
                for added in (False, True):
                    seconds = seconds + self.added_seconds(taus[block, None], mask) if added else seconds
                    t, p = divmod(int(seconds.argmin()), self.depth + 1)
                    row = float(seconds[t, p]), float(taus[start + t]), p, steps[start + t]
                    best[mask, added] = min(best[mask, added], row)
        best_rows = dict.fromkeys((mask, *row[1:]) for (mask, _), row in best.items() if math.isfinite(row[0]))
        for mask, tau, p, step in best_rows:
            yield self._family(mask, tau, p, step)

    def _family(self, mask: int, tau: float, stages: int, step: int) -> PipelineFamily:
        budget = tuple(c if mask >> g & 1 else 0 for g, c in enumerate(self.budget))
        sync = float(self.added_seconds(np.full(self.depth + 1, tau), mask)[stages])
        return PipelineFamily(mask, budget, self.size, tau, stages, self.replicas, step, sync)

    def families_by_stages(self, most_tau: float) -> Iterator[PipelineFamily]:
        """Per set of groups and number of stages from two on, the family with the least bottleneck, up to
        ``most_tau`` (s)."""
        least_tau = self.least_tau()
        if not least_tau <= most_tau or math.isinf(least_tau):
            return
        steps = [step for step in grid(least_tau) if RATIO**step <= most_tau]
        yielded: set[tuple[int, int]] = set()
        for start in range(0, len(steps), BLOCK):
            block = range(steps[start], steps[min(start + BLOCK, len(steps)) - 1] + 1)
            for mask, layers in self.solve(block)[0].items():
                holds_all = layers[1] >= self.inputs.model.num_layers  # [tau, stages]
                for p in np.flatnonzero(holds_all.any(axis=0)).tolist():
                    if p >= 2 and (mask, p) not in yielded:
                        yielded.add((mask, p))
                        step = block[int(np.argmax(holds_all[:, p]))]
                        yield self._family(mask, RATIO**step, p, step)

    def trace(self, family: PipelineFamily) -> tuple[StageTemplate, ...]:
        """The stages of a family, first stage first, without layers."""
        steps = range(family.step, family.step + 1)
        layers, matrices = self.solve(steps, [family.mask])
        mask, stages_left, stages, final = family.mask, family.stages, [], 1  # 1: with the embedding
        while mask:
            value = layers[mask][final, 0, stages_left]
            g, stages_before = next(
                (g, p)
                for g in range(len(self.budget))
                if mask >> g & 1
                for p in range(stages_left)
                if abs(layers[mask & ~(1 << g)][0, 0, p] + matrices[g][final, 0, p, stages_left] - value) < 0.5
            )
            option = self._option(
                g,
                steps,
                stages_before,
                stages_left,
                bool(final),
                float(matrices[g][final, 0, stages_before, stages_left]),
            )
            stages += [option] * (stages_left - stages_before)
            mask, stages_left, final = mask & ~(1 << g), stages_before, 0
        return tuple(stages)

    def _option(self, g: int, steps: range, before: int, at: int, final: bool, want: float) -> StageTemplate:
        """The option behind an entry of a matrix; the one with the fewest chips if several."""
        for option in sorted(self.options[g], key=lambda o: o.chips):
            if option.chips * (at - before) > self.budget[g]:
                continue
            layers = [
                self.capacity(option, steps, final and k == at, k == 1, k)[0, k - 1] for k in range(before + 1, at + 1)
            ]
            if abs(sum(layers) - want) < 0.5:
                return option
        raise AssertionError("an entry of the program without an option")


@lru_cache(maxsize=256)
def _run_lengths(size: int, most: int) -> Layers:
    """[stages before, stages after]: 0 where the difference is an allowed run length, else FORBIDDEN."""
    runs = np.arange(size)[None, :] - np.arange(size)[:, None]
    allowed = np.isin(runs, [*(r for r in RUNS if r <= most), most]) & (runs > 0)
    return np.where(allowed, 0.0, FORBIDDEN).astype(np.float32)


def _hull(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    corners = [(0.0, 0.0)]
    for x, y in sorted(points):
        if y <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (a, b), (c, d) = corners[-2:]
            if (d - b) * (x - a) > (y - b) * (c - a) and c < x:
                break
            corners.pop()
        corners.append((float(x), y))
    return [x for x, _ in corners], [y for _, y in corners]


def _monotone(rows: Floats) -> Floats:
    """Rows made non-decreasing, so that they can be searched (recompute may make one more layer slightly cheaper)."""
    increasing: Floats = np.maximum.accumulate(rows, axis=1)
    return increasing
