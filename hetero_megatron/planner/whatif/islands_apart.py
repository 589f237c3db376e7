"""Islands that train apart, beside the best plan whose gradients cross all links in every step.

Islands are what remains together when all links up to a bandwidth are cut. Of each the search finds the best plan, for
a share of the batch by its speed, and outer steps join them (``plans/outer.py``): those that change training least of
all that keep the islands from waiting for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut
from hetero_megatron.planner.problem import PlanningProblem, TimeBudget
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import Progress, SimulatedPlan
from hetero_megatron.planner.template.plan_template import renumbered
from hetero_megatron.planner.whatif.role_placement import ChipSpeeds
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.canonical import Outer
from hetero_megatron.plans.islands import divisions
from hetero_megatron.plans.outer import COMPRESS
from hetero_megatron.plans.shares import Islands
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.grad_sync import exchange_seconds, waiting_seconds
from hetero_megatron.predictor.simulate.step import Prediction, predict

MOST_DIVISIONS, MOST_ISLANDS = 4, 4  # of the cluster that are tried, the slowest links cut first; of each
ROUNDS = 2  # of dividing the batch by what the islands took
FINEST = 64  # parts of the batch, of which fewer are not moved from one island to another
MARGINS = (None, 0.2, 0.35, 0.5)  # of memory, for the global weights and their momentum
FRAGMENTS = (4, 2, 1)
WORTH = 1.05  # least speed-up for which outer steps are taken, and more islands than another division has
WAITING = 0.02  # part of a step that exchanges may take before settings are tried that change training more


@dataclass(frozen=True)
class IslandsApart:
    """The best plan with outer steps.

    Attributes:
        prediction: of it, with what a step waits for exchanges in the mean.
        waiting: the latter's part of the step.
        nodes: of each island.
        tried: divisions of the cluster for which there is such a plan.
    """

    plan: Plan
    prediction: Prediction
    waiting: float
    nodes: tuple[tuple[str, ...], ...]
    tried: int


def best_apart(
    problem: PlanningProblem, every: int, budget: TimeBudget | None = None, progress: Progress | None = None
) -> IslandsApart:
    """The fastest division of the cluster into islands.

    Args:
        every: most steps from one exchange of a weight to the next.
        progress: told what is found.

    Raises:
        UserError: all links are equally fast, or no division has a plan.
    """
    return _Search(problem, every, budget or TimeBudget(problem.options.time_limit), progress).best()


class _Search:
    def __init__(
        self, problem: PlanningProblem, every: int, budget: TimeBudget, progress: Progress | None
    ) -> None:
        self._problem, self._every, self._budget = problem.with_space(more_schedules="never"), every, budget
        self._say = progress or (lambda text: None)
        made_for = problem.model, problem.cluster, problem.seq_length, problem.dtype
        self._costs = CostModel(*made_for, problem.options.costs)
        self._speeds = ChipSpeeds(self._costs)
        self._simulated: dict[tuple[tuple[int, ...], int, float | None], SimulatedPlan] = {}

    def best(self) -> IslandsApart:
        cluster, why = self._problem.cluster, "no link is slower than others"
        best: tuple[Plan, Prediction] | None = None
        tried = 0
        for islands in divisions([rank.rank for rank in cluster.ranks], cluster, alone=True)[:MOST_DIVISIONS]:
            if len(islands) > min(MOST_ISLANDS, self._problem.global_batch_size):
                why = f"there are {len(islands)} islands"
                continue
            try:
                plan, prediction = self._fitting(islands)
            except UserError as error:
                why = str(error.problem)
                continue
            tried += 1
            self._say(f"{prediction.step_seconds:.4g} s per step with {len(islands)} islands")
            if best is None or _better((plan, prediction), best):
                best = plan, prediction
        if best is None:
            raise UserError(
                f"no islands can train apart: {why}", field="--allow-outer", value=self._every, where=cluster.file,
                accepted=f"a cluster of 2 to {MOST_ISLANDS} parts with slower links between them, each with room for "
                "the model",
            )  # fmt: skip
        plan, prediction = best
        assert plan.outer is not None
        nodes = tuple(tuple(dict.fromkeys(cluster.ranks[r].node for r in ranks)) for ranks in plan.outer.islands)
        return IslandsApart(plan, prediction, prediction.parts["outer"] / prediction.step_seconds, nodes, tried)

    def _fitting(self, islands: Islands) -> tuple[Plan, Prediction]:
        """With as much memory kept free in the islands' searches as their outer state needs."""
        for margin in MARGINS:
            plan = self._with_exchanges(self._joined(islands, margin))
            prediction = self._predicted(plan)
            if not prediction.over:
                return plan, prediction
        raise UserError(f"what outer steps keep does not fit: {prediction.over[0]}")

    def _joined(self, islands: Islands, margin: float | None) -> Plan:
        """The islands' plans as one, without exchanges; each has the part of the batch that makes the slowest one as
        fast as can be."""
        batch = self._problem.global_batch_size
        sizes = _sizes(batch, [sum(map(self._speeds.of, ranks)) for ranks in islands])
        best = self._of_islands(islands, sizes, margin)
        for _ in range(ROUNDS):  # by what the islands took
            sizes = _sizes(batch, [size / one.step_seconds for size, one in zip(sizes, best, strict=True)])
            best = min(best, self._of_islands(islands, sizes, margin), key=_slowest)
        moved = max(batch // 8, 1)
        while moved > batch // FINEST:  # batches of some sizes divide better than others
            best, better = self._with_moved(islands, best, moved, margin)
            moved = moved if better else moved // 2
        plans = [renumbered(one.plan, dict(enumerate(ranks))) for one, ranks in zip(best, islands, strict=True)]
        pipelines = tuple(pipeline for plan in plans for pipeline in plan.pipelines)
        return replace(plans[0], global_batch_size=batch, pipelines=pipelines, outer=Outer(islands, self._every))

    def _with_moved(
        self, islands: Islands, plans: list[SimulatedPlan], moved: int, margin: float | None
    ) -> tuple[list[SimulatedPlan], bool]:
        """(with ``moved`` sequences more or less on the slowest island, and so many less or more on the other one that
        is best for it; whether that is faster)."""
        sizes = [one.plan.global_batch_size for one in plans]
        slow = max(range(len(plans)), key=lambda i: plans[i].step_seconds)
        tried = [plans]
        for other in (i for i in range(len(sizes)) if i != slow):
            for giving, taking in ((slow, other), (other, slow)):
                if sizes[giving] > moved:
                    changed = list(sizes)
                    changed[giving] -= moved
                    changed[taking] += moved
                    tried.append(self._of_islands(islands, changed, margin))
        best = min(tried, key=_slowest)
        return best, _slowest(best) < _slowest(plans)

    def _of_islands(self, islands: Islands, sizes: Sequence[int], margin: float | None) -> list[SimulatedPlan]:
        return [self._of_island(ranks, size, margin) for ranks, size in zip(islands, sizes, strict=True)]

    def _of_island(self, ranks: tuple[int, ...], batch: int, margin: float | None) -> SimulatedPlan:
        key = ranks, batch, margin
        if key not in self._simulated:
            problem = self._problem.on(shrink(self._problem.cluster, ranks)).with_batch(batch)
            asked = problem if margin is None else problem.with_margin(margin)
            self._simulated[key] = search(asked, budget=self._budget).best
        return self._simulated[key]

    def _with_exchanges(self, plan: Plan) -> Plan:
        """The plan with the first settings under which steps hardly wait, else with those under which they wait
        least."""
        costs, model = self._costs, self._problem.model
        buckets, step = make_buckets(plan, model), self._predicted(plan).parts
        alone = sum(seconds for part, seconds in step.items() if part != "outer")
        exchanges, waits = dict[tuple[int, str], list[float]](), list[tuple[float, Plan]]()
        for outer in _settings(plan.outer, self._every, model.num_layers):
            with_outer, form = replace(plan, outer=outer), (outer.fragments, outer.compress)
            if form not in exchanges:
                exchanges[form] = exchange_seconds(with_outer, model, buckets, costs.links, costs.wide)
            seconds = waiting_seconds(outer, exchanges[form], alone)
            if seconds <= WAITING * alone:
                return with_outer
            waits.append((seconds, with_outer))
        return min(waits, key=lambda row: row[0])[1]

    def _predicted(self, plan: Plan) -> Prediction:
        problem = self._problem
        validate(plan, problem.model, problem.cluster, dtype=problem.dtype)
        return predict(plan, problem.model, problem.cluster, problem.dtype, self._costs)


def _slowest(plans: Sequence[SimulatedPlan]) -> float:
    return max(one.step_seconds for one in plans)


def _better(candidate: tuple[Plan, Prediction], than: tuple[Plan, Prediction]) -> bool:
    """Whether it is faster; by enough, where it has more islands, which changes training more."""
    counts = [len(plan.outer.islands) for plan, _ in (candidate, than) if plan.outer is not None]
    more, fewer = counts[0] > counts[1], counts[0] < counts[1]
    ratio = than[1].step_seconds / candidate[1].step_seconds
    return ratio >= WORTH if more else ratio > (1 / WORTH if fewer else 1)


def _sizes(batch: int, speeds: Sequence[float]) -> list[int]:
    """Sequences of each island, at least one."""
    unit = max(speeds) / 1e6
    return [1 + b - a for a, b in cut(batch - len(speeds), [max(1, round(speed / unit)) for speed in speeds])]


def _settings(plain: Outer | None, every: int, layers: int) -> Iterator[Outer]:
    """From those that change training least: rarer exchanges, then in fewer bits, then beside the computing."""
    assert plain is not None
    steps = sorted({*(2**i for i in range(every.bit_length())), every} - {1})
    for delay in (0, 1):
        for compress in COMPRESS:
            for n in steps:
                fragments = next(f for f in FRAGMENTS if n % f == 0 and f <= layers and (n // f > delay or f == 1))
                yield replace(plain, every=n, fragments=fragments, delay=delay, compress=compress)
