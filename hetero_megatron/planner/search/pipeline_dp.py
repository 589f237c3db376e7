"""Search for clusters that are too large to enumerate, by dynamic programs.

1. *Pipelines* (:mod:`layers_program`): for every number of pipelines and micro-batch size, the fastest pipeline over
   each set of chip groups. Programs that cannot come near the best so far are not solved.
2. *Side by side* (:mod:`islands_dp`): groups are divided into islands; each island runs equal pipelines of its own, and
   all islands end together.
3. *Mixed columns* (:mod:`beam`): pipelines of unlike make-up that share a group.
4. The best few become templates (exact layers, recompute, batch shares), which the incumbent scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.beam import mixed_columns
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.islands_dp import divide_into_islands
from hetero_megatron.planner.search.layers_program import LayersProgram, PipelineFamily, ProgramInputs
from hetero_megatron.planner.search.local_search import LocalSearch
from hetero_megatron.planner.search.materialize import PipelineOutline
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.planner.template.search_space import batch_sizes
from hetero_megatron.planner.time_budget import Late, never

CUT = 1.03  # programs whose bound is so much above the best found so far are not solved
FAR = 1.5  # the same for pipelines over a single group where none was found yet
ISLANDS = 6  # divisions into islands that are tried


class PipelineDP:
    """Proposes plans of the chips of all groups, or of ``counts`` of them."""

    def __init__(self, counts: tuple[int, ...] | None = None) -> None:
        self.counts = counts

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        programs = Programs(ProgramInputs(problem, incumbent.scorer, self.counts), incumbent.late)
        for outlines, schedule in programs.proposals():
            for template in incumbent.builder.templates(outlines, schedule):
                if incumbent.late():
                    return False
                incumbent.offer(template)
        return not incumbent.late()


class EachTypeDP:
    """Also on the chips of each type alone, where they could be faster than what was found: by the programs' measure a
    part of a cluster looks worse than its plans are after local search.

    Args:
        polished: the incumbent whose scorer local search goes by.
    """

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
            if not complete or incumbent.late():
                return False
        return True


class Programs:
    """The programs of one search, their families of pipelines, and combinations of these."""

    def __init__(self, inputs: ProgramInputs, late: Late = never) -> None:
        self.inputs, self.late = inputs, late
        self.everything = sum(1 << g for g, n in enumerate(inputs.counts) if n)
        self.families: list[PipelineFamily] = []
        self.programs: dict[tuple[tuple[int, ...], int, int], LayersProgram] = {}
        self._traced: dict[PipelineFamily, tuple[StageTemplate, ...]] = {}

    def proposals(self) -> Iterator[tuple[list[PipelineOutline], str]]:
        """(pipelines side by side, schedule), most promising first, each once."""
        self.families = self._families()
        seen: set[object] = set()
        for outlines, schedule, again in self._combinations():
            key = frozenset((r.stages, r.size, r.copies) for r in outlines)
            if again or key not in seen:
                seen.add(key)
                yield outlines, schedule

    def least_seconds(self) -> float:
        """No equal pipelines of these chips take less."""
        return min((row[0] for row in self._bounded()), default=math.inf)

    def _pipeline_counts(self) -> list[int]:
        """Numbers of pipelines to try: those that divide every group, and about four per octave."""
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
        """Micro-batch sizes to try."""
        found = batch_sizes(self.inputs.space, max(1, self.inputs.batch // pipelines), 8)
        return [b for b in found if b & (b - 1) == 0] or list(found)

    def _bounded(self) -> list[tuple[float, int, int, float, dict[int, float], LayersProgram]]:
        """(seconds that no pipelines of the program beat, replicas, micro-batch size, micro-batches, the same by group,
        program)."""
        programs = []
        for d in self._pipeline_counts():
            budget = tuple(n // d for n in self.inputs.counts)
            for size in self._sizes(d) if any(budget) else ():
                program = LayersProgram(self.inputs, budget, size, d)
                nominal = max(1.0, self.inputs.batch / (d * size))
                bound, alone = program.least_seconds(nominal)
                programs.append((bound, d, size, nominal, alone, program))
        return sorted(programs, key=lambda row: row[:3])

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
        self.programs = {(p.budget, p.size, p.replicas): p for *_, p in programs}
        found.sort(key=lambda row: (row[0], row[1].stages, row[1].budget))
        return [family for _, family in found]

    def _combinations(self) -> Iterator[tuple[list[PipelineOutline], str, bool]]:
        """(pipelines, schedule, whether to yield it even if these pipelines were)."""
        for i, outlines in enumerate(self._islands()):
            yield outlines, "1f1b", False
            if i < 2 and "gpipe" in self.inputs.space.schedules:
                yield outlines, "gpipe", True
        per_mask: dict[int, int] = {}
        for family in self.families:
            if per_mask.get(family.mask, 0) < (10 if family.mask == self.everything else 2):
                per_mask[family.mask] = per_mask.get(family.mask, 0) + 1
                yield [self._outline(family)], "1f1b", False
        for columns in mixed_columns(self.inputs, self.families, self.programs):
            outlines = [PipelineOutline(program.trace(f), f.size, copies) for f, program, copies in columns]
            yield outlines, "1f1b", False

    def _outline(self, family: PipelineFamily) -> PipelineOutline:
        if family not in self._traced:
            budget = tuple(n // family.replicas for n in self.inputs.counts)
            self._traced[family] = self.programs[budget, family.size, family.replicas].trace(family)
        return PipelineOutline(self._traced[family], family.size, family.replicas)

    def _islands(self) -> Iterator[list[PipelineOutline]]:
        """The best division of the groups into islands, and the best few with other numbers of pipelines."""
        banned: set[tuple[int, int, int]] = set()
        for _ in range(ISLANDS):
            left = [f for f in self.families if (f.mask, f.replicas, f.size) not in banned]
            choice = divide_into_islands(left, len(self.inputs.pool.groups), self.inputs.batch)
            if choice is None:
                return
            yield [self._outline(f) for f in choice]
            banned.add((choice[0].mask, choice[0].replicas, choice[0].size))
