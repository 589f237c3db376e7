"""Search of clusters that are too large to enumerate, by dynamic programs.

1. *Pipelines* (:mod:`layers_program`): for every number of pipelines and micro-batch size, the fastest pipeline over
each set of chip groups. Programs whose lower bound is far above the best so far are skipped.

2. *Islands* (:mod:`islands_dp`): the groups are divided into islands that run equal pipelines of their own side by
side.

3. The best few become templates (exact layers, recompute, batch shares), which the incumbent scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.islands_dp import divide_into_islands
from hetero_megatron.planner.search.layers_program import LayersProgram, PipelineFamily, ProgramInputs
from hetero_megatron.planner.search.local_search import LocalSearch
from hetero_megatron.planner.search.materialize import PipelineOutline
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.planner.template.search_space import batch_sizes
from hetero_megatron.planner.time_budget import ShouldStop, never

CUT = 1.03  # programs with a lower bound above this multiple of the best so far are skipped
FAR = 1.5  # the same for pipelines over a single group, as long as none was found


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


class EachTypeDP:
    """Proposes plans on the chips of each type alone where they could be the fastest: the programs rank parts of a
    cluster worse than they turn out after local search. ``polished``: the incumbent whose scorer local search uses;
    None: that of :meth:`propose`."""

    def __init__(self, polished: Incumbent | None = None) -> None:
        self.polished = polished

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        groups = incumbent.scorer.pool.groups
        for chip in sorted({g.chip for g in groups}) if len({g.chip for g in groups}) > 1 else ():
            counts = tuple(g.chips if g.chip == chip else 0 for g in groups)
            if incumbent.rows:
                least = Programs(ProgramInputs(problem, incumbent.scorer, counts)).least_seconds()
                if least >= incumbent.seconds:
                    continue
            own = Incumbent(problem, incumbent.scorer, incumbent.budget, keep=incumbent.keep, part_of=incumbent)
            polished = own.on((self.polished or incumbent).scorer)
            complete = PipelineDP(counts).propose(problem, own) and LocalSearch().propose(problem, polished)
            for seconds, _, template in own.rows:
                incumbent.take(template, seconds)
            if not complete or incumbent.should_stop():
                return False
        return True


class Programs:
    """The programs of one search, their families of pipelines, and combinations of these."""

    def __init__(self, inputs: ProgramInputs, should_stop: ShouldStop = never) -> None:
        self.inputs, self.should_stop = inputs, should_stop
        self.everything = sum(1 << g for g, n in enumerate(inputs.counts) if n)
        self.families: list[PipelineFamily] = []
        self.programs: dict[tuple[tuple[int, ...], int, int], LayersProgram] = {}
        self._traced: dict[PipelineFamily, tuple[StageTemplate, ...]] = {}

    def proposals(self) -> Iterator[list[PipelineOutline]]:
        """Pipelines side by side, most promising first, without duplicates: islands, then equal pipelines."""
        self.families = self._families()
        seen: set[object] = set()
        for outlines in itertools.chain(self._islands(), self._equal_pipelines()):
            key = frozenset((r.stages, r.size, r.copies) for r in outlines)
            if key not in seen:
                seen.add(key)
                yield outlines

    def least_seconds(self) -> float:
        """Lower bound (s) on a step with equal pipelines on these chips."""
        return min((row[0] for row in self._bounded()), default=math.inf)

    def _pipeline_counts(self) -> list[int]:
        """Numbers of pipelines to try: the divisors of every group's chips, and a few per octave."""
        counts, batch, most = self.inputs.counts, self.inputs.batch, self.inputs.most_pipelines
        common = math.gcd(*counts)
        exact = [d for d in range(1, most + 1) if common % d == 0] if common <= 20_000 else [1]
        octave: list[int] = []
        d = 1.0
        while d <= most:
            octave.append(round(d))
            d *= 2 ** (1 / (3 if sum(counts) <= 256 else 2))
        small = list(range(1, min(most, 6) + 1))
        exact = exact if len(exact) <= 16 else [d for d in exact if d & (d - 1) == 0 or batch % d == 0]
        return sorted({*exact, *octave, *small, *(n for n in counts if 0 < n <= most)})

    def _sizes(self, pipelines: int) -> list[int]:
        found = batch_sizes(self.inputs.space, max(1, self.inputs.batch // pipelines), 8)
        return [b for b in found if b & (b - 1) == 0] or list(found)

    def all(self) -> Iterator[tuple[float, LayersProgram]]:
        """(micro-batches of a pipeline, program) of every number of pipelines and micro-batch size."""
        for d in self._pipeline_counts():
            budget = tuple(n // d for n in self.inputs.counts)
            for size in self._sizes(d) if any(budget) else ():
                yield max(1.0, self.inputs.batch / (d * size)), LayersProgram(self.inputs, budget, size, d)

    def _bounded(self) -> list[tuple[float, int, int, float, dict[int, float], LayersProgram]]:
        """(lower bound in seconds, replicas, micro-batch size, micro-batches, lower bounds by single group, program),
        best first."""
        programs = []
        for nominal, program in self.all():
            bound, alone = program.least_seconds(nominal)
            programs.append((bound, program.replicas, program.size, nominal, alone, program))
        return sorted(programs, key=lambda row: row[:3])

    def _families(self) -> list[PipelineFamily]:
        """Families of all programs that could come near the best, over all groups or over a single group; fastest
        first."""
        found: list[tuple[float, PipelineFamily]] = []
        best: dict[int, float] = {}
        programs, everything = self._bounded(), self.everything
        for bound, _, _, nominal, alone, program in programs:
            if found and self.should_stop():
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
        self.programs = {(p.budget, p.size, p.replicas): p for *_, p in programs}
        found.sort(key=lambda row: (row[0], row[1].stages, row[1].budget))
        return [family for _, family in found]

    def _equal_pipelines(self) -> Iterator[list[PipelineOutline]]:
        """The best families over all groups, and a few over each other set of groups."""
        per_mask: dict[int, int] = {}
        for family in self.families:
            if per_mask.get(family.mask, 0) < (10 if family.mask == self.everything else 2):
                per_mask[family.mask] = per_mask.get(family.mask, 0) + 1
                yield [self._outline(family)]

    def _outline(self, family: PipelineFamily) -> PipelineOutline:
        if family not in self._traced:
            budget = tuple(n // family.replicas for n in self.inputs.counts)
            self._traced[family] = self.programs[budget, family.size, family.replicas].trace(family)
        return PipelineOutline(self._traced[family], family.size, family.replicas)

    def _islands(self) -> Iterator[list[PipelineOutline]]:
        """The best division of the groups into islands."""
        choice = divide_into_islands(self.families, len(self.inputs.pool.groups), self.inputs.batch)
        if choice is not None:
            yield [self._outline(f) for f in choice]
