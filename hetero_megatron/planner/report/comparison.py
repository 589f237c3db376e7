"""The content of the search report: the plan, baselines, how much better a plan could be, and rejected alternatives."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetero_megatron.cluster.subset import of_type
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import ASSUMPTIONS, LowerBound, work_bound
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute, make_scorer
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.report.experts import ExpertGain, expert_gain
from hetero_megatron.planner.report.rejected import Rejected, fastest_rejected, nearest_rejected
from hetero_megatron.planner.report.roomier import Roomier, roomier
from hetero_megatron.planner.search.driver import SearchResult, search_types_alone
from hetero_megatron.planner.search.incumbent import Progress, SimulatedPlan, simulate_template
from hetero_megatron.planner.search.uniform import UniformPlan, top_uniform_plans, uniform_plans
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, describe
from hetero_megatron.planner.whatif.objective import Deadline
from hetero_megatron.planner.whatif.replan import NodeLoss
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.predictor.report.prediction import Question, format_seconds, question
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import plural


@dataclass(frozen=True)
class Baseline:
    """A plan to compare with; without one, ``tokens_per_second`` is 0 and ``problem`` says why."""

    name: str
    text: str
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    chips: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Variant:
    """Another plan and why it is slower."""

    text: str
    step_seconds: float
    why: str


@dataclass(frozen=True)
class Comparisons:
    """What the report compares the plan with.

    Attributes:
        baselines: the best uniform plan, and each chip type alone where the search did that anyway.
        every: search each chip type alone, predict all good uniform plans, and look at those that do not fit. Takes
            several times as long as the search.
    """

    baselines: bool = True
    every: bool = False


BRIEF = Comparisons(baselines=False)


@dataclass
class Summary:
    """Everything that the report says."""

    result: SearchResult
    model: str
    bound: LowerBound | None = None
    uniform: Baseline | None = None
    alone: list[Baseline] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    unusable: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # chip -> ranks, where it lacks the dtype
    dtype: str = ""
    assumptions: tuple[str, ...] = ()  # of the bound
    left_out: tuple[str, ...] = ()  # nodes outside the cluster that the plan's ranks refer to
    deadline: Deadline | None = None
    skipped: str = ""  # why no chip type is compared alone
    rejected: list[Rejected] = field(default_factory=list)  # uniform plans that would be fast, if they fitted
    losses: list[NodeLoss] = field(default_factory=list)  # plans for the loss of a node, where these were asked for
    experts: ExpertGain | None = None  # where the plan divides experts
    asked: Question | None = None
    activations: tuple[str, ...] = ()  # of those in host memory, or why they are not
    roomier: Roomier | None = None  # where the plan nearly fills a chip
    seconds: float = 0.0  # that the comparisons took

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks that the best plan could have used, and does not."""
        return tuple(sorted(set(self.result.best.idle) - {r for ranks in self.unusable.values() for r in ranks}))

    @property
    def hethub_tokens_per_second(self) -> float | None:
        """HETHUB's bound: tokens per second of each chip type alone, added up; None where no type trains the model."""
        total = sum(b.tokens_per_second for b in self.alone)
        return total or None

    @property
    def speedup_ratio(self) -> float | None:
        """H2's ratio: tokens per second over the sum of what each chip type does alone. Types that cannot train the
        model alone count as 0; the report says so."""
        total = self.hethub_tokens_per_second
        return None if total is None else self.result.best.prediction.tokens_per_second / total


def outline(result: SearchResult, problem: PlanningProblem, deadline: Deadline | None = None) -> Summary:
    """The report without comparisons: the plan, its memory, idle chips.

    Args:
        problem: the searched problem. With an objective other than speed the plan's ranks refer to a part of its
            cluster; the nodes outside it are idle.
        deadline: that of the objective.
    """
    nodes = dict.fromkeys(rank.node for rank in problem.cluster.ranks)
    used_nodes = {rank.node for rank in result.best.cluster.ranks}
    lacking = {c: tuple(r.rank for r in result.best.cluster.ranks if r.chip == c)
               for c, chip in result.best.cluster.chips.items() if problem.dtype not in chip.dtypes}  # fmt: skip
    return Summary(
        result, problem.model.name, dtype=problem.dtype, deadline=deadline,
        unusable={chip: ranks for chip, ranks in lacking.items() if ranks},
        left_out=tuple(name for name in nodes if name not in used_nodes),
        experts=expert_gain(result.best, result.scorer.costs) if problem.model.moe is not None else None,
        asked=question(result.scorer.costs, problem.global_batch_size),
        activations=_activations(result, problem),
    )  # fmt: skip


