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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, Recompute, Stage, Unit, supports, validate
from hetero_megatron.plan.canonical import ExpertGroup, ExpertMember
from hetero_megatron.plan.experts import replicated_experts
from hetero_megatron.plan.islands import with_islands_where_quick
from hetero_megatron.plan.routing import Popularity
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.batch_partition import divide_units
from hetero_megatron.planner.search.context_structures import CUTS, Ranks, divide, stagings, tp_sizes
from hetero_megatron.planner.search.expert_partition import divide_experts, divide_rows, least_seconds
from hetero_megatron.planner.search.expert_price import DivisionPrice, divided
from hetero_megatron.planner.search.expert_replicas import Intervals, best_divisions
from hetero_megatron.planner.search.incumbent import Incumbent, JudgedPlan, judged_plan
from hetero_megatron.planner.simulate.stage_cost import StageCosts
from hetero_megatron.planner.simulate.stage_dtypes import with_dtypes
from hetero_megatron.planner.simulate.step import predict
from hetero_megatron.planner.template.search_space import batch_sizes
from hetero_megatron.spec.expert_load import ExpertLoad, moe_layers
from hetero_megatron.words import plural

MOST_CHIPS, MOST_SIMULATED = 64, 24
FEW_GROUPS = 3  # up to so many kinds of nodes every subset, and every order, is tried
ROUNDS = 4  # of moving experts away from ranks that lack memory


class ExpertStages:
    """Proposes plans with divided experts. ``why``: the outcome; empty for dense models."""

    def __init__(self) -> None:
        self.why = ""

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        if problem.model.moe is None or not supports("experts"):
            return True
        if incumbent.scorer.pool.chips > MOST_CHIPS:
            self.why = f"divided only on up to {MOST_CHIPS} chips"
            return True
        search = _ExpertSearch(problem, incumbent.scorer)
        best = incumbent.plans[0].step_seconds if incumbent.plans else math.inf
        tried, found, complete = 0, list[JudgedPlan](), True
        rows = sorted(((search.bound(x), i, x) for i, x in enumerate(search.structures())), key=lambda row: row[:2])
        for bound, _, structure in rows:
            if bound >= best or tried >= MOST_SIMULATED:
                break
            if incumbent.should_stop():
                complete = False
                break
            tried += 1
            plan = search.fitted(structure, best)
            if plan is not None:
                found.append(plan)
                incumbent.take_plan(plan)
                best = min(best, plan.step_seconds)
        self.why = f"{tried} of {plural(len(rows), 'structure')} with divided experts tried"
        if found and incumbent.plans[0] is min(found, key=lambda plan: plan.step_seconds):
            self.why += "; chosen"
        return complete


@dataclass(frozen=True)
class _Structure:
    """``ranks[p][s]``: ranks of stage s of pipeline p, corresponding ones alike."""

    ranks: tuple[tuple[Ranks, ...], ...]
    tp: int
    size: int

    @property
    def stages(self) -> int:
        return len(self.ranks[0])


@dataclass(frozen=True)
class _Divided:
    """One stage: sequences of each TP group, seconds of a layer (and of the head) in forward and backward; ``least``:
    those of a layer whose experts are balanced perfectly, which with replicas they may be."""

    rows: tuple[int, ...]
    layer: float
    head: float
    least: float


