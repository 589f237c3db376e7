"""Proposer of plans whose stages are context groups, for sequences that are long for one chip.

The context x head scheduler divides tokens and heads of each stage (cached by chip counts). A structure is simulated
where the closed form of its layouts is below the best plan so far.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.balance import speed_bound
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.memory import member_limits
from hetero_megatron.planner.context.problem import ContextLayout, ContextOptions, ContextProblem, plan_stage
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget, why_no_context
from hetero_megatron.planner.search.chip_structures import ChipStructure
from hetero_megatron.planner.search.concrete_search import StagedSearch, StageSpeed
from hetero_megatron.planner.search.incumbent import Incumbent, SimulatedPlan
from hetero_megatron.planner.template.plan_template import in_flight
from hetero_megatron.plans import Pipeline, Plan, Stage
from hetero_megatron.plans.canonical import KeyValues, Recompute
from hetero_megatron.plans.fields import first_layers
from hetero_megatron.plans.memory.of_plan import MemoryBytes, plan_activations
from hetero_megatron.predictor.simulate.ring_attention import ContextSeconds
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.spec.flops import linear_layers

_Layout = tuple[ContextProblem, ContextLayout, float]  # a stage's problem, layout and seconds


class ContextStages:
    """Proposes plans with context groups. Layouts are cached across calls.

    Attributes:
        why: the outcome, or why context groups were not tried.
        tried: whether they were tried.
    """

    def __init__(self) -> None:
        self.why, self.tried = "", False
        self._layouts: dict[object, _Layout | None] = {}
        self._speeds: dict[object, StageSpeed] = {}

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        """Try context groups if the space asks for them or nothing fits otherwise; ``incumbent.plans`` holds the plans
        without."""
        plans, sizes = incumbent.plans, problem.space.micro_batch_sizes
        self.why = why_no_context(problem.space, problem.seq_length, bool(plans))
        if not self.why and linear_layers(problem.model) == 1:
            self.why = "not tried: no layer has attention, whose heads and keys they divide"
        if not self.why and sizes is not None and 1 not in sizes:
            self.why = "not tried: its micro-batches have one sequence"
        if not self.why and plans and incumbent.budget is not None and incumbent.budget.over():
            self.why = "not tried: the search was cut short"
        if self.why:
            return True
        self.tried, best = True, plans[0].step_seconds if plans else math.inf
        outcome = self._search(problem, incumbent.scorer).propose_to(incumbent)
        self.why = str(outcome)
        if outcome.plans:
            faster = f", {best / outcome.plans[0].step_seconds:.2f} x as fast as the best without"
            self.why += "; chosen" + (faster if best < math.inf else ", because nothing fits without")
        elif outcome.tried:
            self.why += "; none fits into memory" if best == math.inf else "; none is faster than the plan without"
        return outcome.ended

    def search(self, problem: PlanningProblem, scorer: TemplateScorer, best: float) -> SimulatedPlan | None:
        """The best plan with context groups that takes less than ``best`` seconds per step."""
        outcome = self._search(problem, scorer).run(best, TimeBudget())
        return outcome.plans[0] if outcome.plans else None

    def _search(self, problem: PlanningProblem, scorer: TemplateScorer) -> _ContextSearch:
        return _ContextSearch(problem.with_space(micro_batch_sizes=(1,)), scorer, self._layouts, self._speeds)


class _ContextSearch(StagedSearch):
    """One search. ``layouts`` (of stages) and ``speeds`` are caches that it extends."""

    most = 24

    def __init__(
        self,
        problem: PlanningProblem,
        scorer: TemplateScorer,
        layouts: dict[object, _Layout | None],
        speeds: dict[object, StageSpeed],
    ) -> None:
        super().__init__(problem, scorer)
        self._layouts, self._speeds = layouts, speeds

    def speed(self, structure: ChipStructure, s: int) -> StageSpeed:
        """From its members' speeds alone."""
        key = (self.alike(structure.ranks[0][s]), structure.tp, s == structure.stages - 1)
        if key not in self._speeds:
            options = ContextOptions(layers=1, embed=False, head=False, recompute="none")
            without_head, with_head = (
                speed_bound(self._stage_problem(structure, s, replace(options, head=head))) for head in (False, key[-1])
            )
            self._speeds[key] = StageSpeed(without_head, with_head - without_head, without_head)
        return self._speeds[key]

    def _stage_problem(self, structure: ChipStructure, s: int, options: ContextOptions) -> ContextProblem:
        return problem_from_cluster(
            self.model, self.cluster, self.costs.seq_length, structure.ranks[0][s], structure.tp, self.costs.dtype,
            options, self.costs.rates, margin=self.costs.options.margin,
        )  # fmt: skip

    def _schedule(self, structure: ChipStructure, s: int, layers: int) -> _Layout | None:
        """The layout of a stage with the fastest recompute that fits; None: none fits."""
        last, chips = structure.stages - 1, self.alike(structure.ranks[0][s])
        alive = in_flight("1f1b", structure.stages, self.rounds(structure))[s]
        for kind in self.recompute_kinds:
            recompute = "none" if kind == "elementwise" else kind  # which is settled when the layout is
            key = (chips, structure.tp, layers, s == 0, s == last, alive, recompute, structure.pipelines)
            if key not in self._layouts:
                options = ContextOptions(
                    layers=layers, embed=s == 0, head=s == last, replicas=structure.pipelines, recompute=recompute,
                    in_flight=alive,
                )  # fmt: skip
                self._layouts[key] = _scheduled(self._stage_problem(structure, s, options))
            scheduled = self._layouts[key]
            if scheduled is not None:
                return scheduled
        return None

    def best_plan(self, structure: ChipStructure, best: float) -> SimulatedPlan | None:
        """With the ring block size that is fastest and no more layers recomputed than needed."""
        candidate = self._plan(structure)
        if candidate is None or candidate[0] >= best:
            return None
        _, plan, text = candidate
        plan = self.checked(plan)
        prediction = self.predict(plan)
        for change in (self._blocks, self._recompute_less, self._elementwise):
            changed = change(plan, prediction)
            if changed is not None:
                trial = self.predict(changed)
                if not trial.over and (prediction.over or trial.step_seconds < prediction.step_seconds):
                    plan, prediction = changed, trial
        return None if prediction.over or prediction.step_seconds >= best else self.simulated(plan, prediction, text)

    def _plan(self, structure: ChipStructure) -> tuple[float, Plan, str] | None:
        """(closed-form seconds, plan, description); None where a stage does not fit."""
        start, times, words = 0, list[float](), list[str]()
        stages: list[list[Stage]] = [[] for _ in structure.ranks]
        for s, layers in enumerate(self.layers(structure)):
            scheduled = self._schedule(structure, s, layers)
            if scheduled is None:
                return None
            problem, layout, seconds = scheduled
            times.append(seconds)
            words.append(_describe(self.cluster, problem, layout, layers))
            scheduled_ranks = [r for member in problem.members for r in member.ranks]  # may be those of an equal stage
            for p, ranks in enumerate(structure.ranks):
                rank_of = dict(zip(scheduled_ranks, ranks[s], strict=True))
                stage = plan_stage(problem, layout, start, rank_of)
                if self.space.recompute == "elementwise" and layers:
                    stage = replace(stage, recompute=Recompute("elementwise"))
                stages[p].append(replace(stage, chip=self.chip(ranks[s])))
            start += layers
        rounds = self.rounds(structure)
        pipelines = tuple(Pipeline(1, rounds, tuple(row)) for row in stages)
        plan = Plan(self.costs.seq_length, self.batch, "1f1b", pipelines)
        text = f"{len(pipelines)} x (m {rounds}, b 1) " + " > ".join(words)
        return self.step_seconds(structure, times), plan, text

    def _recompute_less(self, plan: Plan, prediction: Prediction) -> Plan | None:
        """Recompute only as many first layers of each stage as memory requires; None: nothing to change."""
        if self.space.recompute is not None or prediction.over:
            return None
        other_memory = {r: replace(m, activations=0) for r, m in prediction.memory.items()}
        for s in range(len(plan.pipelines[0].stages)):
            layers = plan.pipelines[0].stages[s].num_layers
            if plan.pipelines[0].stages[s].recompute.kind != "full":
                continue
            low, high = 0, layers  # high fits
            while low < high:
                count = (low + high) // 2
                fits = self._fits(_with(plan, s, first_layers(count, layers)), other_memory, prediction)
                low, high = (low, count) if fits else (count + 1, high)
            plan = _with(plan, s, first_layers(high, layers))
        return plan

    def _elementwise(self, plan: Plan, prediction: Prediction) -> Plan | None:
        """Recompute only elementwise results where that suffices, instead of layers; None: nothing to change."""
        if self.space.recompute is not None or prediction.over:
            return None
        changed, other_memory = plan, {r: replace(m, activations=0) for r, m in prediction.memory.items()}
        for s, stage in enumerate(plan.pipelines[0].stages):
            trial = _with(changed, s, Recompute("elementwise"))
            if stage.recomputed and self._fits(trial, other_memory, prediction):
                changed = trial
        return None if changed is plan else changed

    def _fits(self, plan: Plan, others: dict[int, MemoryBytes], prediction: Prediction) -> bool:
        """``others``: by rank, all but activations."""
        needs = plan_activations(plan, self.model, self.costs.item, fp8=self.costs.options.fp8)
        limits = prediction.limits
        return all(replace(others[r], activations=m.activations).total <= limits[r] for r, m in needs.items())

    def _blocks(self, plan: Plan, _: Prediction) -> Plan | None:
        """The plan with the fastest of some block sizes in each ring stage; None: unchanged."""
        block_sizes = [self._block(stage) for stage in plan.pipelines[0].stages]
        pipelines = tuple(
            replace(p, stages=tuple(replace(s, kv=kv) for s, kv in zip(p.stages, block_sizes, strict=True)))
            for p in plan.pipelines
        )
        return None if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)

    def _block(self, stage: Stage) -> KeyValues | None:
        groups = {unit.group for unit in stage.units}
        if stage.kv is None or stage.kv.transport != "ring" or len(groups) > 16:
            return stage.kv
        totals = sorted({sum(u.num_tokens for u in stage.units if u.group == g) for g in groups} - {0})
        blocks = sorted({stage.kv.block, *(-(-n // k) for n in (totals[0], totals[-1]) for k in (1, 2, 4, 8))})
        trials = [replace(stage, kv=KeyValues("ring", block)) for block in blocks]
        return min(trials, key=lambda trial: sum(ContextSeconds(self.costs).layer(trial))).kv


def _scheduled(problem: ContextProblem) -> _Layout | None:
    if member_limits(problem).min() < 0:
        return None
    try:
        choice = schedule_context(problem)
    except UserError:
        return None
    return problem, choice.layout, choice.seconds


def _with(plan: Plan, s: int, recompute: Recompute) -> Plan:
    """The plan with another recompute of stage ``s`` of every pipeline."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = list(pipeline.stages)
        stages[s] = replace(stages[s], recompute=recompute)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def _describe(cluster: Cluster, problem: ContextProblem, layout: ContextLayout, layers: int) -> str:
    """Text such as ``context (4 H100-SXM | 2 A100-80-SXM; ring) [20]``."""
    tp = len(problem.members[0].ranks)
    texts = []
    for group in layout.groups:
        kinds = [cluster.ranks[problem.members[m].ranks[0]].chip for m in group.members]
        texts.append(" + ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds)))
    runs = [(text, len(list(equal_texts))) for text, equal_texts in itertools.groupby(texts)]
    names = " | ".join(f"{n} x ({text})" if n > 1 else text for text, n in runs)
    members = f"members of tp{tp}, " if tp > 1 else ""
    if len(problem.members) == 1:
        return f"{names}{f' tp{tp}' if tp > 1 else ''} [{layers}]"
    return f"context ({members}{names}; {layout.transport}) [{layers}]"
