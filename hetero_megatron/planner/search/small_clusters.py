"""Further plans for small clusters: of every structure, and with unequal shares of the optimizer states.

The programs propose what is fastest by their estimate. On small clusters a stage or a chip more or less changes much,
so the pipelines of every structure on every set of node groups are scored, and climbing from the best of them also
changes the chips of stages. Where memory is tight, pipelines may be faster whose optimizer states are owned by other
pipelines with room to spare: they are looked for as if such states took no memory, and then fitted exactly
(:mod:`memory_fit`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent, Row, simulate_best
from hetero_megatron.planner.search.layers_program import FEW, LayersProgram, PipelineFamily, ProgramInputs
from hetero_megatron.planner.search.local_search import LocalSearch, climb, neighbours
from hetero_megatron.planner.search.materialize import PipelineOutline
from hetero_megatron.planner.search.memory_fit import MemoryFit
from hetero_megatron.planner.search.pipeline_dp import Programs
from hetero_megatron.planner.shares import water_level
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.placement import place
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate
from hetero_megatron.planner.template.search_space import batch_sizes, options, tp_degrees

STRUCTURES, BESIDE = 40, 4  # scored: of one kind and of several; of the latter, on each set of groups
SLOW = 1.5  # estimates above this multiple of the best are not scored
UNLIKE = 300  # of unlike pipelines that are fitted with unequal shares
SHARES = 0.15, 0.5  # of the batch, for which pipelines of a set of groups should be fast
MOST_USAGES, MOST_BESIDE = 100, 4  # numbers of chips of each group; unlike pipelines beside each other
MOST_RUNS = 3  # of equal stages, that are put in all orders
STARTS, EFFORT, NEAR = 8, 240, 1.25  # climbed from, if so near to the best; neighbours tried from each
FITTED = 60  # templates whose states are placed exactly

_Traced = tuple[PipelineFamily, LayersProgram]


class SmallClusters:
    """Proposes them."""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        if incumbent.scorer.pool.chips > FEW:
            return True
        if not _each_structure(problem, incumbent):
            return False
        return not problem.space.shares or _unequal_shares(problem, incumbent)


def _each_structure(problem: PlanningProblem, incumbent: Incumbent) -> bool:
    """Offer pipelines of every structure on every set of node groups, and of several beside each other, and climb from
    the best; False where the incumbent said to stop."""
    rows = list[Row](incumbent.rows)
    for templates in _pipelines(problem, incumbent, STRUCTURES, STRUCTURES):
        for template in templates:
            score = incumbent.offer(template, NEAR * incumbent.seconds)
            if score is not None:
                rows.append((score.step_seconds, len(rows), template))
            if incumbent.should_stop():
                return False
    starts: dict[PlanTemplate, Row] = {}
    for row in sorted(rows, key=lambda row: row[:2]):
        starts.setdefault(replace(row[2], order="stage"), row)
    for start in itertools.islice(starts.values(), STARTS):
        if start[0] > NEAR * incumbent.seconds:
            break
        near = partial(_other_chips, problem=problem, pool=incumbent.scorer.pool)
        if not LocalSearch.climb(start, problem.space, incumbent, EFFORT, near):
            return False
    return True


def _pipelines(
    problem: PlanningProblem, incumbent: Incumbent, singles: int, several: int
) -> Iterator[Iterator[PlanTemplate]]:
    """Of so many structures of equal pipelines, and of so many of unlike ones, the most promising first."""
    batch, inputs = problem.global_batch_size, ProgramInputs(problem, incumbent.scorer)
    rows: list[tuple[float, tuple[_Traced, ...]]] = []
    for _, program in Programs(inputs, incumbent.should_stop).all() if singles else ():
        if incumbent.should_stop():
            return
        families = program.families_by_stages(incumbent.seconds, 1)
        rows += [(_seconds((x,), batch), (x,)) for x in ((family, program) for family in families)]
    if math.prod(n + 1 for n in inputs.counts) <= MOST_USAGES:
        found = list(_of_usages(inputs, incumbent))
        rows += [(_seconds((x,), batch), (x,)) for _, of_usage in found for x in of_usage if singles]
        rows = sorted(rows, key=lambda row: row[0])[:singles]
        unlike = [(_seconds(x, batch), x) for x in _beside(found, inputs)]
        rows += sorted(unlike, key=lambda row: row[0])[:several]
    for seconds, chosen in sorted(rows, key=lambda row: row[0]):
        if seconds > SLOW * incumbent.seconds:
            break
        outlines = [PipelineOutline(program.trace(f), f.size, f.replicas) for f, program in chosen]
        variants = [outlines[0].stages]
        if len(outlines) == 1:
            variants = [y for x in _orders(variants[0]) for y in _wider(x, outlines[0].copies, inputs)]
        for stages in variants:
            yield incumbent.builder.templates([replace(outlines[0], stages=stages), *outlines[1:]], "1f1b")


def _wider(
    stages: tuple[StageTemplate, ...], copies: int, inputs: ProgramInputs
) -> Iterator[tuple[StageTemplate, ...]]:
    """Also with more chips in the last stage, which has the head."""
    yield stages
    last = stages[-1]
    free = inputs.counts[last.group] // copies - sum(x.chips for x in stages if x.group == last.group)
    if free > 0 and len(stages) > 1:
        wide = (last.tp + n for n in range(1, free + 1) if last.dp == 1)
        allowed = tp_degrees(inputs.pool, last.group, inputs.model, inputs.space, True)
        yield from ((*stages[:-1], replace(last, tp=tp)) for tp in wide if tp in allowed)


def _of_usages(inputs: ProgramInputs, incumbent: Incumbent) -> Iterator[tuple[tuple[int, ...], list[_Traced]]]:
    """By chips of each group, the fast pipelines on them: of many sequences, and of few."""
    for usage in itertools.product(*(range(n + 1) for n in inputs.counts)):
        mask, rows = sum(1 << g for g, n in enumerate(usage) if n), list[_Traced]()
        for size in batch_sizes(inputs.space, inputs.batch) if mask else ():
            program = LayersProgram(inputs, usage, size, 2)
            families = program.families_by_stages(incumbent.seconds, 1)
            rows += [(replace(f, replicas=1), program) for f in families if f.mask == mask]
        if rows:
            ranked = [sorted(rows, key=lambda row: _seconds((row,), x * inputs.batch)) for x in SHARES]
            yield usage, list(dict.fromkeys(x for row in zip(*ranked) for x in row))[:BESIDE]


def _beside(
    found: Sequence[tuple[tuple[int, ...], list[_Traced]]], inputs: ProgramInputs
) -> Iterator[tuple[_Traced, ...]]:
    """Pipelines beside each other on disjoint chips that have room for the model so many times."""
    costs, counts = inputs.scorer.costs, inputs.counts
    weights, gradients, states = costs.memory.whole
    chips = [group.chip for group in inputs.pool.groups]
    room = sum(n * (costs.memory_limit(chip) - costs.overhead(chip)) for n, chip in zip(counts, chips))
    most = min(MOST_BESIDE, inputs.most_pipelines, int((room - states) // max(1, weights + gradients)))

    def extend(start: int, left: tuple[int, ...], taken: tuple[_Traced, ...]) -> Iterator[tuple[_Traced, ...]]:
        if len(taken) > 1:
            yield taken
        for i in range(start, len(found) if len(taken) < most else start):
            usage, rows = found[i]
            rest = tuple(a - b for a, b in zip(left, usage))
            if min(rest) >= 0:
                for row in rows if len(taken) < 2 else rows[:1]:
                    yield from extend(i, rest, (*taken, row))

    yield from extend(0, counts, ())


def _orders(stages: tuple[StageTemplate, ...]) -> list[tuple[StageTemplate, ...]]:
    """With the runs of equal stages in other orders; the program knows one of those with the same bottleneck."""
    runs = [tuple(run) for _, run in itertools.groupby(stages)]
    if len(runs) > MOST_RUNS:
        return [stages]
    return list(dict.fromkeys(tuple(itertools.chain(*row)) for row in itertools.permutations(runs)))


def _seconds(chosen: Sequence[_Traced], batch: float) -> float:
    """In which families compute the batch, divided without whole numbers."""
    families = [family for family, _ in chosen]
    rate = np.array([f.size * f.replicas / f.tau for f in families])
    delay = np.array([(f.stages - 1) * f.tau + f.sync for f in families])
    return water_level(batch, rate, np.full(len(families), batch), delay)


def _other_chips(template: PlanTemplate, problem: PlanningProblem, pool: DevicePool) -> Iterator[PlanTemplate]:
    """With other chips in one stage, or without one stage."""
    used, groups = template.usage(len(pool.groups)), range(len(pool.groups))
    for a, b in itertools.combinations(groups, 2):
        if used[a] <= pool.counts[b] and used[b] <= pool.counts[a] and used[a] + used[b]:
            yield template.on_groups([b if g == a else a if g == b else g for g in groups])
    for a, b in itertools.permutations(range(len(template.parts)), 2):
        giver, taker = template.parts[a], template.parts[b]
        alike = giver.copies * giver.shape.micro_batch_size == taker.copies * taker.shape.micro_batch_size
        if alike and giver.num_micro_batches > 1:
            less = replace(giver, num_micro_batches=giver.num_micro_batches - 1)
            more = replace(taker, num_micro_batches=taker.num_micro_batches + 1)
            yield template.with_part(a, less).with_part(b, more)
    for p, part in enumerate(template.parts):
        size, stages = part.shape.micro_batch_size, part.shape.stages
        for s, stage in enumerate(stages):
            for g in groups:
                free = pool.counts[g] - used[g] + (part.copies * stage.chips if g == stage.group else 0)
                for other in options(pool, g, problem.model, problem.space, size):
                    if part.copies * other.chips <= free and (other.group, other.tp, other.dp) != (
                        stage.group, stage.tp, stage.dp
                    ):  # fmt: skip
                        made = replace(stage, group=g, tp=other.tp, dp=other.dp)
                        yield template.with_part(p, replace(part, shape=part.shape.with_stages({s: made})))
            if len(stages) > 1 and stages[max(s, 1) - 1].layers + stage.layers:
                yield template.with_part(p, replace(part, shape=_without(part.shape, s)))


def _without(shape: PipelineTemplate, s: int) -> PipelineTemplate:
    """Without one stage, whose layers a neighbour has."""
    stages: list[StageTemplate] = list(shape.stages)
    gone = stages.pop(s)
    to = min(s, len(stages) - 1)
    stages[to] = replace(stages[to], layers=stages[to].layers + gone.layers)
    return replace(shape, stages=tuple(stages))


def _unequal_shares(problem: PlanningProblem, incumbent: Incumbent) -> bool:
    """Offer plans of several pipelines that fit with unequal shares of the states only; False to stop."""
    scorer = incumbent.scorer
    lending = incumbent.on(scorer.lending())
    fit, most = MemoryFit(scorer, problem.space.recompute), FITTED

    def improves(template: PlanTemplate, limit: float) -> bool:
        single = replace(template, parts=tuple(replace(x, copies=1) for x in template.parts for _ in range(x.copies)))
        placed = place(single, scorer.pool)
        if fit.computed >= most or placed is None:
            return False
        likely, _ = fit.best_case(placed)
        if likely is None or scorer.bounds.lower_bound(likely) >= limit:
            return False
        for found in fit.fits(placed):
            score = scorer.score(found, limit)
            if score is None or score.step_seconds >= limit:
                continue
            if simulate_best([(score.step_seconds, 0, found.joined())], problem, scorer):
                incumbent.take(found.joined(), score.step_seconds)
                return True
        return False

    for templates in _pipelines(problem, lending, 0, UNLIKE):
        for template in templates:
            improves(template, incumbent.seconds)
            if incumbent.should_stop():
                return False
    if incumbent.rows and incumbent.rows[0][2].pipelines > 1:
        most = fit.computed + FITTED

        def near(template: PlanTemplate) -> Iterator[PlanTemplate]:
            return itertools.chain(
                neighbours(template, problem.space), _other_chips(template, problem, scorer.pool)
            )

        climb(incumbent.rows[0][2], near, lambda x: improves(x, incumbent.seconds), EFFORT)
    return not incumbent.should_stop()
