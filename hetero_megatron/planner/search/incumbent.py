"""Plans that a search found: the best candidates, made concrete and predicted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hetero_megatron.cluster import Cluster
from hetero_megatron.plan import Plan, validate
from hetero_megatron.plan.islands import with_islands_where_quick
from hetero_megatron.planner.cost.layer_cost import CostModel, CostOptions
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.search.memory_check import most_over
from hetero_megatron.planner.simulate.step import Prediction, predict
from hetero_megatron.planner.template.placement import place, to_plan
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.planner.time_budget import TimeBudget
from hetero_megatron.spec import ModelSpec
from hetero_megatron.words import plural

EXACT_CHIPS = 16384  # above, the search does not wait for exact prediction, which takes longer than it does
WINDOW = 1.01  # candidates are predicted exactly if they are within this of the best: both mostly agree to 0.5 %
SMALL = 256  # chips, up to which prediction takes next to no time
Progress = Callable[[str], None]
Row = tuple[float, int, PlanTemplate]  # seconds by evaluation, which one it was, what it is


@dataclass(frozen=True)
class SearchOptions:
    """Args:
    dtype: of weights and activations.
    time_limit: seconds after which the best plan so far is taken; None: until done.
    top: candidates that are predicted exactly.
    space: what may be chosen.
    costs: assumptions of the cost model.
    exhaustive: False: never enumerate completely; None: where possible.
    regroup: ways to cut the stages of each of the best make-ups into other TP degrees that are tried; 0: none.
    seed: of graph partitioning, the only part with random choices.
    """

    dtype: str = "bf16"
    time_limit: float | None = None
    top: int = 6
    space: SearchSpace = SearchSpace()
    costs: CostOptions = CostOptions()
    exhaustive: bool | None = None
    regroup: int = 0
    seed: int = 0


DEFAULTS = SearchOptions()


@dataclass(frozen=True)
class JudgedPlan:
    """A plan that was judged."""

    plan: Plan
    cluster: Cluster  # that the plan's ranks count in
    candidate: PlanTemplate
    prediction: Prediction
    idle: tuple[int, ...]  # ranks without work
    text: str = ""  # what it is, where it has context groups: then the candidate is empty

    @property
    def step_seconds(self) -> float:
        return self.prediction.step_seconds


class LazyJudgedPlan(JudgedPlan):
    """A plan of a very large cluster, which is known to fit: predicted when first asked for."""

    def __init__(
        self, plan: Plan, cluster: Cluster, candidate: PlanTemplate, idle: tuple[int, ...], costs: CostModel
    ) -> None:
        fields = {"plan": plan, "cluster": cluster, "candidate": candidate, "idle": idle, "_costs": costs}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @cached_property
    def prediction(self) -> Prediction:  # type: ignore[override]
        costs: CostModel = self.__dict__["_costs"]
        return predict(self.plan, costs.model, self.cluster, costs.dtype, costs)


class Incumbent:
    """The best candidates so far, each plan once; says when to stop. ``part_of``: the search that this is a part of."""

    def __init__(
        self, keep: int, watch: TimeBudget | None, progress: Progress | None, part_of: Incumbent | None = None
    ) -> None:
        self.keep, self.watch, self.progress, self.part_of = keep, watch, progress, part_of
        self.rows: list[Row] = []
        self.count = 0

    def improve(self, candidate: PlanTemplate, seconds: float) -> bool:
        self.count += 1
        candidate = _plainest(candidate)
        known = any(row[2] == candidate for row in self.rows)
        if not known and (len(self.rows) < self.keep or seconds < self.rows[-1][0]):
            better = not self.rows or seconds < self.rows[0][0]
            # In one go, and before it is told: who is told of a plan may press Ctrl-C at once, and is to get it.
            self.rows = sorted([*self.rows, (seconds, self.count, candidate)], key=lambda row: row[:2])[: self.keep]
            if self.progress is not None and better:
                self.progress(f"{seconds:.4g} s per step with {plural(candidate.pipelines, 'pipeline')}")
        return not self.late()

    def late(self) -> bool:
        """Whether to stop: the time is up or Ctrl-C came, and there is a plan to take."""
        known = self.rows or (self.part_of is not None and self.part_of.rows)
        return self.watch is not None and bool(known) and self.watch.over()

    def make_ups(self) -> list[PlanTemplate]:
        """The best of each number of pipelines."""
        return list({row[2].pipelines: row[2] for row in reversed(self.rows)}.values())


def _plainest(candidate: PlanTemplate) -> PlanTemplate:
    """The same plan with no more said than it takes: schedules differ where several micro-batches pass several stages,
    orders where there are several pipelines."""
    candidate = candidate.joined()
    if all(len(part.shape.stages) == 1 or part.num_micro_batches == 1 for part in candidate.parts):
        candidate = replace(candidate, schedule="1f1b")
    return replace(candidate, order="stage") if candidate.pipelines == 1 else candidate


def judge(
    rows: list[Row],
    cluster: Cluster,
    model: ModelSpec,
    seq_length: int,
    options: SearchOptions,
    evaluator: TemplateScorer,
    watch: TimeBudget | None = None,
) -> list[JudgedPlan]:
    """Concrete plans of the best candidates, predicted exactly; those that fit, best first. What the search evaluated
    faster than the best prediction so far could be faster, so on small clusters all of that is predicted. When
    ``watch`` is over, the first one that fits is enough."""
    watch = watch or TimeBudget()
    found: list[JudgedPlan] = []
    if evaluator.pool.chips > EXACT_CHIPS:
        tight = [most_over(evaluator, candidate) > 0 for _, _, candidate in rows]
        order = sorted(range(len(rows)), key=lambda i: (rows[i][0] > WINDOW * rows[0][0], tight[i], i))
        for i in order:
            late = watch.finish(
                partial(judge_template, rows[i][2], cluster, model, seq_length, options, evaluator, late=not tight[i])
            )
            if late is not None and (isinstance(late, LazyJudgedPlan) or not late.prediction.over):
                return [late]
        return []
    least, small = math.inf, evaluator.pool.chips <= SMALL
    for seconds, _, candidate in rows:
        if seconds > WINDOW * (least if small else rows[0][0]) and found:
            break
        if len(found) >= options.top and not (small and seconds < least):
            break
        if found and watch.over():
            break
        choice = watch.finish(partial(judge_template, candidate, cluster, model, seq_length, options, evaluator))
        if choice is not None and not choice.prediction.over:
            found.append(choice)
            least = min(least, choice.step_seconds)
    return sorted(found, key=lambda choice: choice.step_seconds)


def judge_template(
    candidate: PlanTemplate,
    cluster: Cluster,
    model: ModelSpec,
    seq_length: int,
    options: SearchOptions,
    evaluator: TemplateScorer,
    late: bool = False,
) -> JudgedPlan | None:
    """The plan of a candidate, validated and predicted (``late``: when asked for); None when its TP groups do not
    pack."""
    placed = place(candidate, evaluator.pool)
    if placed is None:
        return None
    plan = with_islands_where_quick(to_plan(placed, cluster, seq_length, model.num_heads), model, cluster)
    validate(plan, model, cluster, dtype=options.dtype)
    if late:
        return LazyJudgedPlan(plan, cluster, candidate, placed.idle, evaluator.costs)
    prediction = predict(plan, model, cluster, options.dtype, evaluator.costs)
    return JudgedPlan(plan, cluster, candidate, prediction, placed.idle)
