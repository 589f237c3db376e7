"""The search for the best plan of a model on a cluster. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.plans import DTYPE, OPTIMIZER, Plan, Prediction, compiled_plan
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace, TimeBudget
from hetero_megatron.planner.report.comparison import Comparisons, Summary, compare, outline
from hetero_megatron.planner.report.plan_page import plan_page
from hetero_megatron.planner.report.text import format_comparisons, format_plan, plan_text, summary_json
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.whatif.islands_apart import WORTH, IslandsApart, best_apart
from hetero_megatron.planner.whatif.objective import Deadline, search_objective
from hetero_megatron.planner.whatif.replan import NodeLoss, WarmPlanner
from hetero_megatron.planner.whatif.runtime_plans import best_for
from hetero_megatron.plans.canonical import Plan as CanonicalPlan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.made_for import made_for
from hetero_megatron.plans.memory.of_plan import moments_of
from hetero_megatron.plans.routing import EVEN, routing_of
from hetero_megatron.plans.runtimes.table import RUNTIMES, written
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.simulate import step
from hetero_megatron.utils.text import format_seconds, plural

Progress = Callable[[str], None]
OBJECTIVES = ("tokens", "cost", "deadline")


@dataclass(frozen=True)
class FoundFor:
    """The best plan that another runtime can express.

    Attributes:
        prediction: of it, by the same cost model.
        slower: its step time over that of the plan without the runtime's limits.
        considered: plans that the runtime can express and that were estimated.
    """

    runtime: str
    plan: Plan
    prediction: Prediction
    slower: float
    considered: int

    @property
    def file(self) -> str:
        """The runtime's configuration file."""
        return written(
            self.runtime, self.plan.canonical, self.plan.model.spec, self.prediction.cluster.described, self.plan.dtype
        )

    def __str__(self) -> str:
        seconds, unlimited = self.prediction.step_seconds, self.prediction.step_seconds / self.slower
        return (
            f"{self.runtime}'s best of {self.considered} plans: {format_seconds(seconds)} per step,"
            f" {self.prediction.tokens_per_second:,.0f} tokens/s; without its limits {format_seconds(unlimited)}"
            f" ({self.slower:.2f}x)"
        )


