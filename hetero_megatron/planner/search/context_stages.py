"""Plans whose stages are context groups: the search's part for sequences that are long for one chip.

Symmetry first: a *structure* says into how many equal pipelines the chips go, which groups of chips the stages of one
take, and how many ranks a context member has; equal stages of all pipelines get one layout. Structures are tried in the
order of a lower bound on their time; the CP x HP scheduler divides tokens and heads of each stage (cached by chip
counts), the best few become plans, and ``predict`` judges them as it judges all others.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, Stage, validate
from hetero_megatron.plan.canonical import KeyValues, Recompute, Unit
from hetero_megatron.plan.context import nested_zigzag
from hetero_megatron.plan.fields import first_layers
from hetero_megatron.plan.islands import with_islands_where_quick
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.lower_bound import speed_bound
from hetero_megatron.planner.context.memory import member_limits
from hetero_megatron.planner.context.problem import ContextLayout, ContextOptions, ContextProblem
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.link_model import LinkModel
from hetero_megatron.planner.simulate.memory_report import plan_activations
from hetero_megatron.planner.simulate.ring_attention import ContextSeconds
from hetero_megatron.planner.simulate.step import Prediction, predict
from hetero_megatron.planner.template.device_pool import DeviceGroup, DevicePool
from hetero_megatron.planner.template.plan_template import in_flight
from hetero_megatron.planner.template.search_space import SearchSpace, tp_degrees
from hetero_megatron.planner.time_budget import TimeBudget
from hetero_megatron.spec import ModelSpec

MOST_SCHEDULED, MOST_PREDICTED = 24, 3  # structures
CUTS = (1, 2, 4, 8)  # equal stages that the chips of one kind form
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ContextStructure:
    """``ranks[p][s]``: of stage s of pipeline p, in corresponding order; ``tp``: ranks of a context member."""

    ranks: tuple[tuple[Ranks, ...], ...]
    tp: int

    @property
    def stages(self) -> int:
        return len(self.ranks[0])


@dataclass(frozen=True)
class ContextPlan:
    """A plan that was predicted; ``text`` says what it is."""

    plan: Plan
    prediction: Prediction
    text: str


@dataclass
class ContextStagesFound:
    """Plans with context groups that fit, best first; ``why``: what was tried, or why nothing was."""

    plans: list[ContextPlan]
    why: str
    tried: int = 0


class ContextStages:
    """Context plans of one model on one pool of chips."""

    def __init__(
        self, model: ModelSpec, cluster: Cluster, pool: DevicePool, costs: CostModel, batch: int, space: SearchSpace
    ) -> None:
        self.model, self.cluster, self.pool, self.costs = model, cluster, pool, costs
        self.batch, self.space = batch, space
        self._known: dict[object, tuple[ContextProblem, ContextLayout, float] | None] = {}
        self._bounds: dict[object, tuple[float, float]] = {}

    def on(self, pool: DevicePool) -> ContextStages:
        """The same on other chips of the cluster; layouts that are known stay known."""
        other = copy.copy(self)
        other.pool = pool
        return other

    def run(self, best: float, watch: TimeBudget | None = None) -> ContextStagesFound:
        """Args:
        best: seconds of a step that a plan must beat to be of interest (inf: any that fits).
        watch: when it is over, no further structure is tried.
        """
        watch = watch or TimeBudget()
        if self.space.micro_batch_sizes is not None and 1 not in self.space.micro_batch_sizes:
            return ContextStagesFound([], "not tried: its micro-batches have one sequence")
        rows = [(self.bound(x), i, x) for i, x in enumerate(self.structures())]
        rows.sort(key=lambda row: row[:2])
        found: list[tuple[float, int, Plan, str]] = []
        tried, ended = 0, False
        with watch.catching():
            for bound, i, structure in rows:
                known = min([best, *(row[0] for row in found)])
                ended = bound >= known or tried >= MOST_SCHEDULED
                if ended or (known < math.inf and watch.over()):
                    break
                tried += 1
                made = self.make(structure)
                if made is not None:
                    found.append((made[0], i, made[1], made[2]))
            else:
                ended = True
        found.sort(key=lambda row: row[:2])
        plans: list[ContextPlan] = []
        for _, _, plan, text in found[:MOST_PREDICTED]:
            if (plans or best < math.inf) and watch.interrupted:
                break
            made_plan = watch.finish(partial(self.judge, plan, text))
            plans += [made_plan] if made_plan is not None else []
        plans.sort(key=lambda p: p.prediction.step_seconds)
        why = f"{tried} of {len(rows)} structures tried"
        if not plans and tried:
            why += "; none of those fits into memory"
        if not ended:
            why += "; cut short"
        elif tried < min(len(rows), MOST_SCHEDULED):
            why += "; the others cannot be faster at these speeds"
        return ContextStagesFound(plans, why, tried)

    def structures(self) -> Iterator[ContextStructure]:
        """Sets of chip groups in one stage together, or each as stages of its own, for every number of pipelines."""
        groups = range(len(self.pool.groups))
        few = len(self.pool.groups) <= 3
        sets = [c for n in groups for c in itertools.combinations(groups, n + 1)] if few else [tuple(groups)]
        seen: set[ContextStructure] = set()
        for chosen in sets:
            orders = itertools.permutations(chosen) if few else iter([chosen])
            for order in orders:
                for copies in range(1, min(self.batch, max(self.pool.counts)) + 1):
                    if self.batch % copies:
                        continue
                    parts = [_divide(self.pool.groups[g], copies) for g in order]
                    if any(p is None for p in parts):
                        continue
                    together = list(order) == sorted(order)  # one stage of all: its order says nothing
                    for ranks in _stagings([p for p in parts if p is not None], copies, together):
                        for tp in self._degrees(ranks):
                            one = ContextStructure(ranks, tp)
                            if one not in seen and 1 <= one.stages <= self.model.num_layers and self._joined(one):
                                seen.add(one)
                                yield one

    def _joined(self, structure: ContextStructure) -> bool:
        """Whether a communication library joins the ranks of every stage."""
        library = self.cluster.library_of
        return all(len({library(r) for r in ranks}) == 1 for stages in structure.ranks for ranks in stages)

    def _degrees(self, ranks: tuple[tuple[Ranks, ...], ...]) -> Iterator[int]:
        """Members' sizes that divide the ranks of every node of every stage."""
        sizes = set()
        for stage in ranks[0]:
            nodes: dict[str, int] = {}
            for rank in stage:
                nodes[self.cluster.ranks[rank].node] = nodes.get(self.cluster.ranks[rank].node, 0) + 1
            sizes |= set(nodes.values())
        used = {rank for stage in ranks[0] for rank in stage}
        allowed = [
            set(tp_degrees(self.pool, g, self.model, self.space, False))
            for g, group in enumerate(self.pool.groups)
            if any(rank in used for node in group.ranks for rank in node)
        ]
        for tp in (1, 2, 4, 8):
            if all(size % tp == 0 for size in sizes) and all(tp in a for a in allowed):
                yield tp

    def bound(self, structure: ContextStructure) -> float:
        """Seconds that no layout of it is below, by the speeds of its members and its layers per stage."""
        layers = self.layers(structure)
        last = structure.stages - 1
        times = []
        for s, count in enumerate(layers):
            per_layer, head = self._speeds(structure, s)
            times.append(count * per_layer + (head if s == last else 0.0))
        rounds = self.batch // len(structure.ranks)
        return (rounds - 1) * max(times) + sum(times)

    def _speeds(self, structure: ContextStructure, s: int) -> tuple[float, float]:
        """(seconds of one layer, of the head) of a stage by its members' speeds alone."""
        key = (self._key(structure.ranks[0][s]), structure.tp)
        if key not in self._bounds:
            options = ContextOptions(layers=1, embed=False, head=False, recompute="none")
            plain = speed_bound(self.problem(structure, s, options))
            whole = speed_bound(self.problem(structure, s, replace(options, head=True)))
            self._bounds[key] = (plain, whole - plain)
        return self._bounds[key]

    def layers(self, structure: ContextStructure) -> list[int]:
        """Layers per stage that make the slowest stage fastest, one each at least."""
        speeds = [self._speeds(structure, s) for s in range(structure.stages)]
        counts = [1] * structure.stages
        head = [h if s == structure.stages - 1 else 0.0 for s, (_, h) in enumerate(speeds)]
        for _ in range(self.model.num_layers - structure.stages):
            s = min(range(structure.stages), key=lambda s: ((counts[s] + 1) * speeds[s][0] + head[s], s))
            counts[s] += 1
        return counts

    def problem(self, structure: ContextStructure, s: int, options: ContextOptions) -> ContextProblem:
        found = problem_from_cluster(
            self.model, self.cluster, self.costs.seq_length, structure.ranks[0][s], structure.tp, self.costs.dtype,
            options, self.costs.rates, margin=self.costs.options.margin,
        )  # fmt: skip
        return found

    def _key(self, ranks: Ranks) -> tuple[object, ...]:
        """Equal for stages of equal chips in equal nodes."""
        nodes: dict[str, int] = {}
        places = [self.cluster.ranks[r] for r in ranks]
        return tuple((p.group, nodes.setdefault(p.node, len(nodes))) for p in places)

    def schedule(
        self, structure: ContextStructure, s: int, layers: int
    ) -> tuple[ContextProblem, ContextLayout, float] | None:
        """The layout of a stage by the fastest recompute that fits; None: none does."""
        pipelines, last = len(structure.ranks), structure.stages - 1
        alive = in_flight("1f1b", structure.stages, self.batch // pipelines)[s]
        kinds = ("none", "full") if self.space.recompute is None else (self.space.recompute,)
        for recompute in kinds:
            chips = self._key(structure.ranks[0][s])
            key = (chips, structure.tp, layers, s == 0, s == last, alive, recompute, pipelines)
            if key not in self._known:
                options = ContextOptions(
                    layers=layers, embed=s == 0, head=s == last, replicas=pipelines, recompute=recompute,
                    in_flight=alive,
                )  # fmt: skip
                self._known[key] = self._schedule(self.problem(structure, s, options))
            found = self._known[key]
            if found is not None:
                return found
        return None

    @staticmethod
    def _schedule(problem: ContextProblem) -> tuple[ContextProblem, ContextLayout, float] | None:
        if member_limits(problem).min() < 0:
            return None
        try:
            choice = schedule_context(problem)
        except UserError:
            return None
        return problem, choice.layout, choice.seconds

    def make(self, structure: ContextStructure) -> tuple[float, Plan, str] | None:
        """(seconds by closed form, plan, what it is); None where a stage does not fit."""
        rounds, start = self.batch // len(structure.ranks), 0
        stages: list[list[Stage]] = [[] for _ in structure.ranks]
        times, words = [], []
        for s, layers in enumerate(self.layers(structure)):
            found = self.schedule(structure, s, layers)
            if found is None:
                return None
            problem, layout, seconds = found
            times.append(seconds)
            words.append(_describe(self.cluster, problem, layout, layers))
            known = [r for member in problem.members for r in member.ranks]  # perhaps of another stage of equal chips
            for p, ranks in enumerate(structure.ranks):
                new = dict(zip(known, ranks[s], strict=True))
                stages[p].append(_stage(problem, layout, new, start, s, structure.stages, self.cluster))
            start += layers
        pipelines = tuple(Pipeline(1, rounds, tuple(row)) for row in stages)
        text = f"{len(pipelines)} x (m {rounds}, b 1) " + " > ".join(words)
        return (rounds - 1) * max(times) + sum(times), Plan(self.costs.seq_length, self.batch, "1f1b", pipelines), text

    def judge(self, plan: Plan, text: str) -> ContextPlan | None:
        """Predicted exactly, with the block size that is best by its timed rounds, and with no more layers recomputed
        than memory asks for; None: over memory."""
        plan = with_islands_where_quick(plan, self.model, self.cluster)
        validate(plan, self.model, self.cluster, dtype=self.costs.dtype)
        found = self._predict(plan)
        for change in (self._blocks, self._recompute_less):
            other = change(plan, found)
            if other is not None:
                again = self._predict(other)
                if not again.over and (found.over or again.step_seconds < found.step_seconds):
                    plan, found = other, again
        return None if found.over else ContextPlan(plan, found, text)

    def _predict(self, plan: Plan) -> Prediction:
        return predict(plan, self.model, self.cluster, self.costs.dtype, self.costs)

    def _recompute_less(self, plan: Plan, found: Prediction) -> Plan | None:
        """Full recompute of the first layers of a stage only, as few as fit."""
        if self.space.recompute is not None or found.over:
            return None
        others = {r: replace(m, activations=0) for r, m in found.memory.items()}
        for s in range(len(plan.pipelines[0].stages)):
            layers = plan.pipelines[0].stages[s].num_layers
            if plan.pipelines[0].stages[s].recompute.kind != "full":
                continue
            low, high = 0, layers  # high fits
            while low < high:
                count = (low + high) // 2
                trial = _with_first(plan, s, count)
                needs = plan_activations(trial, self.model, self.costs.item)
                fits = all(
                    replace(others[r], activations=m.activations).total <= found.limits[r] for r, m in needs.items()
                )
                low, high = (low, count) if fits else (count + 1, high)
            plan = _with_first(plan, s, high)
        return plan

    def _blocks(self, plan: Plan, _: Prediction) -> Plan | None:
        """The plan with the best of some block sizes in each stage with a ring; None: they are best already."""
        chosen: list[KeyValues | None] = []
        for stage in plan.pipelines[0].stages:
            chosen.append(stage.kv)
            if stage.kv is None or stage.kv.transport != "ring" or len({u.group for u in stage.units}) > 16:
                continue
            best = math.inf
            totals = sorted({sum(u.num_tokens for u in stage.units if u.group == g) for g in _groups(stage)} - {0})
            for block in sorted({stage.kv.block, *(-(-n // k) for n in (totals[0], totals[-1]) for k in (1, 2, 4, 8))}):
                trial = replace(stage, kv=KeyValues("ring", block))
                one = Plan(plan.seq_length, plan.global_batch_size, plan.schedule, ())
                prices = ContextSeconds(one, self.costs, LinkModel(self.costs.rates))
                seconds = sum(prices.layer(trial))
                if seconds < best * (1 - 1e-9):
                    best, chosen[-1] = seconds, trial.kv
        pipelines = tuple(
            replace(p, stages=tuple(replace(s, kv=kv) for s, kv in zip(p.stages, chosen, strict=True)))
            for p in plan.pipelines
        )
        return None if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)


def _with_first(plan: Plan, s: int, count: int) -> Plan:
    """The plan with ``count`` layers of stage ``s`` of every pipeline recomputed whole."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = list(pipeline.stages)
        stages[s] = replace(stages[s], recompute=first_layers(count, stages[s].num_layers))
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def _groups(stage: Stage) -> set[int]:
    return {unit.group for unit in stage.units}


def _divide(group: DeviceGroup, copies: int) -> list[list[Ranks]] | None:
    """The chips of a group for each of ``copies`` pipelines, by node; None where they do not divide evenly."""
    if group.nodes % copies == 0:
        each = group.nodes // copies
        return [list(group.ranks[i * each : (i + 1) * each]) for i in range(copies)]
    if copies % group.nodes or group.per_node % (copies // group.nodes):
        return None
    size = group.per_node // (copies // group.nodes)
    return [[node[i : i + size]] for node in group.ranks for i in range(0, group.per_node, size)]


def _stagings(
    parts: Sequence[list[list[Ranks]]], copies: int, together: bool
) -> Iterator[tuple[tuple[Ranks, ...], ...]]:
    """Ranks by pipeline and stage: all groups in one stage, or each cut into the same number of stages."""
    if len(parts) > 1 and together:
        yield tuple((tuple(r for part in parts for node in part[p] for r in node),) for p in range(copies))
    for cuts in CUTS:
        rows: list[tuple[Ranks, ...]] = []
        for p in range(copies):
            row: list[Ranks] = []
            for part in parts:
                flat = [rank for node in part[p] for rank in node]
                if len(flat) % cuts:
                    return
                each = len(flat) // cuts
                row += [tuple(flat[i * each : (i + 1) * each]) for i in range(cuts)]
            rows.append(tuple(row))
        yield tuple(rows)


def _stage(
    problem: ContextProblem,
    layout: ContextLayout,
    new: dict[int, int],
    start: int,
    s: int,
    count: int,
    cluster: Cluster,
) -> Stage:
    """A stage on the ranks ``new[rank of the problem]``."""
    units = []
    tokens = nested_zigzag([group.tokens for group in layout.groups])
    for g, group in enumerate(layout.groups):
        first = 0
        for m, owned, heads in zip(group.members, tokens[g], group.heads, strict=True):
            ranks = tuple(new[r] for r in problem.members[m].ranks)
            units.append(Unit(ranks, (1,) * len(ranks), (0, 1), owned, (first, first + heads), group=g))
            first += heads
    chips = {cluster.ranks[r].chip for u in units for r in u.ranks}
    kv = KeyValues(layout.transport, layout.block) if len(layout.groups) > 1 else None
    return Stage(
        ((start, start + problem.layers),), tuple(units), s == 0, s == count - 1,
        Recompute(problem.options.recompute), chips.pop() if len(chips) == 1 else None, kv=kv,
    )  # fmt: skip


def _describe(cluster: Cluster, problem: ContextProblem, layout: ContextLayout, layers: int) -> str:
    """``CP [4 H100-SXM | 2 A100-80-SXM] ring [20]``."""
    tp = len(problem.members[0].ranks)
    rows: list[list[object]] = []
    for group in layout.groups:
        kinds = [cluster.ranks[problem.members[m].ranks[0]].chip for m in group.members]
        text = " + ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
        if rows and rows[-1][0] == text:
            rows[-1][1] = int(str(rows[-1][1])) + 1
        else:
            rows.append([text, 1])
    names = " | ".join((f"{n} x ({text})" if n != 1 else str(text)) for text, n in rows)
    members = f"members of tp{tp}, " if tp > 1 else ""
    if len(problem.members) == 1:
        return f"{names}{f' tp{tp}' if tp > 1 else ''} [{layers}]"
    return f"context ({members}{names}; {layout.transport}) [{layers}]"
