"""Further plans for small clusters: of every structure, and with unequal shares of the optimizer states; and parts of a
cluster, small or not, that may be faster than the whole, searched as clusters of their own.

The programs propose runs of equal stages of one group after the other. On small clusters a stage or a chip more or
less, and its place, change much, so the most promising of all sequences of stages (:mod:`stage_sequences`), alone and
beside each other, are scored, and climbing from the best of them also changes the chips of stages. Where memory is
tight, pipelines may be faster whose optimizer states are owned by other pipelines with room to spare: they are looked
for as if such states took no memory, and then fitted exactly (:mod:`memory_fit`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from hetero_megatron.planner.problem import PlanningProblem, options
from hetero_megatron.planner.search.incumbent import Incumbent, Proposer, Row, simulate_best
from hetero_megatron.planner.search.local_search import LocalSearch, climb, neighbours
from hetero_megatron.planner.search.materialize import FEW, PipelineOutline, ProgramInputs
from hetero_megatron.planner.search.memory_fit import MemoryFit
from hetero_megatron.planner.search.pipeline_dp import PipelineDP, Programs
from hetero_megatron.planner.search.stage_sequences import StageSequence, StageSequences, Usage
from hetero_megatron.planner.search.uniform import UniformSeeds
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate, place

STRUCTURES = 40  # scored: single pipelines, and several
BESIDE = 3  # of the latter, on the same chips, and one of each other micro-batch size
HALVINGS = 12  # of the interval in which their time lies
SLOW = 1.5  # estimates above this multiple of the best are not scored
UNLIKE = 60  # of unlike pipelines that are fitted with unequal shares
STARTS, EFFORT, NEAR = 8, 240, 1.25  # climbed from, if so near to the best; neighbours tried from each
FITTED = 6  # templates whose states are placed exactly


class SmallClusters:
    """Proposes them. ``counts``: chips per group of a part of the cluster, for which plans with unequal shares are not
    looked for; None: all."""

    def __init__(self, counts: tuple[int, ...] | None = None) -> None:
        self.counts = counts

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        if sum(self.counts or incumbent.scorer.pool.counts) > FEW:
            return True
        if not _each_structure(problem, incumbent, self.counts):
            return False
        space = problem.space
        shares_may_differ = self.counts is None and space.shares and space.equal_pipelines == "no"
        return not shares_may_differ or _unequal_shares(problem, incumbent)


def _each_structure(problem: PlanningProblem, incumbent: Incumbent, counts: tuple[int, ...] | None) -> bool:
    """Offer pipelines, and several beside each other, and climb from the best; False where the incumbent said to stop.
    """
    rows = list[Row](incumbent.rows)
    for templates in _pipelines(problem, incumbent, STRUCTURES, STRUCTURES, counts):
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
        other_chips = partial(_other_chips, problem=problem, pool=incumbent.scorer.pool)
        if not LocalSearch.climb(start, problem.space, incumbent, EFFORT, other_chips):
            return False
    return True


def _pipelines(
    problem: PlanningProblem, incumbent: Incumbent, singles: int, several: int, counts: tuple[int, ...] | None = None
) -> Iterator[Iterator[PlanTemplate]]:
    """So many single pipelines, and so many combinations of several, the most promising first."""
    sequences = StageSequences(ProgramInputs(problem, incumbent.scorer, counts))
    rows = _beside(sequences)[:several]
    rows += [(x.seconds, (x,)) for x in sequences.fastest(1)[:singles]] if singles else []
    for seconds, chosen in sorted(rows, key=lambda row: row[0]):
        if seconds > SLOW * incumbent.seconds:
            break
        kinds = Counter(chosen)
        outlines = [PipelineOutline(x.stages, x.size, n) for x, n in kinds.items()]
        yield incumbent.builder.templates(outlines, "1f1b")


def _beside(sequences: StageSequences) -> list[tuple[float, tuple[StageSequence, ...]]]:
    """(seconds, pipelines beside each other on disjoint chips), fastest first; memory has room for so many."""
    inputs, side_by_side = sequences.inputs, list[tuple[float, tuple[StageSequence, ...]]]()
    costs = inputs.scorer.costs
    weights, gradients, states = costs.memory.whole
    chips = [group.chip for group in inputs.pool.groups]
    room = sum(n * (costs.memory_limit(chip) - costs.overhead(chip)) for n, chip in zip(inputs.counts, chips))
    most_pipelines = min(inputs.most_pipelines, int((room - states) // max(1, weights + gradients)))
    for pipelines in range(2, most_pipelines + 1):
        by_usage: dict[Usage, list[StageSequence]] = {}
        for x in sequences.fastest(pipelines):
            rows = by_usage.setdefault(x.usage, [])
            if len(rows) < BESIDE or all(row.size != x.size for row in rows):
                rows.append(x)
        side_by_side += [(_seconds(x, inputs), x) for x in _disjoint(list(by_usage.items()), inputs.counts, pipelines)]
    return sorted(side_by_side, key=lambda row: row[0])


def _disjoint(
    by_usage: list[tuple[Usage, list[StageSequence]]],
    left: Usage,
    pipelines: int,
    taken: tuple[StageSequence, ...] = (),
) -> Iterator[tuple[StageSequence, ...]]:
    """So many pipelines besides those ``taken``, on the chips that are ``left``."""
    if not pipelines:
        yield taken
        return
    for i, (usage, rows) in enumerate(by_usage):
        remaining = tuple(a - b for a, b in zip(left, usage))
        for row in (rows if len(taken) < 2 else rows[:1]) if min(remaining) >= 0 else ():
            yield from _disjoint(by_usage[i:], remaining, pipelines - 1, (*taken, row))


def _seconds(chosen: Sequence[StageSequence], inputs: ProgramInputs) -> float:
    """In which pipelines compute the batch in whole micro-batches."""
    same_group = len({x.main for x in chosen}) == 1
    rows = [(x.size, x.tau, x.delay + (x.near if same_group else x.far)) for x in chosen]
    low, high = 0.0, min(delay + tau * math.ceil(inputs.batch / size) for size, tau, delay in rows)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        computed = sum(size * int((middle - delay) / tau) for size, tau, delay in rows if middle > delay)
        low, high = (low, middle) if computed >= inputs.batch else (middle, high)
    return high


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
            giving = replace(giver, num_micro_batches=giver.num_micro_batches - 1)
            taking = replace(taker, num_micro_batches=taker.num_micro_batches + 1)
            yield template.with_part(a, giving).with_part(b, taking)
    for p, part in enumerate(template.parts):
        size, stages = part.shape.micro_batch_size, part.shape.stages
        for s, stage in enumerate(stages):
            for g in groups:
                free = pool.counts[g] - used[g] + (part.copies * stage.chips if g == stage.group else 0)
                for option in options(pool, g, problem.model, problem.space, size):
                    if part.copies * option.chips <= free and (option.group, option.tp, option.dp) != (
                        stage.group, stage.tp, stage.dp
                    ):  # fmt: skip
                        changed = replace(stage, group=g, tp=option.tp, dp=option.dp)
                        yield template.with_part(p, replace(part, shape=part.shape.with_stages({s: changed})))
            if len(stages) > 1 and stages[max(s, 1) - 1].layers + stage.layers:
                yield template.with_part(p, replace(part, shape=_without(part.shape, s)))


def _without(shape: PipelineTemplate, s: int) -> PipelineTemplate:
    """Without one stage, whose layers a neighbour has."""
    stages: list[StageTemplate] = list(shape.stages)
    removed = stages.pop(s)
    to = min(s, len(stages) - 1)
    stages[to] = replace(stages[to], layers=stages[to].layers + removed.layers)
    return replace(shape, stages=tuple(stages))


def _unequal_shares(problem: PlanningProblem, incumbent: Incumbent) -> bool:
    """Offer plans of several pipelines that fit with unequal shares of the states only; False to stop."""
    scorer = incumbent.scorer
    lending = incumbent.on(scorer.lending())
    fit = MemoryFit(scorer, problem.space.recompute)

    def improves(template: PlanTemplate, limit: float) -> bool:
        parts = [replace(x, copies=1, shape=x.shape.plain) for x in template.parts for _ in range(x.copies)]
        single = replace(template, parts=tuple(parts))
        placed = place(single, scorer.pool) if scorer.bounds.lower_bound(single) < limit else None
        if placed is None:
            return False
        likely, _ = fit.best_case(placed)
        if likely is None or scorer.bounds.lower_bound(likely) >= limit:
            return False
        for fitted in fit.fits(placed):
            score = scorer.score(fitted, limit)
            if score is None or score.step_seconds >= limit:
                continue
            if simulate_best([(score.step_seconds, 0, fitted.joined())], problem, scorer):
                incumbent.take(fitted.joined(), score.step_seconds)
                return True
        return False

    for template in itertools.chain.from_iterable(_pipelines(problem, lending, 0, UNLIKE)):
        if fit.computed >= FITTED:
            break
        improves(template, incumbent.seconds)
        if incumbent.should_stop():
            return False
    if incumbent.rows and incumbent.rows[0][2].pipelines > 1:
        most = fit.computed + FITTED

        def near(template: PlanTemplate) -> Iterator[PlanTemplate]:
            return itertools.chain(
                neighbours(template, problem.space), _other_chips(template, problem, scorer.pool)
            )

        climb(incumbent.rows[0][2], near, lambda x: fit.computed < most and improves(x, incumbent.seconds), EFFORT)
    return not incumbent.should_stop()


MANY = 24  # chips up to which parts without single nodes are tried
Counts = tuple[int, ...]  # chips per group, of whole nodes


class Parts:
    """Proposes plans on parts of the chips where their work alone does not rule them out. Programs over all chips rank
    them worse than they turn out after local search, and never leave a stage fewer chips than there are for it. Parts
    are each chip type, each group of nodes, a node of each group, one node, and, of up to ``MANY`` chips, the whole
    with fewer nodes of one group, and then, as long as that is faster, what the best plan uses with fewer.

    Args:
        polished: the incumbent whose scorer local search uses; None: that of :meth:`propose`.
    """

    def __init__(self, polished: Incumbent | None = None) -> None:
        self.polished = polished

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        pool = incumbent.scorer.pool
        single_parts = self._alone(pool)
        if not all(self._try(problem, incumbent, counts) for counts in single_parts):
            return False
        largest, best_before, tried = pool.counts, math.inf, set(single_parts)
        while incumbent.seconds < best_before and pool.chips <= MANY:
            best_before, parts = incumbent.seconds, [x for x in self._with_fewer_nodes(pool, largest) if x not in tried]
            tried.update(parts)
            if not all(self._try(problem, incumbent, counts) for counts in parts):
                return False
            largest = self._nodes_of(incumbent.rows[0][2], pool) if incumbent.rows else largest
        return True

    @staticmethod
    def _alone(pool: DevicePool) -> list[Counts]:
        """Each chip type, each group, one node of each group, and one node."""
        groups, nodes = pool.groups, [g.per_node for g in pool.groups]
        parts = [tuple(g.chips * (g.chip == chip) for g in groups) for chip in sorted({g.chip for g in groups})]
        parts += [tuple(n * (h == g) for h, n in enumerate(pool.counts)) for g in range(len(groups))]
        parts += [tuple(nodes), *(tuple(n * (h == g) for h, n in enumerate(nodes)) for g in range(len(groups)))]
        return [part for part in dict.fromkeys(parts) if part != pool.counts and sum(part) > 1]

    @staticmethod
    def _with_fewer_nodes(pool: DevicePool, counts: Counts) -> Iterator[Counts]:
        """Of one group: one node less, one node, none."""
        for g, group in enumerate(pool.groups):
            for chips_left in sorted(
                {max(counts[g] - group.per_node, 0), min(counts[g], group.per_node), 0}, reverse=True
            ):
                part = tuple(chips_left if h == g else n for h, n in enumerate(counts))
                if part != counts and sum(part) > 1:
                    yield part

    @staticmethod
    def _nodes_of(template: PlanTemplate, pool: DevicePool) -> Counts:
        """Chips of the nodes that a template needs at least."""
        used = template.usage(len(pool.groups))
        return tuple(-(-used[g] // group.per_node) * group.per_node for g, group in enumerate(pool.groups))

    def _try(self, problem: PlanningProblem, incumbent: Incumbent, counts: Counts) -> bool:
        if incumbent.rows:
            programs = Programs(ProgramInputs(problem, incumbent.scorer, counts))
            if any(bound() >= incumbent.seconds for bound in (programs.least_work_seconds, programs.least_seconds)):
                return True
        of_part = Incumbent(problem, incumbent.scorer, incumbent.budget, keep=incumbent.keep, part_of=incumbent)
        polished = of_part.on((self.polished or incumbent).scorer)
        proposers: list[Proposer] = [PipelineDP(counts), LocalSearch()]
        if self.polished is None:  # with optimizers on the chips
            proposers = [UniformSeeds(counts), *proposers, SmallClusters(counts)]
        try:
            complete = all(x.propose(problem, polished if isinstance(x, LocalSearch) else of_part) for x in proposers)
        finally:
            for seconds, _, template in of_part.rows:
                incumbent.take(template, seconds)
        return complete and not incumbent.should_stop()