@dataclass(frozen=True)
class FoundApart:
    """The best plan with outer steps between islands.

    Attributes:
        islands: its islands, and what steps wait for exchanges.
        without_seconds: predicted, of a step of the best plan without outer steps.
    """

    plan: Plan
    prediction: Prediction
    islands: IslandsApart
    without_seconds: float

    @property
    def speedup(self) -> float:
        """Against the best plan without outer steps."""
        return self.without_seconds / self.prediction.step_seconds

    @property
    def pays(self) -> bool:
        """Whether it is so much faster that another loss is worth a thought."""
        return self.speedup >= WORTH

    @property
    def file(self) -> str:
        """The plan file."""
        return f"# {self}\n{self.plan.text()}"

    def __str__(self) -> str:
        outer, seconds = self.plan.canonical.outer, self.prediction.step_seconds
        assert outer is not None
        islands = " | ".join(_names(nodes) for nodes in self.islands.nodes)
        form = "" if outer.compress == "none" else f" in {outer.compress}"
        parts = "" if outer.fragments == 1 else f", {outer.fragments} fragments in turn"
        late = f", {plural(outer.delay, 'step')} beside the computing" if outer.delay else ""
        return (
            f"outer steps between the islands {islands}: {format_seconds(seconds)} per step, {self.speedup:.2f} x as "
            f"fast as without ({format_seconds(self.without_seconds)}); weights are exchanged every {outer.every} steps"
            f"{form}{parts}{late}, {self.islands.waiting:.1%} of a step waits for it"
        )


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 3 else f"{nodes[0]} to {nodes[-1]} ({len(nodes)} nodes)"


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        plan: the best plan; its ranks are those of ``cluster``.
        cluster: the searched one, or with another objective than speed the part of it that is used.
        complete: nothing was cut short by the time limit or Ctrl-C.
        seconds: the search took.
    """

    plan: Plan
    cluster: Cluster
    result: SearchResult = field(repr=False)
    problem: PlanningProblem = field(repr=False)
    summary: Summary = field(repr=False)
    budget: TimeBudget = field(repr=False)

    @property
    def complete(self) -> bool:
        return self.result.complete

    @property
    def seconds(self) -> float:
        return self.result.seconds

    @property
    def step_seconds(self) -> float:
        """Predicted, of one optimizer step."""
        return self.result.best.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Predicted."""
        return self.result.best.prediction.tokens_per_second

    @cached_property
    def prediction(self) -> Prediction:
        """Step time, memory and timeline of the plan."""
        assert self.summary.asked is not None
        compiled = compiled_plan(self.plan)
        return Prediction(self.plan, self.cluster, self.result.best.prediction, self.summary.asked, compiled)

    @property
    def others(self) -> list[Plan]:
        """The runners-up, best first."""
        return [replace(self.plan, canonical=runner_up.plan) for runner_up in self.result.others]

    @property
    def file(self) -> str:
        """The plan file, with what the plan is for in its first lines."""
        made_for = self.plan.canonical.made_for
        assert made_for is not None
        return plan_text(self.result.best, self.plan.model.name, made_for)

    def explain(self) -> str:
        """The plan in words: step time, who is idle and why, memory of the fullest chips."""
        return format_plan(self.summary)

    def compare(self, *, baselines: bool = True, every: bool = False, progress: Progress | None = None) -> str:
        """Bound, other plans, and why they are slower.

        Args:
            baselines: the best uniform plan, and each chip type alone where the search did that anyway.
            every: search each chip type alone, and predict all good uniform plans: longer than the search.
        """
        compare(self.summary, self.problem, Comparisons(baselines, every), self.budget.uncaught(), progress)
        return self.comparisons()

    def comparisons(self) -> str:
        """What :meth:`compare` and :meth:`losses` have computed, in words."""
        return format_comparisons(self.summary)

    def losses(self) -> list[NodeLoss]:
        """A plan for the loss of each node, alike ones once."""
        self.summary.losses = WarmPlanner(self.problem.on(self.cluster.described), self.result).losses()
        return self.summary.losses

    def best_for(self, runtime: str, progress: Progress | None = None) -> FoundFor:
        """The best plan of the same question that another runtime can express: "megatron", "torchtitan", "deepspeed"
        or "accelerate", with equal degrees on all ranks, and its configuration file.

        Raises:
            UserError: an unknown runtime, or it can express no plan that fits.
        """
        if runtime not in RUNTIMES:
            raise UserError("unknown runtime", field="runtime", value=runtime, accepted=", ".join(RUNTIMES))
        runtime_plan = best_for(RUNTIMES[runtime], self.problem.on(self.cluster.described), progress)
        chosen, predicted = self._other(runtime_plan.plan, runtime_plan.prediction)
        return FoundFor(runtime, chosen, predicted, predicted.step_seconds / self.step_seconds, runtime_plan.considered)

    def apart(self, every: int, progress: Progress | None = None) -> FoundApart:
        """The best plan of the same question whose islands train apart and exchange weights at most ``every`` steps
        after one another, so that its loss is not that of one process.

        Raises:
            UserError: a model without outer steps, or no part of the cluster can train apart.
        """
        islands_apart = best_apart(self.problem.on(self.cluster.described), every, self.budget, progress)
        return FoundApart(*self._other(islands_apart.plan, islands_apart.prediction), islands_apart, self.step_seconds)

    def _other(self, canonical: CanonicalPlan, simulated: step.Prediction) -> tuple[Plan, Prediction]:
        """Another plan for the same question, and what is predicted of it."""
        chosen = replace(self.plan, canonical=replace(canonical, made_for=self.plan.canonical.made_for))
        asked, compiled = self.prediction.asked, compiled_plan(chosen)
        return chosen, Prediction(chosen, self.cluster, simulated, asked, compiled)

    def as_json(self) -> dict[str, Any]:
        """Everything that the report says, as JSON data."""
        return dict(summary_json(self.summary))

    def page(self) -> str:
        """The report and the predicted timeline as HTML."""
        return plan_page(self.summary)


