"""Proposer of plans that divide the experts of a mixture over the ranks of each stage, unlike chips included.

A structure is a number of equal pipelines, the chips of each of their stages (one kind of chip, or several together),
a TP degree and a micro-batch size. In a stage tokens wait for the slowest rank before the experts and after them, so
its two divisions are independent: sequences by the speed of what is not experts, experts by the speed of experts
(:mod:`expert_partition`) and the measured or even routing. Structures are simulated in the order of a lower bound.
Where memory allows, experts are replicated (:mod:`expert_replicas`) if that shortens the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.chip_structures import ChipStructure, Ranks
from hetero_megatron.planner.search.concrete_search import StagedSearch, StageSpeed
from hetero_megatron.planner.search.expert_partition import divide_experts, least_seconds
from hetero_megatron.planner.search.expert_price import DivisionPrice, divided
from hetero_megatron.planner.search.expert_replicas import Intervals, best_divisions
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan
from hetero_megatron.planner.shares import min_max_counts
from hetero_megatron.plans import Pipeline, Plan, Recompute, Stage, Unit, supports
from hetero_megatron.plans.canonical import ExpertGroup, ExpertMember
from hetero_megatron.plans.experts import replicated_experts
from hetero_megatron.plans.routing import Popularity
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.spec.expert_load import ExpertLoad, expert_elements

MOST_CHIPS = 64
ROUNDS = 4  # of moving experts away from ranks that lack memory


class ExpertStages:
    """Proposes plans with divided experts. ``why``: the outcome; empty for dense models."""

    def __init__(self) -> None:
        self.why = ""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        if not supports("experts"):
            return True
        if incumbent.scorer.pool.chips > MOST_CHIPS:
            self.why = f"divided only on up to {MOST_CHIPS} chips"
            return True
        outcome = _ExpertSearch(problem, incumbent.scorer).propose_to(incumbent)
        self.why = f"{outcome}{'; chosen' if outcome.plans else ''}"
        return outcome.ended


@dataclass(frozen=True)
class _StageDivision:
    """``rows``: sequences of each TP group; ``speed``: with experts on one rank each, and, as its ``least``, with those
    balanced perfectly, which with replicas they may be."""

    rows: tuple[int, ...]
    speed: StageSpeed


class _ExpertSearch(StagedSearch):
    most = 24
    ordered = True  # replicas are intervals of ranks in this order

    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        super().__init__(problem, scorer)
        self._divisions: dict[object, _StageDivision | None] = {}
        assert self.model.moe is not None
        self.moe = self.model.moe

    def structures(self) -> Iterable[ChipStructure]:
        """Those in which some stage has several ranks, and each TP group a sequence."""
        for structure in super().structures():
            widest = max(len(stage) for stage in structure.ranks[0])
            if widest > 1 and structure.size >= widest // structure.tp:
                yield structure

    def speed(self, structure: ChipStructure, s: int) -> StageSpeed | None:
        division = self._division(structure, s)
        return None if division is None else division.speed

    def _division(self, structure: ChipStructure, s: int) -> _StageDivision | None:
        ranks, head = structure.ranks[0][s], s == structure.stages - 1
        key = (self.alike(ranks), structure.tp, structure.size, head)
        if key not in self._divisions:
            self._divisions[key] = self._divide(ranks, structure.tp, structure.size, head)
        return self._divisions[key]

    def _divide(self, ranks: Ranks, tp: int, size: int, head: bool) -> _StageDivision | None:
        units = [ranks[i : i + tp] for i in range(0, len(ranks), tp)]
        seconds = [[self._rest(unit[0], tp, rows) for rows in range(size + 1)] for unit in units]
        rows = min_max_counts(seconds, size)
        costs, kinds, caps = self.expert_costs(ranks, size, self.popularity(range(self.model.num_layers)), {})
        experts = divide_experts(costs, kinds, caps)
        if rows is None or experts is None:
            return None
        slowest = max(table[n] for table, n in zip(seconds, rows, strict=True))
        operators = [self.costs.operators(self.cluster.ranks[unit[0]].chip) for unit in units]
        length = self.costs.seq_length
        ends = [sum(ops.head(1 / tp, n, length)) for ops, n in zip(operators, rows, strict=True)] if head else [0.0]
        moe = self.model.moe_share
        layer, least_layer = (slowest + moe * x for x in (experts[1], least_seconds(costs, kinds)))
        return _StageDivision(tuple(rows), StageSpeed(layer, max(ends), least_layer))

    def _rest(self, rank: int, tp: int, rows: int) -> float:
        """Seconds of a layer without its routed experts, without exchanges."""
        if not rows:
            return 0.0
        operators = self.costs.operators(self.cluster.ranks[rank].chip)
        tokens = rows * self.costs.seq_length
        no_experts = ExpertLoad(self.model.moe_share, tokens / tp, 0.0, 0.0, 0.0, 0, 0.0, 1)
        return sum(operators.layer(1 / tp, rows, self.costs.seq_length, load=no_experts))

    def popularity(self, layers: Sequence[int]) -> Popularity:
        """Mean share of routed tokens of each expert."""
        count, measured = self.moe.num_experts, dict(self.costs.options.routing.layers)
        rows = [measured[i] for i in layers if i in measured] or [(1 / count,) * count]
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))

    def expert_costs(
        self, ranks: Ranks, size: int, popular: Popularity, caps: dict[int, int]
    ) -> tuple[list[list[float]], list[int], list[int]]:
        """What :func:`divide_experts` takes: by kind of rank, forward and backward seconds of each expert in a layer;
        the kind of each rank of a stage; by kind, the most experts. ``caps``: these by place in the stage."""
        tokens, count = size * self.costs.seq_length, self.moe.num_experts
        chips = [(self.cluster.ranks[r].chip, caps.get(i, count)) for i, r in enumerate(ranks)]
        kinds = list(dict.fromkeys(chips))
        costs = []
        for chip, _ in kinds:
            operators, seconds_by_share = self.costs.operators(chip), dict[float, float]()
            for share in popular:
                rows = tokens * self.moe.top_k * share
                if share not in seconds_by_share:
                    load = ExpertLoad(1.0, 0.0, 0.0, 0.0, rows, 1, float(self.moe.ffn_hidden_size), 1)
                    seconds_by_share[share] = sum(operators.experts(load))
            costs.append([seconds_by_share[share] for share in popular])
        return costs, [kinds.index(chip) for chip in chips], [cap for _, cap in kinds]

    def best_plan(self, structure: ChipStructure, best: float) -> SimulatedPlan | None:
        """With fewer experts on ranks that lack memory, and replicated ones where that is faster."""
        for recompute in self.recompute_kinds:
            caps: list[dict[int, int]] = [{} for _ in range(structure.stages)]
            for _ in range(ROUNDS):
                plan = self._plan(structure, recompute, caps)
                if plan is None:
                    break
                try:
                    plan = self.checked(plan)
                except UserError:  # a rank without any column of what all tokens share
                    return None
                prediction = self.predict(plan)
                if not prediction.over:
                    once = self.simulated(plan, prediction, self._text(structure, plan))
                    simulated = self._replicated(structure, once, caps)
                    return simulated if simulated.step_seconds < best else None
                if not self._lower(plan, prediction, caps):
                    break
        return None

    def _replicated(
        self, structure: ChipStructure, once: SimulatedPlan, caps: Sequence[dict[int, int]]
    ) -> SimulatedPlan:
        """The plan with replicated experts if it fits and is faster; else ``once``, which has each on one rank."""
        best, limits = once, [dict(cap) for cap in caps]
        for _ in range(ROUNDS):
            lowered = False
            for plan in self._with_replicas(once.plan, limits):
                prediction = self.predict(plan)
                if prediction.over:
                    lowered |= self._lower(plan, prediction, limits)
                elif prediction.step_seconds < best.step_seconds:
                    simulated = self.simulated(plan, prediction, self._text(structure, plan))
                    best = replace(simulated, once_seconds=once.step_seconds)
            if best is not once or not lowered:
                break
        return best

    def _with_replicas(self, plan: Plan, caps: Sequence[dict[int, int]]) -> list[Plan]:
        """Some with the experts of all pipelines as they may be best in the first one, which is like the others."""
        first, costs = plan.pipelines[0], StageCosts(plan, self.costs)
        ranked: list[list[Intervals]] = []
        for stage, cap in zip(first.stages, caps, strict=True):
            start = tuple(m.experts for g in stage.experts for m in g.members)
            # What a rank held before fits.
            caps_of_stage = [max(cap.get(i, self.moe.num_experts), b - a) for i, (a, b) in enumerate(start)]
            price = DivisionPrice(costs, stage, first.num_micro_batches) if start else None
            ranked.append(
                best_divisions(self.popularity(stage.layer_indices()), caps_of_stage, price, start) if price else []
            )
        plans = []
        for i in range(max(map(len, ranked))):
            divisions = [rows[min(i, len(rows) - 1)] if rows else () for rows in ranked]
            pipelines = [
                replace(p, stages=tuple(divided(s, x) if x else s for s, x in zip(p.stages, divisions, strict=True)))
                for p in plan.pipelines
            ]
            plans.append(replace(plan, pipelines=tuple(pipelines)))
        return [candidate for candidate in dict.fromkeys(plans) if candidate != plan]

    def _lower(self, plan: Plan, prediction: Prediction, caps: list[dict[int, int]]) -> bool:
        """Lower the caps of ranks that lack memory; whether that may help."""
        over = {x.rank: x.over for x in prediction.over}
        elements = expert_elements(self.model) * self.model.moe_share
        element_bytes = self.costs.item + self.costs.wide  # optimizer states may move elsewhere
        for pipeline in plan.pipelines:
            for s, stage in enumerate(pipeline.stages):
                experts_of = {r: m.experts[1] - m.experts[0] for g in stage.experts for m in g.members for r in m.ranks}
                for place, rank in enumerate(stage.ranks):
                    if rank in over:
                        fewer = math.ceil(over[rank] / (elements * stage.num_layers * element_bytes))
                        remaining = experts_of.get(rank, 0) - fewer
                        if remaining < 0:
                            return False
                        caps[s][place] = min(remaining, caps[s].get(place, remaining))
        return True

    def _plan(self, structure: ChipStructure, recompute: str, caps: Sequence[dict[int, int]]) -> Plan | None:
        """None where the ranks of a stage cannot hold all experts."""
        ends = list(itertools.accumulate(self.layers(structure), initial=0))
        shapes = []
        for s, (start, end) in enumerate(itertools.pairwise(ends)):
            division, popular = self._division(structure, s), self.popularity(range(start, end))
            experts = divide_experts(*self.expert_costs(structure.ranks[0][s], structure.size, popular, caps[s]))
            if experts is None:
                return None
            assert division is not None, "a structure with a bound"
            shapes.append((division.rows, experts[0], (start, end)))
        pipelines = tuple(
            Pipeline(structure.size, self.rounds(structure), tuple(
                self._stage(ranks, structure.tp, *shape, recompute, s == 0, s == structure.stages - 1)
                for s, (ranks, shape) in enumerate(zip(stages, shapes, strict=True))
            ))
            for stages in structure.ranks
        )  # fmt: skip
        return Plan(self.costs.seq_length, self.batch, "1f1b", pipelines)

    def _stage(
        self, ranks: Ranks, tp: int, rows: Sequence[int], experts: Sequence[tuple[int, int]], layers: tuple[int, int],
        recompute: str, embed: bool, head: bool,
    ) -> Stage:  # fmt: skip
        units, first = [], 0
        for i, count in enumerate(rows):
            span = ((0, self.costs.seq_length),)
            group = ranks[i * tp : (i + 1) * tp]
            units.append(Unit(group, (1,) * tp, (first, first + count), span, (0, self.model.num_heads)))
            first += count
        members = tuple(ExpertMember((r,), e, (1,)) for r, e in zip(ranks, experts, strict=True))
        return Stage(
            (layers,), tuple(units), embed, head, Recompute(recompute), self.chip(ranks),
            experts=(ExpertGroup(members),) if len(ranks) > 1 else (),
        )  # fmt: skip

    def _text(self, structure: ChipStructure, plan: Plan) -> str:
        """Text such as ``2 x (m 8, b 4) H100 + A100 tp1 rows 3,1 experts 6,2 [16]``."""
        pipeline, parts = plan.pipelines[0], []
        for stage in pipeline.stages:
            chips = [self.cluster.ranks[u.ranks[0]].chip for u in stage.units]
            names = " + ".join(f"{chips.count(c)} {c}" if len(chips) > 1 else c for c in dict.fromkeys(chips))
            rows = f" rows {','.join(str(u.sequences[1] - u.sequences[0]) for u in stage.units)}"
            counts = [str(m.experts[1] - m.experts[0]) for g in stage.experts for m in g.members]
            recompute = "" if stage.recompute.kind == "none" else f" recompute {stage.recompute.kind}"
            experts = f" experts {','.join(counts)}" if counts else ""
            more_than_once = len(replicated_experts(stage))
            experts += f" ({more_than_once} replicated)" if more_than_once else ""
            tp = f" tp{structure.tp}" if structure.tp > 1 else ""
            parts.append(f"{names}{tp}{rows if len(chips) > 1 else ''}{experts} [{stage.num_layers}]{recompute}")
        head = f"{len(plan.pipelines)} x (m {pipeline.num_micro_batches}, b {pipeline.micro_batch_size})"
        return f"{head} {' > '.join(parts)}"


def with_equal_experts(plan: Plan, num_experts: int) -> Plan:
    """The plan with as many experts on every member of each group, as nearly as they divide."""

    def group(g: ExpertGroup) -> ExpertGroup:
        n = len(g.members)
        ends = [round(i * num_experts / n) for i in range(n + 1)]
        order = sorted(range(n), key=lambda i: g.members[i].experts)
        members = list(g.members)
        for place, i in enumerate(order):
            members[i] = replace(
                members[i], experts=(ends[place], ends[place + 1]) if ends[place] < ends[place + 1] else (0, 0)
            )
        return ExpertGroup(tuple(members))

    return plan.with_stages(lambda s: replace(s, experts=tuple(map(group, s.experts))))