def _activations(result: SearchResult, problem: PlanningProblem) -> tuple[str, ...]:
    if all(stage.activations is None and stage.recompute.kind == "none" for stage in result.best.plan.stages):
        return ()
    from hetero_megatron.planner.report.activations import activation_lines

    return activation_lines(result.best, problem, result.scorer.costs)


def compare(
    summary: Summary,
    problem: PlanningProblem,
    what: Comparisons,
    budget: TimeBudget,
    progress: Progress | None = None,
) -> None:
    """Add the bound and the comparisons, all for the cluster that the plan's ranks refer to.

    Args:
        budget: that of the search; when it is over, no chip type is searched alone.
        progress: receives a message before each long computation.
    """
    result, started = summary.result, time.monotonic()
    problem = problem.on(result.best.cluster)
    work = work_bound(result.scorer, problem.model, problem.global_batch_size)
    summary.bound, summary.assumptions = LowerBound(work), ASSUMPTIONS
    summary.variants = variants(result, problem)
    chips = [group.chip for group in result.pool.groups]
    summary.roomier = roomier(result, problem, lambda plan: choice_text(plan, chips))
    if what.baselines:
        summary.uniform, summary.rejected = best_uniform(result, problem, what.every)
        # A type that was not searched to its end would look slower than it is.
        if what.every and not search_types_alone(result, problem, budget, progress):
            summary.skipped = "not searched, because the time is up"
        else:
            _compare_types(summary, problem, what.every)
    summary.seconds = time.monotonic() - started


def summarize(
    result: SearchResult,
    problem: PlanningProblem,
    what: Comparisons | None = None,
    deadline: Deadline | None = None,
    budget: TimeBudget | None = None,
) -> Summary:
    """The whole report: :func:`outline` and :func:`compare`."""
    summary = outline(result, problem, deadline)
    budget = budget or TimeBudget(problem.options.time_limit)
    compare(summary, problem, what or Comparisons(), budget)
    return summary


def best_uniform(result: SearchResult, problem: PlanningProblem, every: bool = True) -> tuple[Baseline, list[Rejected]]:
    """(the best plan that Megatron's flags can describe, on all chips of the cluster; some that do not fit). ``every``:
    simulate all good plans by estimate and list plans that do not fit; False: simulate only the best by estimate."""
    best: tuple[float, UniformPlan, Prediction] | None = None
    model, cluster, batch = problem.model, problem.cluster, problem.global_batch_size
    if result.pool.chips < cluster.world_size:
        return Baseline("uniform", "", problem="some chips lack the dtype"), []
    if next(uniform_plans(result.pool, model, batch), None) is None:
        why = f"no equal degrees divide {plural(cluster.world_size, 'chip')}, their nodes and a batch of {batch}"
        return Baseline("uniform", "", problem=why), []
    why, scorer = "no uniform plan fits into memory", result.scorer
    few, over = top_uniform_plans(problem, scorer, 4)
    for uniform, template in few if every else sorted(few, key=lambda row: _estimated(scorer, row[1])):
        try:
            plan = with_dtypes(from_megatron(uniform.flags(problem.seq_length, batch), model), scorer.costs)
            prediction = predict(plan, model, cluster, problem.dtype, scorer.costs)
        except UserError as error:
            why = error.problem
            continue
        if prediction.over:
            over.append((uniform, template))
        elif best is None or prediction.step_seconds < best[0]:
            best = (prediction.step_seconds, uniform, prediction)
            if not every:
                break
    rejected = fastest_rejected(over, problem, scorer) if every else []
    if best is None:
        return Baseline("uniform", "", problem=why), rejected
    name, tokens = best[1].text(), best[2].tokens_per_second
    return Baseline("uniform", name, tokens, best[0], cluster.world_size), rejected


def _estimated(scorer: TemplateScorer, template: PlanTemplate) -> float:
    score = scorer.score(template)
    return math.inf if score is None or score.over > 0 else score.step_seconds


def _compare_types(summary: Summary, problem: PlanningProblem, every: bool) -> None:
    """Add the best plan of each chip type alone at the same global batch (which favours the parts: fewer bubbles), if
    all were searched. With ``every``, ``summary.rejected`` gets the nearest plan of types on which nothing fits."""
    result = summary.result
    names = list(dict.fromkeys(group.chip for group in result.pool.groups))
    if len(names) > 1 and not result.alone.keys() >= set(names):
        summary.skipped = "not searched; --compare does"
        return
    for name in names:
        count = sum(rank.chip == name for rank in problem.cluster.ranks)
        searched = result.alone.get(name, result)
        if isinstance(searched, UserError):
            summary.alone.append(Baseline(name, "", chips=count, problem=searched.problem))
            if every:
                only_type = problem.on(of_type(problem.cluster, name))
                summary.rejected += nearest_rejected(name, only_type, make_scorer(only_type))
            continue
        text = choice_text(searched.best, [g.chip for g in searched.pool.groups])
        tokens, seconds = searched.best.prediction.tokens_per_second, searched.best.step_seconds
        summary.alone.append(Baseline(name, text, tokens, seconds, count))