def plan(
    model: Model | str, cluster: Cluster, *, seq_length: int, global_batch_size: int, dtype: str = DTYPE,
    optimizer: str = OPTIMIZER, fp8: Fp8 | None = None, grad_reduce_in_bf16: bool = False,
    micro_batch_size: int | None = None, recompute: str | None = None, context: str = "auto", offload: str = "auto",
    offload_activations: str = "auto", more_schedules: str = "auto",
    schedule_effort: float = SearchSpace.schedule_effort,
    equal_pipelines: str = "no", shares: bool = True, routing_stats: str | None = None,
    memory_margin: float = CostOptions.margin, time_limit: float | None = None, seed: int = 0,
    objective: str = "tokens", deadline_hours: float | None = None, train_tokens: float | None = None,
    progress: Progress | None = None, elapsed: Callable[[float], None] | None = None,
) -> Found:  # fmt: skip
    """The best plan of a model on a cluster.

    Args:
        model: or what :class:`Model` takes.
        seq_length: tokens per sequence; global_batch_size: sequences per optimizer step.
        dtype: of weights and activations: "bf16", "fp16", "fp32", "fp64"; optimizer: "adam", "sgd", "muon".
        fp8: what linear modules may compute in.
        grad_reduce_in_bf16: gradients travel between ranks in bf16, as the run's flag of this name says.
        micro_batch_size, recompute ("none", "selective", "elementwise", "full"): only this; None: the search chooses.
        context, offload, offload_activations, more_schedules: "auto", "always" or "never", as the flags of
            ``hetero-megatron plan``.
        equal_pipelines: "no"; "layers": equal stages and shares of the batch; "copies": the same chips, too.
        shares: pipelines may own unequal shares of the optimizer's state.
        routing_stats: file of a run, of how often experts were chosen.
        memory_margin: share of a chip's memory that stays free.
        time_limit: seconds after which the best plan so far counts.
        objective: "tokens" per second; "cost": tokens per currency unit; "deadline": the cheapest plan that trains
            ``train_tokens`` in ``deadline_hours``.
        progress: told what is found; elapsed: told the seconds since the beginning, again and again.

    Raises:
        UserError: a batch or length that no plan can have, missing rates, or a model that fits nowhere; the message
            says what would help.
    """
    shapes = (model if isinstance(model, Model) else Model(model)).stretched(seq_length)
    if objective not in OBJECTIVES:
        raise UserError("unknown objective", field="objective", value=objective, accepted=", ".join(OBJECTIVES))
    space = SearchSpace(
        micro_batch_sizes=None if micro_batch_size is None else (micro_batch_size,), recompute=recompute,
        context=context, offload=offload, offload_activations=offload_activations, more_schedules=more_schedules,
        schedule_effort=schedule_effort, equal_pipelines=equal_pipelines, shares=shares,
    )  # fmt: skip
    costs = CostOptions(
        margin=memory_margin, moments=moments_of(optimizer), muon=optimizer == "muon", fp8=fp8,
        routing=EVEN if routing_stats is None else routing_of(routing_stats, shapes.spec),
        gradient_bytes=2.0 if grad_reduce_in_bf16 else None,
    )  # fmt: skip
    options = SearchOptions(dtype=dtype, time_limit=time_limit, space=space, costs=costs, seed=seed)
    problem = PlanningProblem(shapes.spec, cluster.described, seq_length, global_batch_size, options)
    budget, deadline = TimeBudget(time_limit), _deadline(objective, train_tokens, deadline_hours)
    budget.watch = elapsed
    if objective == "tokens":
        result = search(problem, progress=progress, budget=budget)
    else:
        result = search_objective(problem, deadline, progress, budget)
    budget.watch = None
    best = result.best
    section = made_for(shapes.spec, dtype, optimizer, best.cluster, best.plan.ranks, fp8)
    chosen = Plan(replace(best.plan, made_for=section), shapes, dtype, optimizer, fp8)
    used = cluster if best.cluster is cluster.described else Cluster(best.cluster)
    return Found(chosen, used, result, problem, outline(result, problem, deadline), budget)


def _deadline(objective: str, tokens: float | None, hours: float | None) -> Deadline | None:
    required = objective == "deadline"
    for name, value in (("deadline_hours", hours), ("train_tokens", tokens)):
        if (value is None) == required:
            problem = "missing beside objective deadline" if required else "it needs objective deadline"
            raise UserError(problem, field=name, value=value, accepted="a number above 0")
    return Deadline(tokens, hours) if tokens is not None and hours is not None else None
