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

import numpy as np

from hetero_megatron.planner.estimate.stage_table import StageKind, per_layer
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.search.beam import mixed
from hetero_megatron.planner.search.islands_dp import IslandCover
from hetero_megatron.planner.search.layers_program import Layers, LayersProgram, PipelineFamily
from hetero_megatron.planner.search.materialize import PipelineOutline, TemplateBuilder
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate
from hetero_megatron.planner.template.search_space import SearchSpace, StageOption, batch_sizes, options
from hetero_megatron.planner.time_budget import Late, never
from hetero_megatron.spec import ModelSpec

CUT = 1.03  # programs whose bound is so much above the best found so far are not solved
FAR = 1.5  # the same for pipelines over a single group where none was found yet


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
        for rows in mixed(self, self.batch, self.families, self._programs):  # step 3
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
