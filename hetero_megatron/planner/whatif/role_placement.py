"""Where a teacher or a reference goes: on chips of its own (which), on the same ones before each step, or into a file
that is computed once.

Splits of the cluster are tried in the order of an estimate: nodes in order of speed from either end, whole groups, and
on small clusters any number of each group. On each, the search finds the plan of the model that is trained on what is
left, and :mod:`forward_plans` the role's; a step is as long as the longer of both. Messages of both over one network
card are not counted together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.search.incumbent import Progress, SimulatedPlan
from hetero_megatron.planner.template.plan_template import renumbered
from hetero_megatron.planner.whatif.forward_plans import ForwardPlan, ForwardPlans, ForwardQuestion
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.forward_only import role_of
from hetero_megatron.plans.islands import with_islands_where_quick
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.beside import predict_beside
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.spec.distillation import likeliest_words
from hetero_megatron.utils.cached_method import cached_method

MOST_SPLITS, MOST_SEARCHED = 64, 10  # splits of the cluster, and those that are searched
SMALL = 8  # chips of a cluster that is split by chips, not nodes
QUICK = 150_000  # actions of a search on a part of the cluster, see ``SearchOptions.work``
LITTLE = 0.1  # of memory, of searches that leave room for what a role says
MARGINS = (0.2, 0.35, 0.5, 0.65)  # of memory, of searches that leave room for a second model on the same chips


@dataclass(frozen=True)
class Alternative:
    """One placement.

    Attributes:
        way: ``own chips``, ``same chips`` or ``file``.
        step_seconds: of a step, with its part of what comes before the first one; inf: it is none, because of
            ``problem``.
        trained_seconds, role_seconds: of a step without the role, and of the role's forwards over a batch.
        ranks: of the role.
        plan: of the cluster; with ranks for the role where it has chips of its own.
        role_plan: under which the file is written.
        prediction: of a step of ``plan``.
    """

    way: str
    step_seconds: float
    trained_seconds: float = 0.0
    role_seconds: float = 0.0
    ranks: tuple[int, ...] = ()
    plan: Plan | None = None
    role_plan: Plan | None = None
    prediction: Prediction | None = None
    problem: str = ""


@dataclass(frozen=True)
class RolePlacement:
    """The best first. ``searched``: of ``splits`` of the cluster, so many; ``epochs``: passes over the data."""

    alternatives: tuple[Alternative, ...]
    asked: ForwardQuestion
    cluster: Cluster
    searched: int
    splits: int
    epochs: float

    @property
    def best(self) -> Alternative:
        return self.alternatives[0]


class RoleSearch:
    """Of a model to train, a role and a cluster.

    Args:
        problem: of the model that is trained, on the whole cluster.
        epochs: how often a run reads its data: a file is computed once for all.
        progress: told what is found.
    """

    def __init__(
        self, problem: PlanningProblem, asked: ForwardQuestion, epochs: float = 1.0, progress: Progress | None = None
    ) -> None:
        if asked.name == "teacher":
            costs = replace(problem.options.costs, loss_words=likeliest_words((asked.words - 1) // 2))
            problem = replace(problem, options=replace(problem.options, costs=costs))
        self._problem, self._asked, self._epochs = problem, asked, epochs
        self._say = progress or (lambda text: None)
        self._budget, made_for = TimeBudget(problem.options.time_limit), (problem.model, problem.cluster)
        self._speeds = ChipSpeeds(CostModel(*made_for, problem.seq_length, problem.dtype, problem.options.costs))

    def placed(self) -> RolePlacement:
        """All alternatives.

        Raises:
            UserError: there is none; or the search of the model that is trained refuses, on all chips.
        """
        cluster = self._problem.cluster
        self._say(f"the model that is trained, on all {cluster.world_size} chips")
        whole = search(self._problem, budget=self._budget)
        others = self._others(whole)
        splits = list(self._splits())
        on_own_chips, searched = self._on_own(whole, splits)
        alternatives = sorted([on_own_chips, *others], key=lambda one: one.step_seconds)
        if alternatives[0].step_seconds == math.inf:
            raise UserError(
                f"no placement fits: {'; '.join(f'{one.way}: {one.problem}' for one in alternatives)}",
                field=f"--{self._asked.name}-hf", value=self._asked.model.name, where=cluster.file,
                accepted="a smaller model, or more chips or memory in the cluster file",
            )  # fmt: skip
        return RolePlacement(tuple(alternatives), self._asked, cluster, searched, len(splits), self._epochs)

    def on_ranks(self, ranks: frozenset[int]) -> Alternative:
        """The role on these ranks and the model that is trained on all others, each under the best plan found.

        Raises:
            UserError: there is none of one of both.
        """
        return self._joined(ranks, self._role_plan(sorted(ranks)))

    def _others(self, whole: SearchResult) -> list[Alternative]:
        """Where the role has no chips of its own."""
        others = [self._in_a_file(whole)]
        return [*others, self._on_the_same(whole)] if self._asked.name == "teacher" else others

    def _role_plan(self, ranks: Sequence[int]) -> ForwardPlan:
        """Of the role, on all of these ranks, in which they count from 0; UserError: none fits."""
        return ForwardPlans(self._asked, shrink(self._problem.cluster, ranks)).best()

    def _together(self, trained: float, role: float) -> float:
        """Seconds of a step of both on chips of their own."""
        return max(trained, role)

    def _step(self, trained: SimulatedPlan, ranks: frozenset[int], forward: ForwardPlan) -> float:
        """The same of two plans, by which splits of the cluster are ranked."""
        return self._together(trained.step_seconds, forward.seconds)

    def _predicted(self, plan: Plan) -> Prediction:
        """Of a plan with ranks for the role."""
        problem, asked = self._problem, self._asked
        top_k = (asked.words - 1) // 2
        role = role_of(plan, problem.model, asked.name, asked.model, top_k, problem.cluster, asked.forwards)
        return predict_beside(plan, problem.model, problem.cluster, problem.dtype, problem.options.costs, role)

    def _in_a_file(self, whole: SearchResult) -> Alternative:
        """One pass of the role over the data, on all chips, and then steps without it."""
        step = whole.best.step_seconds
        self._say(f"the {self._asked.name}, on all chips")
        try:
            forward_plan = ForwardPlans(self._asked, self._problem.cluster).best()
        except UserError as error:
            return Alternative("file", math.inf, step, problem=error.problem)
        once = forward_plan.seconds / self._epochs
        return Alternative("file", step + once, step, forward_plan.seconds, forward_plan.plan.ranks, whole.best.plan,
                           forward_plan.plan, whole.best.prediction)  # fmt: skip

    def _on_the_same(self, whole: SearchResult) -> Alternative:
        """Cut as the model that is trained, before each of its steps."""
        problem, asked, result, excess = self._problem, self._asked, whole, ""
        for margin in (None, *MARGINS):
            if margin is not None:
                try:
                    result = search(_quick(problem.with_margin(margin)), budget=self._budget)
                except UserError:
                    break
            alternatives: list[Alternative] = []
            for choice in (result.best, *result.others):
                try:
                    role = role_of(choice.plan, problem.model, asked.name, asked.model, 0, problem.cluster)
                except UserError as error:
                    excess = excess or error.problem
                    continue
                predicted = predict_beside(choice.plan, problem.model, problem.cluster, problem.dtype,
                                           problem.options.costs, role)  # fmt: skip
                if predicted.over:
                    excess = excess or f"the plan does not fit: {predicted.over[0]}"
                    continue
                assert predicted.role is not None
                alternatives.append(Alternative("same chips", predicted.step_seconds, predicted.role.step_seconds,
                                         predicted.role.seconds, choice.plan.ranks, choice.plan,
                                         prediction=predicted))  # fmt: skip
            if alternatives:
                return min(alternatives, key=lambda one: one.step_seconds)
        return Alternative("same chips", math.inf, problem=excess or "no plan leaves room for it")

    def _splits(self) -> Iterator[frozenset[int]]:
        """Ranks of the role, others than none and all."""
        cluster = self._problem.cluster
        by_chip = cluster.world_size <= SMALL or len({rank.node for rank in cluster.ranks}) == 1
        kinds: dict[str, dict[object, list[int]]] = {}
        for rank in cluster.ranks:
            kinds.setdefault(rank.group, {}).setdefault(rank.rank if by_chip else rank.node, []).append(rank.rank)
        units = {group: list(of_group.values()) for group, of_group in kinds.items()}
        slow_first = sorted(units, key=lambda group: self._speeds.of(units[group][0][0]))
        counts = [tuple(len(units[g]) * (g == whole) for g in slow_first) for whole in slow_first]
        every = itertools.product(*(range(len(units[group]) + 1) for group in slow_first))
        if math.prod(len(units[group]) + 1 for group in slow_first) <= MOST_SPLITS:
            counts += every
        else:
            for order in (slow_first, slow_first[::-1]):
                total = sum(len(units[group]) for group in order)
                for taken in sorted({round(total * part / 16) for part in range(1, 16)}):
                    left, chosen = taken, {}
                    for group in order:
                        chosen[group] = min(left, len(units[group]))
                        left -= chosen[group]
                    counts.append(tuple(chosen[group] for group in slow_first))
        for row in dict.fromkeys(counts):
            taken_units = [unit for group, n in zip(slow_first, row, strict=True) for unit in _last(units[group], n)]
            ranks = frozenset(rank for unit in taken_units for rank in unit)
            if 0 < len(ranks) < cluster.world_size:
                yield ranks

    def _on_own(self, whole: SearchResult, splits: Sequence[frozenset[int]]) -> tuple[Alternative, int]:
        """(the best split, how many were searched): those first whose longer part is shortest by an estimate, which
        takes the step on all chips as work that the faster chips do in proportion."""
        cluster, problem = self._problem.cluster, "the role fits on no part of the cluster"
        work = whole.best.step_seconds * sum(self._speeds.of(rank.rank) for rank in cluster.ranks)
        estimated: list[tuple[float, int, frozenset[int], ForwardPlan]] = []
        for i, ranks in enumerate(splits):
            try:
                forward = self._role_plan(sorted(ranks))
            except UserError as error:
                problem = error.problem
                continue
            left = sum(self._speeds.of(rank.rank) for rank in cluster.ranks if rank.rank not in ranks)
            estimated.append((self._together(work / left, forward.seconds), i, ranks, forward))
        searched_rows: list[tuple[float, int, frozenset[int], ForwardPlan]] = []
        searched = 0
        for _, i, ranks, forward in sorted(estimated, key=lambda row: row[:2])[:MOST_SEARCHED]:
            fastest = min((row[0] for row in searched_rows), default=math.inf)
            if self._together(0.0, forward.seconds) >= fastest or self._budget.over():
                continue
            searched += 1
            try:
                trained = search(_quick(self._left(ranks)), budget=self._budget).best
            except UserError as error:
                problem = f"on the other chips: {error.problem}"
                continue
            step = self._step(trained, ranks, forward)
            if step < fastest:
                self._say(f"{step:.3g} s with the {self._asked.name} on {len(ranks)} chips")
            searched_rows.append((step, i, ranks, forward))
        if estimated and not searched:
            problem = "the time limit was over before any of them was searched"
        for _, _, ranks, forward in sorted(searched_rows, key=lambda row: row[:2]):
            joined = self._joined(ranks, forward)
            if joined.step_seconds < math.inf:
                return joined, searched
            problem = joined.problem
        return Alternative("own chips", math.inf, problem=problem), searched

    def _left(self, ranks: frozenset[int]) -> PlanningProblem:
        """The problem on the chips that the role has not."""
        cluster = self._problem.cluster
        return self._problem.on(shrink(cluster, [r.rank for r in cluster.ranks if r.rank not in ranks]))

    def _joined(self, ranks: frozenset[int], forward: ForwardPlan) -> Alternative:
        """Both plans as one, on the cluster's ranks, after a search with all effort; where the ranks that train have no
        room for what the role says, after searches that leave some."""
        excess, problem = "", self._left(ranks)
        least = problem.options.costs.margin
        for margin in (None, *(margin for margin in (LITTLE, *MARGINS) if margin > least)):
            try:
                result = search(problem if margin is None else _quick(problem.with_margin(margin)), budget=self._budget)
            except UserError:
                if margin is None:
                    raise
                break
            joined = [self._beside(choice.plan, ranks, forward) for choice in (result.best, *result.others)]
            best = min(joined, key=lambda one: one.step_seconds)
            if best.step_seconds < math.inf:
                return best
            excess = excess or joined[0].problem
        return Alternative("own chips", math.inf, problem=excess)

    def _beside(self, trained: Plan, ranks: frozenset[int], forward: ForwardPlan) -> Alternative:
        """A plan of the chips that the role has not, and the role's."""
        problem, asked, cluster = self._problem, self._asked, self._problem.cluster
        left = [r.rank for r in cluster.ranks if r.rank not in ranks]
        trained = with_islands_where_quick(renumbered(trained, dict(enumerate(left))), problem.model, cluster)
        role_plan = renumbered(forward.plan, dict(enumerate(sorted(ranks))))
        plan = replace(trained, roles=((asked.name, role_plan),))
        validate(plan, problem.model, cluster, dtype=problem.dtype)
        prediction = self._predicted(plan)
        assert prediction.role is not None
        if prediction.over:
            return Alternative("own chips", math.inf, problem=f"the plan does not fit: {prediction.over[0]}")
        return Alternative("own chips", prediction.step_seconds, prediction.role.step_seconds, prediction.role.seconds,
                           role_plan.ranks, plan, prediction=prediction)  # fmt: skip


def _last(units: list[list[int]], n: int) -> list[list[int]]:
    return units[len(units) - n :]


def _quick(problem: PlanningProblem) -> PlanningProblem:
    """With little effort: it only ranks."""
    options = replace(problem.options, work=QUICK, space=replace(problem.space, more_schedules="never"))
    return replace(problem, options=options)


class ChipSpeeds:
    """How fast the chips of the cluster of ``costs`` are at its model, one by one: what shares and orders begin with
    before anything is searched."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def of(self, rank: int) -> float:
        """Sequences per second of a layer, forward, on the chip of a rank."""
        place = self._costs.cluster.ranks[rank]
        return self._of_group(place.group, place.chip)

    @cached_method
    def _of_group(self, group: str, chip: str) -> float:
        return 1 / self._costs.forward_seconds(StageChoice(chip, 1, 1, 1, False, False, home=group), 1)
