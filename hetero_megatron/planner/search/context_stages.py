"""Proposer of plans whose stages are context groups, for sequences that are long for one chip.

Structures (:mod:`context_structures`) are tried in the order of a lower bound on their time. The context x head
scheduler divides tokens and heads of each stage (cached by chip counts); the best few become plans that the step
simulator times.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Pipeline, Plan, Stage, supports, validate
from hetero_megatron.plan.canonical import KeyValues
from hetero_megatron.plan.fields import first_layers
from hetero_megatron.plan.islands import with_islands_where_quick
from hetero_megatron.plan.memory.of_plan import plan_activations
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.io import plan_stage
from hetero_megatron.planner.context.lower_bound import speed_bound
from hetero_megatron.planner.context.memory import member_limits
from hetero_megatron.planner.context.problem import ContextLayout, ContextOptions, ContextProblem
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.batch_partition import divide_units
from hetero_megatron.planner.search.context_structures import ContextStructure, Ranks, structures
from hetero_megatron.planner.search.incumbent import Incumbent, JudgedPlan, judged_plan
from hetero_megatron.planner.simulate.ring_attention import ContextSeconds
from hetero_megatron.planner.simulate.stage_dtypes import with_dtypes
from hetero_megatron.planner.simulate.step import Prediction, predict
from hetero_megatron.planner.template.plan_template import in_flight
from hetero_megatron.planner.template.search_space import why_no_context
from hetero_megatron.planner.time_budget import TimeBudget

MOST_SCHEDULED, MOST_PREDICTED = 24, 3  # most structures that are scheduled, and simulated
_Layout = tuple[ContextProblem, ContextLayout, float]  # a stage's problem, layout and seconds


class ContextStages:
    """Proposes plans with context groups. Layouts are cached across calls.

    Attributes:
        why: the outcome, or why context groups were not tried.
        tried: whether they were tried.
    """

    def __init__(self) -> None:
        self.why, self.tried = "", False
        self._known: dict[object, _Layout | None] = {}
        self._bounds: dict[object, tuple[float, float]] = {}

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Try context groups if the space asks for them or nothing fits otherwise; ``incumbent.plans`` holds the plans
        without."""
        plans, budget = incumbent.plans, incumbent.budget or TimeBudget()
        why_not = "not supported"
        if supports("context"):
            why_not = why_no_context(problem.space, problem.seq_length, bool(plans))
        if not why_not and plans and budget.over():
            why_not = "not tried: the search was cut short"
        if why_not:
            self.why = why_not
            return True
        self.tried, self.why = True, "cut short"
        best = plans[0].step_seconds if plans else math.inf
        found: list[JudgedPlan] = []
        with budget.catching():
            found, self.why = self.search(problem, incumbent.scorer, best, budget)
        for plan in found:
            incumbent.take_plan(plan)
        if found and incumbent.plans[0] is found[0]:
            faster = f", {best / found[0].step_seconds:.2f} x as fast as the best without"
            self.why += "; chosen" + (faster if best < math.inf else ", because nothing fits without")
        elif found:
            self.why += f"; the best takes {found[0].step_seconds / best:.2f} x as long as the plan without"
        return not budget.cut

    def search(
        self, problem: PlanningProblem, scorer: TemplateScorer, best: float, budget: TimeBudget | None = None
    ) -> tuple[list[JudgedPlan], str]:
        """(plans with context groups that fit, best first; what was tried).

        Args:
            best: step time (s) to beat; inf: any plan that fits.
            budget: when it is over, no further structure is tried.
        """
        if problem.space.micro_batch_sizes is not None and 1 not in problem.space.micro_batch_sizes:
            self.tried = False
            return [], "not tried: its micro-batches have one sequence"
        return _ContextSearch(problem, scorer, self._known, self._bounds).run(best, budget or TimeBudget())


