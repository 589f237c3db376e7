"""Pipelines of every structure: so many replicas, stages, and sequences per micro-batch.

The search under 1F1B keeps only what is fastest there. Under schedules with smaller bubbles more stages, or larger
micro-batches, may be faster; so for every structure the stages with the least bottleneck are found, with the programs
of :mod:`layers_program`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.search.layers_program import RATIO, LayersProgram, PipelineFamily, ProgramInputs
from hetero_megatron.planner.search.materialize import PipelineOutline
from hetero_megatron.planner.search.pipeline_dp import Programs
from hetero_megatron.planner.template.plan_template import PlanTemplate

Structure = tuple[tuple[int, int, int], ...]  # (replicas, stages, sequences per micro-batch) of each kind of pipeline
FILL = 1 / 3  # of 1F1B's bubble, that is left under a good schedule: that of zero-bubble with its memory


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
    if len(incumbent.scorer.pool.groups) > MOST_GROUPS:
        return
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