class _ExpertSearch:
    def __init__(self, problem: PlanningProblem, scorer: TemplateScorer) -> None:
        self.problem, self.scorer, self.costs, self.pool = problem, scorer, scorer.costs, scorer.pool
        self.model, self.cluster, self.space = problem.model, problem.cluster, problem.space
        self.batch, self.network = problem.global_batch_size, scorer.costs.links
        self._divided: dict[object, _Divided | None] = {}
        assert self.model.moe is not None
        self.moe = self.model.moe

    def structures(self) -> Iterator[_Structure]:
        groups = range(len(self.pool.groups))
        few, seen = len(self.pool.groups) <= FEW_GROUPS, set[_Structure]()
        sets = [c for n in groups for c in itertools.combinations(groups, n + 1)] if few else [tuple(groups)]
        for chosen in sets:
            for order in itertools.permutations(chosen) if few else [chosen]:
                for copies in range(1, min(self.batch, max(self.pool.counts)) + 1):
                    parts = [divide(self.pool.groups[g], copies) for g in order] if self.batch % copies == 0 else [None]
                    given = [part for part in parts if part is not None]
                    if len(given) < len(parts):
                        continue
                    for ranks in (*stagings(given, copies, False), *_together(given, copies)):
                        for one in self._sized(ranks, copies):
                            if one not in seen:
                                seen.add(one)
                                yield one

    def _sized(self, ranks: tuple[tuple[Ranks, ...], ...], copies: int) -> Iterator[_Structure]:
        """With every TP degree and micro-batch size for which each TP group has a sequence."""
        widest = max(len(stage) for stage in ranks[0])
        if widest == 1 or not 1 <= len(ranks[0]) <= self.model.num_layers:
            return
        library = self.cluster.library_of
        if any(len({library(r) for r in stage}) > 1 for stages in ranks for stage in stages):
            return
        for tp in tp_sizes(self.problem, self.pool, ranks):
            for size in batch_sizes(self.space, self.batch // copies):
                if self.batch % (copies * size) == 0 and size >= widest // tp:
                    yield _Structure(ranks, tp, size)

    def bound(self, structure: _Structure) -> float:
        """Seconds of the micro-batches alone, without exchanges between ranks; inf where no division is possible."""
        stages = [self.divided(structure, s) for s in range(structure.stages)]
        if any(stage is None for stage in stages):
            return math.inf
        known = [stage for stage in stages if stage is not None]
        seconds = [n * x.least + x.head for n, x in zip(self._layers(known), known, strict=True)]
        rounds = self.batch // len(structure.ranks) // structure.size
        return (rounds - 1) * max(seconds) + sum(seconds)

    def _layers(self, stages: Sequence[_Divided]) -> list[int]:
        return divide_units(self.model.num_layers, [x.layer for x in stages], [x.head for x in stages])

    def divided(self, structure: _Structure, s: int) -> _Divided | None:
        ranks, tp = structure.ranks[0][s], structure.tp
        places = tuple((self.cluster.ranks[r].group, self.cluster.ranks[r].node) for r in ranks)
        head = s == structure.stages - 1
        key = (places, tp, structure.size, head)
        if key not in self._divided:
            self._divided[key] = self._divide(ranks, tp, structure.size, head)
        return self._divided[key]

    def _divide(self, ranks: Ranks, tp: int, size: int, head: bool) -> _Divided | None:
        units = [ranks[i : i + tp] for i in range(0, len(ranks), tp)]
        seconds = [[self._rest(unit[0], tp, rows) for rows in range(size + 1)] for unit in units]
        rows = divide_rows(seconds, size)
        costs, kinds, caps = self.expert_costs(ranks, size, self.popularity(range(self.model.num_layers)), {})
        experts = divide_experts(costs, kinds, caps)
        if rows is None or experts is None:
            return None
        slowest = max(table[n] for table, n in zip(seconds, rows, strict=True))
        operators = [self.costs.operators(self.cluster.ranks[unit[0]].chip) for unit in units]
        length = self.costs.seq_length
        ends = [sum(ops.head(1 / tp, n, length)) for ops, n in zip(operators, rows, strict=True)] if head else [0.0]
        moe = moe_layers(self.model)
        layer, least = (slowest + moe * x for x in (experts[1], least_seconds(costs, kinds)))
        return _Divided(tuple(rows), layer, max(ends), least)

    def _rest(self, rank: int, tp: int, rows: int) -> float:
        """Seconds of a layer without its routed experts, without exchanges."""
        if not rows:
            return 0.0
        operators = self.costs.operators(self.cluster.ranks[rank].chip)
        tokens = rows * self.costs.seq_length
        none = ExpertLoad(moe_layers(self.model), tokens / tp, 0.0, 0.0, 0.0, 0, 0.0, 1)
        return sum(operators.layer(1 / tp, rows, self.costs.seq_length, load=none))

    def popularity(self, layers: Sequence[int]) -> Popularity:
        """Mean share of routed tokens of each expert."""
        count, known = self.moe.num_experts, dict(self.costs.options.routing.layers)
        rows = [known[i] for i in layers if i in known] or [(1 / count,) * count]
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
            operators, known = self.costs.operators(chip), dict[float, float]()
            for share in popular:
                rows = tokens * self.moe.top_k * share
                if share not in known:
                    one = ExpertLoad(1.0, 0.0, 0.0, 0.0, rows, 1, float(self.moe.ffn_hidden_size), 1)
                    known[share] = sum(operators.experts(one))
            costs.append([known[share] for share in popular])
        return costs, [kinds.index(chip) for chip in chips], [cap for _, cap in kinds]

    def fitted(self, structure: _Structure, best: float) -> JudgedPlan | None:
        """The simulated plan, with fewer experts on ranks that lack memory, and replicated ones where that is faster;
        None: it does not fit, or is not faster than ``best``."""
        for recompute in (self.space.recompute,) if self.space.recompute else ("none", "full"):
            caps: list[dict[int, int]] = [{} for _ in range(structure.stages)]
            for _ in range(ROUNDS):
                plan = self.plan(structure, recompute, caps)
                if plan is None:
                    break
                try:
                    validate(plan, self.model, self.cluster, dtype=self.costs.dtype)
                except UserError:  # a rank without any column of what all tokens share
                    return None
                found = predict(plan, self.model, self.cluster, self.costs.dtype, self.costs)
                if not found.over:
                    once = judged_plan(self.problem, self.scorer, plan, found, self.text(structure, plan))
                    judged = self.replicated(structure, once, caps)
                    return judged if judged.step_seconds < best else None
                if not self._lower(plan, {x.rank: x.need - x.limit for x in found.over}, caps):
                    break
        return None

    def replicated(self, structure: _Structure, once: JudgedPlan, caps: Sequence[dict[int, int]]) -> JudgedPlan:
        """The plan with replicated experts if it fits and is faster; else ``once``, which has each on one rank."""
        best, limits = once, [dict(cap) for cap in caps]
        for _ in range(ROUNDS):
            lowered = False
            for plan in self._with_replicas(once.plan, limits):
                found = predict(plan, self.model, self.cluster, self.costs.dtype, self.costs)
                if found.over:
                    lowered |= self._lower(plan, {x.rank: x.need - x.limit for x in found.over}, limits)
                elif found.step_seconds < best.step_seconds:
                    judged = judged_plan(self.problem, self.scorer, plan, found, self.text(structure, plan))
                    best = replace(judged, once_seconds=once.step_seconds)
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
            most = [max(cap.get(i, self.moe.num_experts), b - a) for i, (a, b) in enumerate(start)]
            price = DivisionPrice(costs, stage, first.num_micro_batches) if start else None
            ranked.append(best_divisions(self.popularity(stage.layer_indices()), most, price, start) if price else [])
        found = []
        for i in range(max(map(len, ranked))):
            held = [rows[min(i, len(rows) - 1)] if rows else () for rows in ranked]
            pipelines = [
                replace(p, stages=tuple(divided(s, x) if x else s for s, x in zip(p.stages, held, strict=True)))
                for p in plan.pipelines
            ]
            found.append(replace(plan, pipelines=tuple(pipelines)))
        return [other for other in dict.fromkeys(found) if other != plan]

    def _lower(self, plan: Plan, over: dict[int, int], caps: list[dict[int, int]]) -> bool:
        """Lower the caps of ranks that lack memory; whether that may help."""
        elements = 3 * self.model.hidden_size * self.moe.ffn_hidden_size * moe_layers(self.model)
        each = self.costs.item + self.costs.wide  # optimizer states may move elsewhere
        for pipeline in plan.pipelines:
            for s, stage in enumerate(pipeline.stages):
                held = {r: m.experts[1] - m.experts[0] for g in stage.experts for m in g.members for r in m.ranks}
                for place, rank in enumerate(stage.ranks):
                    if rank in over:
                        fewer = math.ceil(over[rank] / (elements * stage.num_layers * each))
                        left = held.get(rank, 0) - fewer
                        if left < 0:
                            return False
                        caps[s][place] = min(left, caps[s].get(place, left))
        return True

    def plan(self, structure: _Structure, recompute: str, caps: Sequence[dict[int, int]]) -> Plan | None:
        """None where the ranks of a stage cannot hold all experts."""
        divided = [self.divided(structure, s) for s in range(structure.stages)]
        known = [stage for stage in divided if stage is not None]
        assert len(known) == structure.stages, "a structure with a bound"
        counts = self._layers(known)
        starts = [0, *itertools.accumulate(counts)]
        shapes = []
        for s, one in enumerate(known):
            layers = range(starts[s], starts[s + 1])
            popular = self.popularity(layers)
            experts = divide_experts(*self.expert_costs(structure.ranks[0][s], structure.size, popular, caps[s]))
            if experts is None:
                return None
            shapes.append((one.rows, experts[0], (starts[s], starts[s + 1])))
        pipelines = tuple(
            Pipeline(structure.size, self.batch // len(structure.ranks) // structure.size, tuple(
                self._stage(ranks, structure.tp, *shape, recompute, s == 0, s == structure.stages - 1)
                for s, (ranks, shape) in enumerate(zip(stages, shapes, strict=True))
            ))
            for stages in structure.ranks
        )  # fmt: skip
        plan = Plan(self.costs.seq_length, self.batch, self.space.schedules[0], pipelines)
        return with_islands_where_quick(with_dtypes(plan, self.costs), self.model, self.cluster)

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
        chips = {self.cluster.ranks[r].chip for r in ranks}
        members = tuple(ExpertMember((r,), e, (1,)) for r, e in zip(ranks, experts, strict=True))
        return Stage(
            (layers,), tuple(units), embed, head, Recompute(recompute), chips.pop() if len(chips) == 1 else None,
            experts=(ExpertGroup(members),) if len(ranks) > 1 else (),
        )  # fmt: skip

    def text(self, structure: _Structure, plan: Plan) -> str:
        """Text such as ``2 x (m 8, b 4) H100 + A100 tp1 rows 3,1 experts 6,2 [16]``."""
        pipeline, parts = plan.pipelines[0], []
        for stage in pipeline.stages:
            chips = [self.cluster.ranks[u.ranks[0]].chip for u in stage.units]
            names = " + ".join(f"{chips.count(c)} {c}" if len(chips) > 1 else c for c in dict.fromkeys(chips))
            rows = f" rows {','.join(str(u.sequences[1] - u.sequences[0]) for u in stage.units)}"
            counts = [str(m.experts[1] - m.experts[0]) for g in stage.experts for m in g.members]
            more = "" if stage.recompute.kind == "none" else f" recompute {stage.recompute.kind}"
            experts = f" experts {','.join(counts)}" if counts else ""
            more_than_once = len(replicated_experts(stage))
            experts += f" ({more_than_once} replicated)" if more_than_once else ""
            tp = f" tp{structure.tp}" if structure.tp > 1 else ""
            parts.append(f"{names}{tp}{rows if len(chips) > 1 else ''}{experts} [{stage.num_layers}]{more}")
        head = f"{len(plan.pipelines)} x (m {pipeline.num_micro_batches}, b {pipeline.micro_batch_size})"
        return f"{head} {' > '.join(parts)}"