class _ContextSearch:
    """One search. ``known`` (layouts of stages) and ``bounds`` (their least seconds) are caches that it extends."""

    def __init__(
        self,
        problem: PlanningProblem,
        scorer: TemplateScorer,
        known: dict[object, _Layout | None],
        bounds: dict[object, tuple[float, float]],
    ) -> None:
        self.request, self.scorer, self.costs, self.pool = problem, scorer, scorer.costs, scorer.pool
        self.model, self.cluster, self.space = problem.model, problem.cluster, problem.space
        self.batch, self._known, self._bounds = problem.global_batch_size, known, bounds

    def run(self, best: float, budget: TimeBudget) -> tuple[list[JudgedPlan], str]:
        rows = [(self.bound(x), i, x) for i, x in enumerate(structures(self.request, self.pool))]
        rows.sort(key=lambda row: row[:2])
        found: list[tuple[float, int, Plan, str]] = []
        tried, ended = 0, False
        with budget.catching():
            for bound, i, structure in rows:
                known = min([best, *(row[0] for row in found)])
                ended = bound >= known or tried >= MOST_SCHEDULED
                if ended or (known < math.inf and budget.over()):
                    break
                tried += 1
                made = self.make(structure)
                if made is not None:
                    found.append((made[0], i, made[1], made[2]))
            else:
                ended = True
        found.sort(key=lambda row: row[:2])
        plans: list[JudgedPlan] = []
        for _, _, plan, text in found[:MOST_PREDICTED]:
            if (plans or best < math.inf) and budget.interrupted:
                break
            judged = budget.finish(partial(self.judge, plan, text))
            plans += [judged] if judged is not None else []
        why = f"{tried} of {len(rows)} structures tried"
        if not plans and tried:
            why += "; none of those fits into memory"
        if not ended:
            why += "; cut short"
        elif tried < min(len(rows), MOST_SCHEDULED):
            why += "; the others cannot be faster at these speeds"
        return sorted(plans, key=lambda plan: plan.step_seconds), why

    def bound(self, structure: ContextStructure) -> float:
        """Lower bound (s) on any layout of the structure, from its members' speeds and its layers per stage."""
        layers = self.layers(structure)
        last = structure.stages - 1
        times = []
        for s, count in enumerate(layers):
            per_layer, head = self._speeds(structure, s)
            times.append(count * per_layer + (head if s == last else 0.0))
        rounds = self.batch // len(structure.ranks)
        return (rounds - 1) * max(times) + sum(times)

    def _speeds(self, structure: ContextStructure, s: int) -> tuple[float, float]:
        """(seconds of one layer, of the head) of a stage, from its members' speeds alone."""
        key = (self._key(structure.ranks[0][s]), structure.tp)
        if key not in self._bounds:
            options = ContextOptions(layers=1, embed=False, head=False, recompute="none")
            plain = speed_bound(self.problem(structure, s, options))
            whole = speed_bound(self.problem(structure, s, replace(options, head=True)))
            self._bounds[key] = (plain, whole - plain)
        return self._bounds[key]

    def layers(self, structure: ContextStructure) -> list[int]:
        """Layers per stage (at least one each) that minimise the slowest stage's time."""
        speeds = [self._speeds(structure, s) for s in range(structure.stages)]
        head = [*(0.0 for _ in speeds[1:]), speeds[-1][1]]
        return divide_units(self.model.num_layers, [layer for layer, _ in speeds], head)

    def problem(self, structure: ContextStructure, s: int, options: ContextOptions) -> ContextProblem:
        found = problem_from_cluster(
            self.model, self.cluster, self.costs.seq_length, structure.ranks[0][s], structure.tp, self.costs.dtype,
            options, self.costs.rates, margin=self.costs.options.margin,
        )  # fmt: skip
        return found

    def _key(self, ranks: Ranks) -> tuple[object, ...]:
        nodes: dict[str, int] = {}
        places = [self.cluster.ranks[r] for r in ranks]
        return tuple((p.group, nodes.setdefault(p.node, len(nodes))) for p in places)

    def schedule(self, structure: ContextStructure, s: int, layers: int) -> _Layout | None:
        """The layout of a stage with the fastest recompute that fits; None: none fits."""
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
    def _schedule(problem: ContextProblem) -> _Layout | None:
        if member_limits(problem).min() < 0:
            return None
        try:
            choice = schedule_context(problem)
        except UserError:
            return None
        return problem, choice.layout, choice.seconds

    def make(self, structure: ContextStructure) -> tuple[float, Plan, str] | None:
        """(closed-form seconds, plan, description); None where a stage does not fit."""
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
            known = [r for member in problem.members for r in member.ranks]  # may be those of an equal stage
            for p, ranks in enumerate(structure.ranks):
                new = dict(zip(known, ranks[s], strict=True))
                chips = {self.cluster.ranks[r].chip for r in ranks[s]}
                stage = plan_stage(problem, layout, start, new)
                stages[p].append(replace(stage, chip=chips.pop() if len(chips) == 1 else None))
            start += layers
        pipelines = tuple(Pipeline(1, rounds, tuple(row)) for row in stages)
        text = f"{len(pipelines)} x (m {rounds}, b 1) " + " > ".join(words)
        return (rounds - 1) * max(times) + sum(times), Plan(self.costs.seq_length, self.batch, "1f1b", pipelines), text

    def judge(self, plan: Plan, text: str) -> JudgedPlan | None:
        """The simulated plan, with the ring block size that is fastest and no more layers recomputed than needed; None:
        over memory."""
        plan = with_islands_where_quick(with_dtypes(plan, self.costs), self.model, self.cluster)
        validate(plan, self.model, self.cluster, dtype=self.costs.dtype)
        found = self._predict(plan)
        for change in (self._blocks, self._recompute_less):
            other = change(plan, found)
            if other is not None:
                again = self._predict(other)
                if not again.over and (found.over or again.step_seconds < found.step_seconds):
                    plan, found = other, again
        return None if found.over else judged_plan(self.request, self.scorer, plan, found, text)

    def _predict(self, plan: Plan) -> Prediction:
        return predict(plan, self.model, self.cluster, self.costs.dtype, self.costs)

    def _recompute_less(self, plan: Plan, found: Prediction) -> Plan | None:
        """Recompute only as many first layers of each stage as memory requires; None: nothing to change."""
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
                needs = plan_activations(trial, self.model, self.costs.item, fp8=self.costs.options.fp8)
                fits = all(
                    replace(others[r], activations=m.activations).total <= found.limits[r] for r, m in needs.items()
                )
                low, high = (low, count) if fits else (count + 1, high)
            plan = _with_first(plan, s, high)
        return plan

    def _blocks(self, plan: Plan, _: Prediction) -> Plan | None:
        """The plan with the fastest of some block sizes in each ring stage; None: unchanged."""
        chosen: list[KeyValues | None] = []
        for stage in plan.pipelines[0].stages:
            chosen.append(stage.kv)
            if stage.kv is None or stage.kv.transport != "ring" or len({u.group for u in stage.units}) > 16:
                continue
            best = math.inf
            totals = sorted({sum(u.num_tokens for u in stage.units if u.group == g) for g in _groups(stage)} - {0})
            for block in sorted({stage.kv.block, *(-(-n // k) for n in (totals[0], totals[-1]) for k in (1, 2, 4, 8))}):
                trial = replace(stage, kv=KeyValues("ring", block))
                seconds = sum(ContextSeconds(self.costs).layer(trial))
                if seconds < best * (1 - 1e-9):
                    best, chosen[-1] = seconds, trial.kv
        pipelines = tuple(
            replace(p, stages=tuple(replace(s, kv=kv) for s, kv in zip(p.stages, chosen, strict=True)))
            for p in plan.pipelines
        )
        return None if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)


def _with_first(plan: Plan, s: int, count: int) -> Plan:
    """The plan with the first ``count`` layers of stage ``s`` of every pipeline recomputed."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = list(pipeline.stages)
        stages[s] = replace(stages[s], recompute=first_layers(count, stages[s].num_layers))
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def _groups(stage: Stage) -> set[int]:
    return {unit.group for unit in stage.units}


def _describe(cluster: Cluster, problem: ContextProblem, layout: ContextLayout, layers: int) -> str:
    """Text such as ``context (4 H100-SXM | 2 A100-80-SXM; ring) [20]``."""
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