def text_of(template: PlanTemplate, chips: list[str]) -> str:
    """Text such as ``8 x (m 32, b 1) A100 tp8 [10] > H100 tp2 [8,8,7,7]``, parts joined by `` + ``."""
    parts = [
        f"{p.copies} x (m {p.num_micro_batches}, b {p.shape.micro_batch_size}) {describe(p.shape, chips)}"
        for p in template.parts[:4]
    ]
    return " + ".join(parts) + (" + …" if len(template.parts) > 4 else "")


def choice_text(choice: SimulatedPlan, chips: list[str]) -> str:
    """Description of a plan."""
    return choice.text or text_of(choice.template, chips)


def variants(result: SearchResult, problem: PlanningProblem) -> list[Variant]:
    """Plans near the best one: with one choice undone, and runners-up of other kinds."""
    best, listed, batch = result.best, list[Variant](), problem.global_batch_size
    chips = [g.chip for g in result.pool.groups]
    alike = [] if best.text else [
        ("the same with equal layers per stage", _even_layers(result, best.template, problem.model)),
        ("the same with equal shares of the batch", _even_shares(best.template, batch)),
    ]  # fmt: skip
    listed += [_variant(result, text, template, problem) for text, template in alike if template is not None]
    make_ups = {(best.text, _make_up(best.template))}
    for runner_up in result.others:
        if (runner_up.text, _make_up(runner_up.template)) not in make_ups and len(listed) < 6:
            make_ups.add((runner_up.text, _make_up(runner_up.template)))
            listed.append(Variant(choice_text(runner_up, chips), runner_up.step_seconds, why_slower(best, runner_up)))
    return [v for v in listed if v.step_seconds >= best.step_seconds or v.step_seconds == 0.0]


def _make_up(template: PlanTemplate) -> frozenset[object]:
    return frozenset(
        (tuple((s.group, s.tp, s.dp, s.layers) for s in p.shape.stages), p.copies, template.schedule)
        for p in template.parts
    )


def _variant(result: SearchResult, text: str, template: PlanTemplate, problem: PlanningProblem) -> Variant:
    choice = simulate_template(template, problem, result.scorer)
    assert choice is not None, "it lies on the chips of the best plan"
    if choice.prediction.over:
        fullest = max(choice.prediction.over, key=lambda o: o.over)
        return Variant(text, 0.0, f"does not fit: {fullest}")
    return Variant(text, choice.step_seconds, why_slower(result.best, choice))


def why_slower(best: SimulatedPlan, other: SimulatedPlan) -> str:
    grown = {k: other.prediction.parts[k] - v for k, v in best.prediction.parts.items()}
    slower_part = max(grown, key=lambda k: grown[k])
    words = {
        "pipelines": "its slowest pipeline takes", "jitter": "waiting for unsteady chips takes",
        "gradients": "exposed gradient reduction takes", "optimizer": "the optimizer takes",
        "parameters": "sending parameters takes", "reference": "the forward of the reference takes",
        "outer": "exchanging weights between islands takes",
    }  # fmt: skip
    if grown[slower_part] < 5e-10:  # less than is shown
        return "it takes as long"
    return f"{words[slower_part]} {format_seconds(grown[slower_part])} longer"


def _even_layers(result: SearchResult, template: PlanTemplate, model: ModelSpec) -> PlanTemplate | None:
    tables, parts = result.scorer.tables, []
    for part in template.parts:
        per_stage, remainder = divmod(model.num_layers, len(part.shape.stages))
        stages = [replace(s.plain, layers=per_stage + (i < remainder))
                  for i, s in enumerate(part.shape.stages)]  # fmt: skip
        shape = PipelineTemplate(part.shape.micro_batch_size, tuple(stages))
        fitting = best_recompute(tables, shape, template.schedule, part.num_micro_batches, template.pipelines)
        parts.append(replace(part, shape=fitting or shape))
    changed = replace(template, parts=tuple(parts))
    layers, unchanged = ([s.layers for p in x.parts for s in p.shape.stages] for x in (changed, template))
    return None if layers == unchanged else changed


def _even_shares(template: PlanTemplate, batch: int) -> PlanTemplate | None:
    sizes, share = [p.shape.micro_batch_size for p in template.parts], batch // template.pipelines
    shares = {size * p.num_micro_batches for size, p in zip(sizes, template.parts)}
    if len(shares) == 1 or batch % template.pipelines or any(share % size for size in sizes):
        return None
    parts = tuple(replace(p, num_micro_batches=share // size) for size, p in zip(sizes, template.parts))
    return replace(template, parts=parts)
