"""Search of clusters that are too large to enumerate, by dynamic programs.

1. *Pipelines* (:mod:`layers_program`): for every number of pipelines and micro-batch size, the fastest pipeline over
each set of chip groups. Programs whose lower bound is far above the best so far are skipped.

2. *Islands* (:func:`divide_into_islands`): the groups are divided into islands that run equal pipelines of their own
side by side.

3. The best few become templates (exact layers, recompute, batch shares), which the incumbent scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from hetero_megatron.planner.problem import PlanningProblem, ShouldStop, batch_sizes, never
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.layers_program import RATIO, LayersProgram, PipelineFamily
from hetero_megatron.planner.search.materialize import PipelineOutline, ProgramInputs, added_seconds
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.utils.cached_method import cached_method

HALVINGS, NEAR = 30, 2e-3  # most steps and relative precision of the bisection over islands
CUT = 1.03  # programs with a lower bound above this multiple of the best so far are skipped
SLOW = 2.0  # families whose estimate with gradient reduction is above this multiple of the least are not proposed
FAR = 1.5  # the same for pipelines over a single group, as long as none was found
FILL = 1 / 3  # of 1F1B's bubble, that is left under a good schedule: that of zero-bubble with its memory
Structure = tuple[tuple[int, int, int], ...]  # (replicas, stages, sequences per micro-batch) of each kind of pipeline


class PipelineDP:
    """Proposes plans for all chips, or for ``counts`` chips per group."""

    def __init__(self, counts: tuple[int, ...] | None = None) -> None:
        self.counts = counts

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        programs = Programs(ProgramInputs(problem, incumbent.scorer, self.counts), incumbent.should_stop)
        for outlines in programs.proposals():
            for template in incumbent.builder.templates(outlines, "1f1b"):
                if incumbent.should_stop():
                    return False
                incumbent.offer(template)
        return not incumbent.should_stop()


class _Near:
    """Which programs could have families near the best so far, over all groups or over a single one."""

    def __init__(self, everything: int) -> None:
        self.everything = everything
        self.best: dict[int, float] = {}

    def possible(self, bound: float, alone: Mapping[int, float]) -> bool:
        best_of_all = self.best.get(self.everything, math.inf)
        single = math.inf if bound < FAR * best_of_all else 0.0
        return bound <= CUT * best_of_all or any(t <= CUT * self.best.get(1 << g, single) for g, t in alone.items())

    def take(self, mask: int, seconds: float) -> None:
        for key in (mask, self.everything):
            self.best[key] = min(self.best.get(key, math.inf), seconds)


class Programs:
    """The programs of one search, their families of pipelines, and combinations of these."""

    def __init__(self, inputs: ProgramInputs, should_stop: ShouldStop = never) -> None:
        self.inputs, self.should_stop = inputs, should_stop
        self.everything = sum(1 << g for g, n in enumerate(inputs.counts) if n)
        self.families: list[PipelineFamily] = []
        self.programs: dict[tuple[tuple[int, ...], int, int], LayersProgram] = {}

    def proposals(self) -> Iterator[list[PipelineOutline]]:
        """Pipelines side by side, most promising first, without duplicates: islands, then equal pipelines."""
        self.families = self._families()
        proposed: set[object] = set()
        for outlines in itertools.chain(self._islands(), self._equal_pipelines()):
            key = frozenset((r.stages, r.size, r.copies) for r in outlines)
            if key not in proposed:
                proposed.add(key)
                yield outlines

    def least_work_seconds(self) -> float:
        """Lower bound (s) on a step with equal pipelines on these chips, all of them always busy."""
        inputs = self.inputs
        programs = (LayersProgram(inputs, inputs.counts, size, 1) for size in self._sizes(1))
        return min((inputs.batch / x.size * x.least_tau() for x in programs), default=math.inf)

    def least_seconds(self) -> float:
        """The same, with the bubbles of pipelines."""
        return min((program.least_seconds(nominal)[0][0] for nominal, program in self.all()), default=math.inf)

    def _pipeline_counts(self) -> list[int]:
        """Numbers of pipelines to try: the divisors of every group's chips, and a few per octave."""
        counts, batch, most_pipelines = self.inputs.counts, self.inputs.batch, self.inputs.most_pipelines
        common = math.gcd(*counts)
        exact = [d for d in range(1, most_pipelines + 1) if common % d == 0] if common <= 20_000 else [1]
        octave: list[int] = []
        d = 1.0
        while d <= most_pipelines:
            octave.append(round(d))
            d *= 2 ** (1 / (3 if sum(counts) <= 256 else 2))
        small = list(range(1, min(most_pipelines, 6) + 1))
        exact = exact if len(exact) <= 16 else [d for d in exact if d & (d - 1) == 0 or batch % d == 0]
        return sorted({*exact, *octave, *small, *(n for n in counts if 0 < n <= most_pipelines)})

    def _sizes(self, pipelines: int) -> list[int]:
        sizes = batch_sizes(self.inputs.space, max(1, self.inputs.batch // pipelines), 8)
        if self.inputs.few:
            return list(sizes)
        return [b for b in sizes if b & (b - 1) == 0] or list(sizes)

    def all(self) -> Iterator[tuple[float, LayersProgram]]:
        """(micro-batches of a pipeline, program) of every number of pipelines and micro-batch size."""
        for d in self._pipeline_counts():
            budget = tuple(n // d for n in self.inputs.counts)
            for size in self._sizes(d) if any(budget) else ():
                yield max(1.0, self.inputs.batch / (d * size)), LayersProgram(self.inputs, budget, size, d)

    def _families(self) -> list[PipelineFamily]:
        """Families of all programs that could come near the best, over all groups or over a single group: without
        gradient reduction, or with it."""
        families: list[PipelineFamily] = []
        nearest = _Near(self.everything), _Near(self.everything)  # without gradient reduction, and with it
        programs = list(self.all())
        rows = [(p.least_seconds(nominal), nominal, p) for nominal, p in programs]
        for (plain, reduced), nominal, program in sorted(rows, key=lambda row: (row[0][1][0], row[0][0][0])):
            if families and self.should_stop():
                break
            hopeless = reduced[0] > SLOW * nearest[1].best.get(self.everything, math.inf)
            if nearest[1].possible(*reduced) or not hopeless and nearest[0].possible(*plain):
                for family in program.families(nominal):
                    families.append(family)
                    seconds = family.seconds(nominal)
                    nearest[0].take(family.mask, seconds)
                    nearest[1].take(family.mask, seconds + family.sync)
        self.programs = {(p.budget, p.size, p.replicas): p for _, p in programs}
        return families

    def _equal_pipelines(self) -> Iterator[list[PipelineOutline]]:
        """The best families over all groups, and a few over each other set of groups, with and without gradient
        reduction; those that reduction makes slow are left out."""
        chosen: dict[PipelineFamily, float] = {}
        for sync in (False, True):
            per_mask: dict[int, int] = {}
            for family in sorted(self.families, key=partial(self._rank, sync)):
                if per_mask.get(family.mask, 0) < (10 if family.mask == self.everything else 1 if sync else 2):
                    per_mask[family.mask] = per_mask.get(family.mask, 0) + 1
                    chosen[family] = self._seconds(family)
        fastest = min(chosen.values(), default=0.0)
        for family, seconds in sorted(chosen.items(), key=lambda row: row[1]):
            if seconds <= SLOW * fastest:
                yield [self._outline(family)]

    def _nominal(self, family: PipelineFamily) -> float:
        return max(1.0, self.inputs.batch / (family.replicas * family.size))

    def _rank(self, sync: bool, family: PipelineFamily) -> tuple[float, int, tuple[int, ...]]:
        seconds = family.seconds(self._nominal(family)) + family.sync * sync
        return seconds, family.stages, family.budget

    def _seconds(self, family: PipelineFamily) -> float:
        """Estimated step of a family, with gradient reduction between the stages that it has."""
        inputs, stages = self.inputs, self._outline(family).stages
        elements = inputs.scorer.costs.memory.trained(1, inputs.model.num_layers, True, True) / len(stages)
        late = 0.0
        for stage in dict.fromkeys(stages):
            holders = family.replicas * stage.dp * stage.tp
            if holders > stage.tp:
                sync = inputs.sync_seconds(elements / stage.tp, np.full(1, float(holders)), [stage.group])
                late = max(late, float(added_seconds(sync, np.full(1, family.tau))[0]))
        return family.seconds(self._nominal(family)) + late

    @cached_method
    def _outline(self, family: PipelineFamily) -> PipelineOutline:
        budget = tuple(n // family.replicas for n in self.inputs.counts)
        stages = self.programs[budget, family.size, family.replicas].trace(family)
        return PipelineOutline(stages, family.size, family.replicas)

    def _islands(self) -> Iterator[list[PipelineOutline]]:
        """The best division of the groups into islands."""
        for sync in (True, False):
            choice = divide_into_islands(self.families, len(self.inputs.pool.groups), self.inputs.batch, sync)
            if choice is not None:
                yield [self._outline(f) for f in choice]


def divide_into_islands(
    families: Sequence[PipelineFamily], groups: int, batch: int, sync: bool
) -> list[PipelineFamily] | None:
    """Families on disjoint sets of groups that compute ``batch`` sequences fastest, by bisection on the time; None
    without families. ``sync``: with gradient reduction."""
    if not families:
        return None
    islands = IslandCover(families, groups, sync)
    low, high = 0.0, max(f.seconds(batch) + f.sync for f in families)
    best = islands.cover(high, batch)
    for _ in range(HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        cover = islands.cover(middle, batch)
        if cover is None:
            low = middle
        else:
            best, high = cover, middle
        if high - low < NEAR * high:
            break
    return best


class IslandCover:
    """Families grouped by the set of groups (``mask``) that they use."""

    def __init__(self, families: Sequence[PipelineFamily], groups: int, sync: bool) -> None:
        self.families, self.groups = sorted(families, key=lambda f: f.mask), groups
        rows = [(f.tau, f.stages, f.sync * sync, f.size * f.replicas, f.mask) for f in self.families]
        self.tau, self.stages, self.sync, self.together, masks = np.array(rows).T
        self.masks = sorted({int(mask) for mask in masks})
        self.starts = np.searchsorted(masks, self.masks)

    def cover(self, limit: float, batch: int) -> list[PipelineFamily] | None:
        """Families on disjoint sets of groups that compute ``batch`` sequences within ``limit`` seconds; None if there
        are none."""
        totals = np.maximum(0, np.floor((limit - self.sync) / self.tau - self.stages + 1 + 1e-9)) * self.together
        best = dict(zip(self.masks, np.maximum.reduceat(totals, self.starts).tolist(), strict=True))
        top: list[tuple[float, int]] = [(0.0, 0)]  # by mask: (most sequences, island of the lowest group, 0: idle)
        for mask in range(1, 1 << self.groups):
            low = mask & -mask
            value = (top[mask & ~low][0], 0)
            sub = mask
            while sub:
                if sub & low and sub in best:
                    total = best[sub] + top[mask & ~sub][0]
                    if total > value[0]:
                        value = (total, sub)
                sub = (sub - 1) & mask
            top.append(value)
        mask = (1 << self.groups) - 1
        if top[mask][0] < batch:
            return None
        chosen = []
        while mask:
            sub = top[mask][1]
            if sub:
                i = self.masks.index(sub)
                totals_of_mask = totals[self.starts[i] : self.starts[i + 1] if i + 1 < len(self.masks) else None]
                chosen.append(self.families[self.starts[i] + int(np.argmax(totals_of_mask))])
            mask &= ~(sub or mask & -mask)
        return chosen


def structure(template: PlanTemplate) -> Structure:
    """What a template has in common with those that differ in chips and layers only."""
    counts: dict[tuple[int, int], int] = {}
    for part in template.parts:
        key = len(part.shape.stages), part.shape.micro_batch_size
        counts[key] = counts.get(key, 0) + part.copies
    return tuple(sorted((n, stages, size) for (stages, size), n in counts.items()))


def pipelines_of_each_structure(
    problem: PlanningProblem, incumbent: Incumbent, limit: float
) -> Iterator[list[PlanTemplate]]:
    """Templates of equal pipelines of several stages under 1F1B, in both placement orders; for every structure its
    fastest, in the order of what they may take under a good schedule.

    Args:
        limit: seconds of a step; structures whose bottleneck alone takes longer are left out.
    """
    programs = Programs(ProgramInputs(problem, incumbent.scorer), incumbent.should_stop)
    best: dict[Structure, tuple[float, PipelineFamily, LayersProgram]] = {}
    for nominal, program in programs.all():
        if incumbent.should_stop():
            return
        for family in program.families_by_stages(limit * RATIO / nominal):
            key = ((family.replicas, family.stages, family.size),)
            seconds = (nominal + FILL * (family.stages - 1)) * family.tau + family.sync
            if key not in best or seconds < best[key][0]:
                best[key] = seconds, family, program
    for _, family, program in sorted(best.values(), key=lambda row: (row[0], row[1].stages, row[1].size)):
        outline = PipelineOutline(program.trace(family), family.size, family.replicas)
        if templates := list(incumbent.builder.templates([outline], "1f1b")):
            yield templates
