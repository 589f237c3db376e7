"""Search for clusters that are too large to enumerate.

1. *Pipelines by dynamic programming.* For a number of chips per group, a micro-batch size and a bottleneck time tau, a
   program over (set of chip groups used, stages so far, counted from the last one) finds the most layers that a
   pipeline can hold, over all orders of groups, TP and inner DP per group, stages per group, and recompute per
   stage. Memory counts the micro-batches in flight of that place in the pipeline. A grid of taus is done at once.
2. *Side by side.* Groups are divided into islands (a program over sets of groups); each island runs equal pipelines
   of its own, and all islands end together.
3. *Mixed columns.* A beam search combines pipelines of unlike make-up that share a group.
4. The best few are made concrete (exact layers, recompute, batch shares) and evaluated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.stage_table import StageKind, per_layer
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.search.islands_dp import IslandCover
from hetero_megatron.planner.search.materialize import PipelineOutline, TemplateBuilder
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate
from hetero_megatron.planner.template.search_space import SearchSpace, StageOption, batch_sizes, options
from hetero_megatron.planner.time_budget import Late, never
from hetero_megatron.spec import ModelSpec

Floats = NDArray[np.float64]
Layers = NDArray[np.float32]  # whole numbers, so exact
NONE, NO = -1e5, -1e7  # layers of a stage that cannot be; of a run that cannot be, whatever is taken off for stages
RATIO, GRID = 1.06, 44
BLOCK = 11  # taus of the grid that are done at once
CUT = 1.03  # programs whose bound is so much above the best found so far are not solved
FAR = 1.5  # the same for pipelines over a single group where none was found yet
RUNS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


@dataclass(frozen=True)
class PipelineFamily:
    """Equal pipelines over a set of groups (``mask``), as the program found them: with ``stages`` stages of at most
    ``tau`` seconds, on at most ``budget`` chips per group and pipeline."""

    mask: int
    budget: tuple[int, ...]
    size: int
    tau: float
    stages: int
    replicas: int
    step: int  # place of tau in the grid

    def most(self, limit: float) -> int:
        """Sequences that one pipeline computes within ``limit`` seconds."""
        return max(0, math.floor(limit / self.tau - self.stages + 1 + 1e-9)) * self.size

    def seconds(self, micro_batches: float) -> float:
        return (micro_batches + self.stages - 1) * self.tau


class LayersProgram:
    """Step 1 for one budget, micro-batch size and number of replicas."""

    def __init__(self, search: PipelineDP, budget: tuple[int, ...], size: int, replicas: int) -> None:
        self.search, self.budget, self.size, self.replicas = search, budget, size, replicas
        tables = search.evaluator.tables
        self.depth = min(tables.depth, search.model.num_layers + 2, sum(budget))
        self._replicas = 4 ** int(math.log(replicas, 4) + 1e-9)  # memory is taken at a conservative power of four
        self._most_depth = min(tables.depth, max(1, sum(search.counts) // self._replicas))  # of programs with as many
        self.options = [[o for o in search.options(g, size) if o.chips <= budget[g]] for g in range(len(budget))]

    def table(self, option: StageOption, embed: bool, head: bool) -> Floats:
        """[in flight, layers] seconds, with memory at a conservative power of four of replicas; with the head (the last
        stage, counted from which there is one in flight) of the first row only."""
        kind = StageKind(
            option.group, option.tp, option.dp, self.size, embed, head, self._replicas, self.search.space.recompute
        )
        return self.search.evaluator.tables.table(kind, 1 if head else self._most_depth).seconds

    def least_tau(self) -> float:
        """No pipeline over the whole budget has a smaller bottleneck: all chips busy all the time at their best
        rate."""
        rate = 0.0
        for g, budget in enumerate(self.budget):
            known = self.search.rates(g, self.size)
            rate += budget * max((best for chips, best in known if chips <= budget), default=0.0)
        return self.search.model.num_layers / rate if rate else math.inf

    def least_seconds(self, nominal: float) -> tuple[float, dict[int, float]]:
        """(no pipeline over all of the budget takes less for ``nominal`` micro-batches; the same for each group alone):
        with every number of stages, the options taken that use the chips best."""
        layers, count = self.search.model.num_layers, np.arange(self.depth + 1)
        ticks = nominal + count[1:] - 1
        gains, alone = [], {}
        for g, budget in enumerate(self.budget):
            points = [(chips, chips * rate) for chips, rate in self.search.rates(g, self.size) if chips <= budget]
            if points:
                chips, rates = _hull(points)
                rate = count * np.interp(budget / np.maximum(count, 1), chips, rates)  # of so many stages: concave
                gains.append(np.diff(rate))
                alone[g] = float(np.min(layers * ticks / np.maximum.accumulate(rate[1:])))
        if not gains:
            return math.inf, {}
        best = np.cumsum(np.sort(np.maximum(np.concatenate(gains), 0.0))[::-1])[: self.depth]
        return float(np.min(layers * ticks / best)), alone

    def capacity(self, option: StageOption, steps: range, embed: bool, head: bool, depth: int) -> Layers:
        """[tau, in flight]: most layers of a stage that takes at most tau; NONE where it cannot hold any."""
        known = self.search.capacities
        key = (option, self.size, self._replicas, embed, head)
        low, found = known.get(key, (steps.start, None))
        if found is None or steps.start < low or steps.stop > low + len(found):
            # Programs with so many replicas look at much the same part of the grid, a little further for more of them.
            high = max(steps.start + GRID + GRID // 2, low + (0 if found is None else len(found)))
            low = min(steps.start - GRID // 2, low)
            found = self._capacity(option, range(low, high), embed, head)
            known[key] = low, found
        return found[steps.start - low : steps.stop - low, :depth]

    def _capacity(self, option: StageOption, steps: range, embed: bool, head: bool) -> Layers:
        seconds = _monotone(self.table(option, embed, head))
        rows, width = len(seconds), len(steps)
        # The tau at which it is in time.
        first = np.ceil(np.log(np.maximum(seconds, 1e-300)) * (1 / math.log(RATIO)) - 1e-9) - steps.start
        at = np.minimum(np.maximum(first, 0), width).astype(np.int64) + np.arange(rows)[:, None] * (width + 1)
        found = np.bincount(at.ravel(), minlength=rows * (width + 1)).reshape(rows, width + 1)
        counts = np.cumsum(found[:, :width], axis=1).T - 1
        least = 0 if embed or head else 1
        return np.where(counts >= least, counts, NONE).astype(np.float32)

    def matrices(self, steps: range, groups: Sequence[int]) -> dict[int, tuple[Layers, Layers]]:
        """Per group, [tau, stages before, stages after]: most layers of a run of stages of this group behind (nearer
        the end: before) others; as inner stages, and with the embedding on the last one added."""
        n, size = len(steps), self.depth + 1
        found = {}
        for g in groups:
            inner = np.full((n, size, size), NONE, np.float32)
            ends = inner.copy()
            for option in self.options[g]:
                plain = self.capacity(option, steps, False, False, self.depth)
                first = self.capacity(option, steps, True, False, self.depth)
                single = self.capacity(option, steps, True, True, 1)
                total = np.zeros((n, size), np.float32)
                np.cumsum(plain, axis=1, out=total[:, 1:])
                gain = total[:, None, :] - total[:, :, None]
                gain += _runs(size, min(self.budget[g] // option.chips, self.depth))
                gain[:, 0, :] += self.capacity(option, steps, False, True, 1) - plain[:, :1]
                np.maximum(inner, gain, out=inner)
                last = np.zeros((n, 1, size), np.float32)
                np.subtract(first, plain, out=last[:, 0, 1:])
                gain += last
                gain[:, 0, 1] = single[:, 0]
                np.maximum(ends, gain, out=ends)
            found[g] = (inner, ends)
        return found

    def masks(self) -> list[int]:
        """All sets of groups that a stage fits on, smaller ones first."""
        masks = [0]
        for g in (g for g, found in enumerate(self.options) if found):
            masks += [mask | 1 << g for mask in masks]
        return sorted(masks[1:], key=lambda mask: (bin(mask).count("1"), mask))

    def solve(
        self, steps: range, within: Sequence[int] = (-1,)
    ) -> tuple[dict[int, Layers], dict[int, Layers], dict[int, tuple[Layers, Layers]]]:
        """(layers by mask [tau, stages], inner; the same for whole pipelines; the matrices), for these masks and all
        parts of them."""
        masks = [mask for mask in self.masks() if any(not mask & ~row for row in within)]
        groups = [g for g in range(len(self.budget)) if 1 << g in masks]
        matrices = self.matrices(steps, groups)
        start = np.full((len(steps), self.depth + 1), NONE, np.float32)
        start[:, 0] = 0.0
        inner: dict[int, Layers] = {0: start}
        whole: dict[int, Layers] = {}
        for mask in masks:
            a = np.full_like(start, NONE)
            b = a.copy()
            for g in groups:
                if mask >> g & 1:
                    before = inner[mask & ~(1 << g)][:, :, None]
                    np.maximum(a, np.max(before + matrices[g][0], axis=1), out=a)
                    np.maximum(b, np.max(before + matrices[g][1], axis=1), out=b)
            inner[mask], whole[mask] = a, b
        return inner, whole, matrices

    def families(self, nominal: float, grid: int = GRID) -> Iterator[PipelineFamily]:
        """Per set of groups the one with the least time for ``nominal`` micro-batches; ``grid``: taus looked at."""
        least = self.least_tau()
        if not math.isfinite(least):
            return
        steps = self.search.grid(least)[:grid]
        taus = self.search.tau(np.array(steps))
        # By mask, smaller ones first: seconds, tau, stages, place of tau.
        best = dict.fromkeys(self.masks(), (math.inf, math.inf, 0, 0))
        for start in range(0, len(steps), BLOCK):
            # Greater taus are of no use to what takes less already than all micro-batches of one stage would.
            within = [mask for mask, row in best.items() if nominal * taus[start] < row[0]]
            if not within:
                break
            block = slice(start, start + BLOCK)
            for mask, layers in self.solve(steps[block], within)[1].items():
                best[mask] = min(best[mask], self._fastest(layers, nominal, taus[block], steps[block]))
        for mask, (seconds, tau, p, step) in best.items():
            if math.isfinite(seconds):
                budget = tuple(c if mask >> g & 1 else 0 for g, c in enumerate(self.budget))
                yield PipelineFamily(mask, budget, self.size, tau, p, self.replicas, step)

    def _fastest(self, layers: Layers, nominal: float, taus: Floats, steps: range) -> tuple[float, float, int, int]:
        """(seconds, tau, stages, place of tau) of the pipelines that hold all layers in the least time."""
        ticks = nominal + np.arange(self.depth + 1) - 1
        seconds = np.where(layers >= self.search.model.num_layers, ticks * taus[:, None], np.inf)
        t, p = divmod(int(np.argmin(seconds)), self.depth + 1)
        return float(seconds[t, p]), float(taus[t]), p, steps[t]

    def trace(self, family: PipelineFamily) -> tuple[StageTemplate, ...]:
        """The stages of a family, first one first, without layers."""
        steps = range(family.step, family.step + 1)
        inner, whole, matrices = self.solve(steps, [family.mask])
        mask, at, stages, final = family.mask, family.stages, [], True
        while mask:
            value = (whole if final else inner)[mask][0, at]
            g, before = next(
                (g, p)
                for g in range(len(self.budget))
                if mask >> g & 1
                for p in range(at)
                if abs(inner[mask & ~(1 << g)][0, p] + matrices[g][1 if final else 0][0, p, at] - value) < 0.5
            )
            option = self._option(g, steps, before, at, final, float(matrices[g][1 if final else 0][0, before, at]))
            stages += [StageTemplate(g, option.tp, option.dp)] * (at - before)
            mask, at, final = mask & ~(1 << g), before, False
        return tuple(stages)

    def _option(self, g: int, steps: range, before: int, at: int, final: bool, want: float) -> StageOption:
        """The option behind an entry of a matrix; the one with the fewest chips if several."""
        for option in sorted(self.options[g], key=lambda o: o.chips):
            if option.chips * (at - before) > self.budget[g]:
                continue
            own = [
                self.capacity(option, steps, final and k == at, k == 1, k)[0, k - 1] for k in range(before + 1, at + 1)
            ]
            if abs(sum(own) - want) < 0.5:
                return option
        raise AssertionError("an entry of the program without an option")


class PipelineDP:
    """See the module docstring. ``counts``: chips that may be used, per group; None: all. ``late``: whether to stop."""

    def __init__(
        self,
        evaluator: TemplateScorer,
        model: ModelSpec,
        batch: int,
        space: SearchSpace,
        improve: Callable[[PlanTemplate, float], bool],
        counts: tuple[int, ...] | None = None,
        late: Late = never,
    ) -> None:
        self.evaluator, self.pool, self.model = evaluator, evaluator.pool, model
        self.counts = counts or self.pool.counts
        self.everything = sum(1 << g for g, n in enumerate(self.counts) if n)
        self.batch, self.space, self.improve, self.late = batch, space, improve, late
        self.builder = TemplateBuilder(evaluator, model, batch, space)
        self._options: dict[tuple[int, int], list[StageOption]] = {}
        self.families: list[PipelineFamily] = []
        self.capacities: dict[tuple[object, ...], tuple[int, Layers]] = {}  # from a place in the grid
        self._rates: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._traced: dict[PipelineFamily, tuple[StageTemplate, ...]] = {}
        self.rejected: dict[str, int] = {}

    @staticmethod
    def tau(steps: NDArray[np.int64]) -> Floats:
        """Bottleneck seconds of places in the grid."""
        return np.asarray(RATIO ** steps.astype(np.float64))

    @staticmethod
    def grid(least: float) -> range:
        """The part of the grid that a program with this least bottleneck looks at."""
        start = math.ceil(math.log(least, RATIO) - 1e-9)
        return range(start, start + GRID)

    def options(self, group: int, size: int) -> list[StageOption]:
        if (group, size) not in self._options:
            found = options(self.pool, group, self.model, self.space, size, every=self.pool.groups[group].per_node <= 4)
            self._options[group, size] = [o for o in found if o.dp <= 4]
        return self._options[group, size]

    def rates(self, group: int, size: int) -> list[tuple[int, float]]:
        """(chips, layers per second and chip) of the options of a group, with the memory that most replicas leave."""
        if (group, size) not in self._rates:
            found = []
            for o in self.options(group, size):
                most = 4 ** int(math.log(self._most_pipelines(), 4) + 1e-9)
                kind = StageKind(group, o.tp, o.dp, size, False, False, most, self.space.recompute)
                seconds = self.evaluator.tables.table(kind, 1).seconds[0]
                per = per_layer(seconds)
                if np.isfinite(per) and per > 0:
                    found.append((o.chips, 1 / (per * o.chips)))
            self._rates[group, size] = found
        return self._rates[group, size]

    def _most_pipelines(self) -> int:
        return max(1, min(self.batch, sum(self.counts), self.space.max_pipelines or sum(self.counts)))

    def run(self) -> bool:
        """True when everything planned was searched; False when ``improve`` or ``late`` asked to stop."""
        self.families = self._families()
        for skeletons, schedule in self._proposals():
            for candidate in self.builder.candidates(skeletons, schedule):
                if self.late():
                    return False
                score = self.evaluator.score(candidate)
                if score is None or score.over > 0:
                    reason = "memory" if score else "packing"
                    self.rejected[reason] = self.rejected.get(reason, 0) + 1
                    continue
                if not self.improve(candidate, score.step_seconds):
                    return False
        return True

    def pipeline_counts(self) -> list[int]:
        """Numbers of pipelines to try: those that divide every group, and about four per octave."""
        most = self._most_pipelines()
        common = math.gcd(*self.counts)
        exact = [d for d in range(1, most + 1) if common % d == 0] if common <= 20_000 else [1]
        octave: list[int] = []
        d = 1.0
        while d <= most:
            octave.append(round(d))
            d *= 2 ** (1 / (3 if sum(self.counts) <= 256 else 2))
        small = list(range(1, min(most, 6) + 1))
        exact = exact if len(exact) <= 16 else [d for d in exact if d & (d - 1) == 0 or self.batch % d == 0]
        return sorted({*exact, *octave, *small, *(n for n in self.counts if 0 < n <= most)})

    def sizes(self, pipelines: int) -> list[int]:
        """Micro-batch sizes to try."""
        found = batch_sizes(self.space, max(1, self.batch // pipelines), 8)
        return [b for b in found if b & (b - 1) == 0] or list(found)

    def budgets(self) -> list[tuple[int, tuple[int, ...]]]:
        """(number of pipelines, chips per group and pipeline)."""
        found = []
        for d in self.pipeline_counts():
            budget = tuple(n // d for n in self.counts)
            if any(budget):
                found.append((d, budget))
        return found

    def _bounded(self) -> list[tuple[float, int, int, float, dict[int, float], LayersProgram]]:
        """(seconds that no pipelines of the program beat, replicas, micro-batch size, micro-batches, the same by group,
        program)."""
        programs = []
        for d, budget in self.budgets():
            for size in self.sizes(d):
                program = LayersProgram(self, budget, size, d)
                nominal = max(1.0, self.batch / (d * size))
                bound, alone = program.least_seconds(nominal)
                programs.append((bound, d, size, nominal, alone, program))
        return sorted(programs, key=lambda row: row[:3])

    def least_seconds(self) -> float:
        """No equal pipelines of these chips take less."""
        return min((row[0] for row in self._bounded()), default=math.inf)

    def _families(self) -> list[PipelineFamily]:
        """Programs that can give neither pipelines over all groups nor over one of them that are about as fast as the
        best so far are not solved."""
        found: list[tuple[float, PipelineFamily]] = []
        best: dict[int, float] = {}
        programs, everything = self._bounded(), self.everything
        for bound, _, _, nominal, alone, program in programs:
            if found and self.late():
                break
            least = best.get(everything, math.inf)
            near = any(t <= CUT * best.get(1 << g, math.inf if bound < FAR * least else 0.0) for g, t in alone.items())
            if bound > CUT * least and not near:
                continue
            for family in program.families(nominal):
                seconds = family.seconds(nominal)
                found.append((seconds, family))
                best[family.mask] = min(best.get(family.mask, math.inf), seconds)
                best[everything] = min(best.get(everything, math.inf), seconds)
        self._programs = {(p.budget, p.size, p.replicas): p for *_, p in programs}
        found.sort(key=lambda row: (row[0], row[1].stages, row[1].budget))
        return [family for _, family in found]

    def stages(self, family: PipelineFamily) -> tuple[StageTemplate, ...]:
        if family not in self._traced:
            budget = tuple(n // family.replicas for n in self.counts)
            self._traced[family] = self._programs[budget, family.size, family.replicas].trace(family)
        return self._traced[family]

    def _proposals(self) -> Iterator[tuple[list[PipelineOutline], str]]:
        """Combinations to make concrete, most promising first."""
        seen: set[object] = set()

        def fresh(rows: list[PipelineOutline]) -> bool:
            key = frozenset((r.stages, r.size, r.copies) for r in rows)
            new = key not in seen
            seen.add(key)
            return new

        for i, rows in enumerate(self._islands(6)):
            if fresh(rows):
                yield rows, "1f1b"
            if i < 2 and "gpipe" in self.space.schedules:
                yield rows, "gpipe"
        per_mask: dict[int, int] = {}
        for family in self.families:
            if per_mask.get(family.mask, 0) >= (10 if family.mask == self.everything else 2):
                continue
            per_mask[family.mask] = per_mask.get(family.mask, 0) + 1
            rows = [self._skeleton(family, family.replicas)]
            if fresh(rows):
                yield rows, "1f1b"
        for rows in self._mixed():
            if fresh(rows):
                yield rows, "1f1b"

    def _skeleton(self, family: PipelineFamily, copies: int) -> PipelineOutline:
        return PipelineOutline(self.stages(family), family.size, copies)

    def _islands(self, most: int) -> Iterator[list[PipelineOutline]]:
        """Step 2: the best division of the groups into islands, and the best few with other numbers of pipelines."""
        if not self.families:
            return
        banned: set[tuple[int, int, int]] = set()
        for _ in range(most):
            choice = self._divide([f for f in self.families if (f.mask, f.replicas, f.size) not in banned])
            if choice is None:
                return
            yield [self._skeleton(f, f.replicas) for f in choice]
            worst = choice[0]
            banned.add((worst.mask, worst.replicas, worst.size))

    def _divide(self, families: Sequence[PipelineFamily]) -> list[PipelineFamily] | None:
        """Islands that compute the batch soonest: bisection on the time."""
        if not families:
            return None
        fleet = IslandCover(families, len(self.pool.groups))
        high = max(f.seconds(self.batch) for f in families)
        low = 0.0
        best = fleet.cover(high, self.batch)
        if best is None:
            return None
        for _ in range(30):
            middle = (low + high) / 2
            found = fleet.cover(middle, self.batch)
            if found is None:
                low = middle
            else:
                best, high = found, middle
            if high - low < 2e-3 * high:
                break
        return best

    def _mixed(self) -> Iterator[list[PipelineOutline]]:
        """Step 3."""
        from hetero_megatron.planner.search.beam import mixed

        yield from mixed(self)


@lru_cache(maxsize=256)
def _runs(size: int, most: int) -> Layers:
    """[stages before, stages after]: 0 where there may be so many stages in between, else NO."""
    runs = np.arange(size)[None, :] - np.arange(size)[:, None]
    allowed = np.isin(runs, [*(r for r in RUNS if r <= most), most]) & (runs > 0)
    return np.where(allowed, 0.0, NO).astype(np.float32)


def _hull(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Corners of the least concave curve from (0, 0) over the points."""
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
    """Rows that never decrease, so that they can be searched (recompute may make one layer more a little cheaper)."""
    result: Floats = np.maximum.accumulate(rows, axis=1)
    return result
