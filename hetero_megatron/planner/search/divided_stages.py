"""Proposer of plans of one pipeline whose stages divide their weights over replicas, unlike chips included.

How fast a chip is decides its sequences, and how much memory is left beside activations its share of the state: the two
are independent. Dividing buys memory with traffic, so such plans are tried where no other fits, or where the best other
one recomputes activations, has optimizers in host memory or leaves chips idle. Where optimizers are in host memory,
weights and sums of gradients are there, too: also a stage of one chip then holds a layer or two at a time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.chip_structures import ChipStructure
from hetero_megatron.planner.search.concrete_search import StagedSearch, StageSpeed
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan, simulation_work
from hetero_megatron.planner.shares import min_max_counts
from hetero_megatron.plans import Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.plans.canonical import ActivationOffload, Optimizer, WeightSharding
from hetero_megatron.plans.fields import reduced
from hetero_megatron.plans.memory.divided import owned_bytes
from hetero_megatron.plans.memory.of_plan import plan_activations
from hetero_megatron.plans.shares import Islands
from hetero_megatron.predictor.simulate.step import StepSimulator
from hetero_megatron.spec import stage_tensors
from hetero_megatron.spec.adapted_model import gathered_bytes

MOST_CHIPS = 64
LOOKED_AT, WIDE = 48, 12  # structures whose memory is looked at; that fit, and are compared before
FEW = 4  # structures that are made into plans; four times as many where nothing else fits
LEAST_WORK = 5 / 8  # of what a search may do in all, which is left for this, however much was done before
STEPS = 8  # parts of a stage's layers by which the number that recompute, or have activations away, is looked for
PARTS = 100  # of the state of a stage, which shares are made of
WAYS = (WeightSharding((1,)), WeightSharding((1,), reshard_after_forward=False), WeightSharding((1,), "step", False))


class DividedStages:
    """Proposes plans with divided weights. ``why``: the outcome; empty where they were not tried."""

    def __init__(self) -> None:
        self.why = ""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        plans = incumbent.plans
        if _cannot(problem) or incumbent.scorer.pool.chips > MOST_CHIPS or (plans and not plans[0].saves_memory):
            return True
        if not plans and problem.space.offload != "always" and not _room(incumbent.scorer):
            return True
        if incumbent.budget is not None and incumbent.budget.over():
            return False
        work = incumbent.scorer.work
        if work.most < math.inf:
            work.most = max(work.most, work.done + LEAST_WORK * problem.options.work * problem.space.schedule_effort)
        none_fit, seconds_before = not plans, plans[0].step_seconds if plans else math.inf
        divided_search = _DividedSearch(problem, incumbent.scorer)
        divided_search.most = 4 * FEW if none_fit else FEW
        outcome = divided_search.propose_to(incumbent)
        self.why = str(outcome)
        if outcome.plans:
            best = outcome.plans[0]
            times = seconds_before / best.step_seconds
            faster = "nothing fits without" if none_fit else f"{times:.2f} x as fast as the best without"
            self.why += "; ".join([f"; chosen: {faster}", *shares_text(best)])
        elif outcome.tried:
            self.why += "; none fits into memory" if none_fit else "; none is faster than the plan without"
        return outcome.ended


def _cannot(problem: PlanningProblem) -> bool:
    """What :mod:`hetero_megatron.plans.weights` or Muon refuses beside divided weights, or the question rules out."""
    model, space = problem.model, problem.space
    dora = model.lora is not None and model.lora.dora
    costs = problem.options.costs
    refused = model.moe is not None or model.mtp_layers > 0 or dora or costs.muon
    refused = refused or costs.fp8 is not None or space.equal_pipelines != "no" or space.weights == "never"
    return refused or not space.inner_dp or space.context == "always"


def _room(scorer: TemplateScorer) -> bool:
    """Whether all chips together have room for the state alone."""
    rooms = [scorer.costs.memory_limit(g.chip) - scorer.costs.overhead(g.chip) for g in scorer.pool.groups]
    return sum(scorer.costs.memory.whole) <= sum(r * g.chips for r, g in zip(rooms, scorer.pool.groups, strict=True))


def shares_text(best: SimulatedPlan) -> list[str]:
    """By stage of unlike chips, such as ``1 big hold 65% of the state and 50% of the tokens, 1 small 35% and 50%``."""
    texts, size = [], best.plan.pipelines[0].micro_batch_size
    for stage in best.plan.stages:
        chips = dict.fromkeys(best.cluster.ranks[rank].chip for rank in stage.ranks)
        if stage.weights is None or len(chips) == 1:
            continue
        rows = {rank: u.sequences[1] - u.sequences[0] for u in stage.units for rank in u.ranks}
        keeps = dict(zip(stage.ranks, stage.weights.shard, strict=True))
        parts = []
        for i, chip in enumerate(chips):
            ranks = [rank for rank in stage.ranks if best.cluster.ranks[rank].chip == chip]
            state = sum(keeps[r] for r in ranks) / sum(keeps.values())
            tokens = sum(rows[r] for r in ranks) / stage.units[0].tp / size
            hold, of_state, of_tokens = ("", "", "") if i else (" hold", " of the state", " of the tokens")
            parts.append(f"{len(ranks)} {chip}{hold} {state:.0%}{of_state} and {tokens:.0%}{of_tokens}")
        texts.append(", ".join(parts))
    return texts


@dataclass(frozen=True)
class Level:
    """What becomes of the activations of a stage: ``recompute``, with ``first`` of all its layers, and the part
    ``away`` of its layers that has them in host memory."""

    recompute: str = "none"
    first: float = 0.0
    away: float = 0.0

    def recomputed(self, layers: int) -> Recompute:
        count = math.ceil(self.first * layers)
        return Recompute("first", count) if 0 < count < layers else Recompute("full" if count else self.recompute)


KEEP = Level()


class _DividedSearch(StagedSearch):
    every_size = True

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        super().__init__(problem, scorer)
        self._in_host = problem.space.offload == "always"
        self._levels = self._rows_of_levels()
        self._rows: dict[object, list[int] | None] = {}
        self._speeds: dict[object, StageSpeed | None] = {}
        layer = stage_tensors(self.model, (0,), False, False)
        self._trained = sum(t.size for t in layer if t.trained) if self.model.lora is None else 0
        self._frozen = sum(gathered_bytes(t, self.costs.item) for t in layer if not t.trained)

    def _rows_of_levels(self) -> list[list[Level]]:
        """Rows of levels, of each of which the first that fits is tried; the first row's last one takes least."""
        if (kind := self.space.recompute) is not None:
            return [[Level(kind)]]
        rows = [[KEEP, *(Level(first=n / STEPS) for n in range(1, STEPS + 1))], [Level("elementwise")]]
        away = self.problem.activations_away()
        if self.space.offload_activations != "never" and away.issuperset(g.chip for g in self.pool.groups):
            parts = [n / STEPS for n in range(1, STEPS + 1)]
            rows += [[Level(kind, away=n) for n in parts] for kind in ("none", "elementwise")]
        return rows

    def bound(self, structure: ChipStructure) -> float:
        """Nor is a step shorter than its messages, of which shares by room may save half."""
        seconds = super().bound(structure)
        return seconds if seconds == math.inf else max(seconds, self._traffic(structure) / 2)

    def _traffic(self, structure: ChipStructure) -> float:
        """Seconds in which a stage with equal shares sums up the gradients of every micro-batch, and gathers what is
        frozen: once, or forward and backward of every micro-batch where a rank has no room for all of it."""
        slowest, rounds = 0.0, self.rounds(structure)
        for ranks, layers in zip(structure.ranks[0], self.layers(structure), strict=True):
            room = min(self.costs.memory_limit(self.cluster.ranks[rank].chip) for rank in ranks)
            times = 1 if self._frozen * layers / structure.tp <= room else 2 * rounds
            size = (self._trained * self.costs.wide * rounds + self._frozen * times) * layers / len(ranks)
            groups = [ranks[t :: structure.tp] for t in range(structure.tp)]
            pairs = [(a, b, round(size)) for group in groups for a in group for b in group if a != b]
            slowest = max(slowest, self.costs.links.exchange(pairs).seconds if pairs else 0.0)
        return slowest

    def structures(self) -> list[ChipStructure]:
        """Those of one pipeline in which some stage has something to divide, and each of its replicas a sequence."""
        return [
            x for x in super().structures()
            if x.pipelines == 1 and (self._in_host or any(len(stage) > x.tp for stage in x.ranks[0]))
            and x.size >= max(len(stage) for stage in x.ranks[0]) // x.tp
        ]  # fmt: skip

    def speed(self, structure: ChipStructure, s: int) -> StageSpeed | None:
        ranks, tp, head = structure.ranks[0][s], structure.tp, s == structure.stages - 1
        key = (self.alike(ranks), tp, structure.size, head)
        if key not in self._speeds:
            operators = [self.costs.operators(self.cluster.ranks[rank].chip) for rank in ranks[::tp]]
            length, sizes = self.costs.seq_length, range(structure.size + 1)
            seconds = [[sum(ops.layer(1 / tp, n, length)) if n else 0.0 for n in sizes] for ops in operators]
            rows = self._rows[key] = min_max_counts(seconds, structure.size)
            if rows is None:
                self._speeds[key] = None
                return None
            layer = max(table[n] for table, n in zip(seconds, rows, strict=True))
            ends = [sum(ops.head(1 / tp, n, length)) for ops, n in zip(operators, rows, strict=True)] if head else [0.0]
            self._speeds[key] = StageSpeed(layer, max(ends), layer)
        return self._speeds[key]

    def order(
        self, rows: Sequence[tuple[float, int, ChipStructure]], best: float
    ) -> Sequence[tuple[float, int, ChipStructure]]:
        """By what a step takes with least activations, of the first ``WIDE`` that fit so: gathers and sums come with
        every micro-batch, of which the bound knows little, and less of memory."""
        estimated: list[tuple[float, tuple[float, int, ChipStructure]]] = []
        for row in rows[:LOOKED_AT]:
            if row[0] >= best or len(estimated) == WIDE or ((estimated or best < math.inf) and self.scorer.work.over()):
                break
            least = (levels[-1] for levels in self._levels)
            try:
                step = next((x for level in least if (x := self._fits(row[2], level)) is not None), None)
            except UserError:  # a rank without any column
                continue
            if step is not None:
                estimated.append((step.times.end, row))
        return [row for _, row in sorted(estimated, key=lambda x: (x[0], x[1][1]))]

    def best_plan(self, structure: ChipStructure, best: float) -> SimulatedPlan | None:
        """With the activations and the way of gathering that are fastest."""
        try:
            checked = self.checked(self._plan(structure, self._levels[0][0], WAYS[0]))
        except UserError:  # a rank without any column
            return None
        chosen: SimulatedPlan | None = None
        for levels in self._levels:
            number = bisect_left(levels, True, key=lambda x: self._fits(structure, x, checked.islands) is not None)
            ways = WAYS[:1] if self._in_host else WAYS
            for way in ways if number < len(levels) else ():
                step = self._fits(structure, levels[number], checked.islands, way)
                if step is not None and (prediction := step.prediction()).step_seconds < best:
                    best = prediction.step_seconds
                    chosen = self.simulated(step.plan, prediction, self._text(step.plan))
            if number == 0 and levels[0] == KEEP:
                break  # nothing else is faster
        return chosen

    def _fits(
        self, structure: ChipStructure, level: Level, islands: Islands = (), way: WeightSharding = WAYS[0]
    ) -> StepSimulator | None:
        """Of the plan with shares by room; None where it does not fit."""
        plan = replace(self._plan(structure, level, way), islands=islands)
        if self._has_no_room(plan):
            return None
        self.scorer.work.add(simulation_work(plan) / 2)
        step = StepSimulator(self._shared_by_room(plan), self.costs)
        return None if step.over else step

    def _has_no_room(self, plan: Plan) -> bool:
        """Whether activations leave the ranks of a stage less than its state takes once, whatever their shares."""
        options, costs = self.costs.options, self.costs
        activations = plan_activations(plan, self.model, costs.item, options.logits_bytes, options.routing)
        for stage in plan.stages:
            chips = [self.cluster.ranks[rank].chip for rank in stage.ranks]
            rooms = [
                costs.memory_limit(chip) - costs.overhead(chip) - activations[rank].activations
                for rank, chip in zip(stage.ranks, chips, strict=True)
            ]
            tensors = stage_tensors(self.model, stage.layer_indices(), stage.embed, stage.head)
            state = sum(t.size for t in tensors if t.trained) * costs.wide * (options.moments + 2)
            state += sum(gathered_bytes(t, costs.item) for t in tensors if not t.trained)
            if min(rooms) < 0 or (sum(rooms) < state and not self._in_host):
                return True
        return False

    def _shared_by_room(self, plan: Plan) -> Plan:
        """Shares of state from the memory that is left beside everything else; equal where the space says so, or the
        state is in host memory."""
        if self.space.weights == "equal" or self._in_host:
            return plan
        step = StepSimulator(plan, self.costs)
        optimizer_bytes = owned_bytes(step.prepared.compiled.divided, self.costs.item, self.costs.options.moments)
        room = {
            r: max(step.limits[r] - memory.total + optimizer_bytes.get(r, 0), 0) for r, memory in step.memory.items()
        }

        def shared(stage: Stage) -> Stage:
            if stage.weights is None:
                return stage
            total_room = max(sum(room[rank] for rank in stage.ranks), 1)
            shard = [round(PARTS * room[rank] / total_room) for rank in stage.ranks]
            tp = stage.units[0].tp
            if any(not sum(shard[t::tp]) for t in range(tp)):
                return stage
            return replace(stage, weights=replace(stage.weights, shard=reduced(tuple(shard))))

        return plan.with_stages(shared)

    def _plan(self, structure: ChipStructure, level: Level, way: WeightSharding) -> Plan:
        ends = list(itertools.accumulate(self.layers(structure), initial=0))
        stages = []
        for s, ranks in enumerate(structure.ranks[0]):
            head, tp = s == structure.stages - 1, structure.tp
            rows = self._rows[self.alike(ranks), tp, structure.size, head]
            assert rows is not None, "a structure with a bound"
            weights = replace(way, shard=(1,) * len(ranks)) if len(rows) > 1 or self._in_host else None
            layers = ends[s + 1] - ends[s]
            away = math.ceil(level.away * layers)
            stages.append(Stage(
                ((ends[s], ends[s + 1]),), self._units(ranks, tp, rows), s == 0, head, level.recomputed(layers),
                self.chip(ranks), Optimizer(self._in_host), weights=weights,
                activations=ActivationOffload(away) if away else None,
            ))  # fmt: skip
        pipeline = Pipeline(structure.size, self.rounds(structure), tuple(stages))
        return Plan(self.costs.seq_length, self.batch, "1f1b", (pipeline,))

    def _units(self, ranks: Sequence[int], tp: int, rows: Sequence[int]) -> tuple[Unit, ...]:
        ends = list(itertools.accumulate(rows, initial=0))
        span, heads = ((0, self.costs.seq_length),), (0, self.model.num_heads)
        groups = [tuple(ranks[i : i + tp]) for i in range(0, len(ranks), tp)]
        return tuple(
            Unit(group, (1,) * tp, interval, span, heads)
            for group, interval in zip(groups, itertools.pairwise(ends), strict=True)
        )

    def _text(self, plan: Plan) -> str:
        """Text such as ``1 x (m 4, b 8) 8 card24 rows 1,1,... weights by layer [32]``."""
        pipeline, parts = plan.pipelines[0], []
        for stage in plan.stages:
            chips = [self.cluster.ranks[rank].chip for rank in stage.ranks]
            names = " + ".join(f"{chips.count(chip)} {chip}" for chip in dict.fromkeys(chips))
            rows = ",".join(str(u.sequences[1] - u.sequences[0]) for u in stage.units)
            tp = f" tp{stage.units[0].tp}" if stage.units[0].tp > 1 else ""
            home = " from host memory" if self._in_host else ""
            weights = "" if stage.weights is None else f" weights by {stage.weights.gather}{home}"
            recompute = "" if stage.recompute.kind == "none" else f" recompute {stage.recompute}"
            away = "" if stage.activations is None else f" offload {stage.activations.layers}"
            parts.append(f"{names}{tp} rows {rows}{weights} [{stage.num_layers}]{recompute}{away}")
        return f"1 x (m {pipeline.num_micro_batches}, b {pipeline.micro_batch_size}) {' > '.join(parts)}"