def _together(parts: Sequence[list[list[Ranks]]], copies: int) -> Iterator[tuple[tuple[Ranks, ...], ...]]:
    """Ranks by pipeline and stage where every stage has chips of all groups."""
    flat = [[tuple(r for node in part[p] for r in node) for p in range(copies)] for part in parts]
    for cuts in CUTS if len(parts) > 1 else ():
        if all(len(row[0]) % cuts == 0 for row in flat):
            yield tuple(
                tuple(
                    tuple(r for row in flat for r in row[p][i * len(row[p]) // cuts : (i + 1) * len(row[p]) // cuts])
                    for i in range(cuts)
                )
                for p in range(copies)
            )


def with_equal_experts(plan: Plan, num_experts: int) -> Plan:
    """The plan with as many experts on every member of each group, as nearly as they divide."""

    def group(g: ExpertGroup) -> ExpertGroup:
        n = len(g.members)
        ends = [round(i * num_experts / n) for i in range(n + 1)]
        order = sorted(range(n), key=lambda i: g.members[i].experts)
        members = list(g.members)
        for at, i in enumerate(order):
            members[i] = replace(members[i], experts=(ends[at], ends[at + 1]) if ends[at] < ends[at + 1] else (0, 0))
        return ExpertGroup(tuple(members))

    pipelines = tuple(
        replace(p, stages=tuple(replace(s, experts=tuple(map(group, s.experts))) for s in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)
