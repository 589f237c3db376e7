"""Where answers are sampled (--grpo): by a generator on chips of its own (which), or in turn by the chips that train.

Stages of a pipeline take turns while tokens come one by one, so more of them make nothing faster: of each kind of chips
a generator's pipelines are as shallow as they hold the model with keys and values, and answers are divided by the speed
of the pipelines. Each pipeline gets the weights after a step: over slow links fewer of them are faster."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.driver import SearchResult
from hetero_megatron.planner.search.incumbent import Progress, SimulatedPlan
from hetero_megatron.planner.whatif.forward_plans import (
    TP,
    Cell,
    ForwardPlan,
    ForwardQuestion,
    fastest_fitting,
    tp_cells,
)
from hetero_megatron.planner.whatif.role_placement import Alternative, RoleSearch
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import ForwardRole, role_of
from hetero_megatron.plans.memory.forward_only import with_role
from hetero_megatron.plans.memory.memory_report import OverLimit, over_limit
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.predictor.simulate.rollouts import RolloutCosts, predict_rollouts
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.grpo import Grpo

MOST_ROWS, MOST_PRICED = 256, 6  # answers sampled at once; plans that are simulated
Chains = list[list[Cell]]  # pipelines as TP groups in turn


@dataclass(frozen=True)
class _Estimate:
    """Of ``chains`` that sample ``rows`` answers at once: seconds of the rollout, of the way of the weights, and of one
    token of each chain."""

    rollout: float
    weights: float
    rows: int
    chains: Chains
    tokens: list[float]


class GeneratorPlans:
    """Of one model on the chips of a cluster.

    Args:
        sent: seconds until so many bytes are on each rank that come from the ranks that train.
    """

    def __init__(
        self, asked: ForwardQuestion, g: Grpo, cluster: Cluster, sent: Callable[[Mapping[int, float]], float]
    ) -> None:
        self._asked, self._grpo, self._cluster, self._sent = asked, g, cluster, sent
        made_for = asked.model, cluster, asked.seq_length, asked.dtype
        self._price = RolloutCosts(*made_for, asked.options.margin, g.max_new_tokens)
        self._costs = self._price.costs
        model, item = asked.model, self._costs.item
        self._weights = parameter_count(model) * item
        self._row = 2 * model.num_layers * model.num_kv_heads * model.head_dim * asked.seq_length * item

    def best(self) -> ForwardPlan:
        """The fastest that fits, with the way of the weights.

        Raises:
            UserError: none does; names the chip that lacks least.
        """
        rows = [n for n in range(1, min(MOST_ROWS, self._asked.global_batch_size) + 1)
                if self._asked.global_batch_size % n == 0]  # fmt: skip
        estimates = [estimate for n in rows for tp in TP for estimate in self._estimates(tp, n)]
        ranked = sorted(estimates, key=lambda one: one.rollout + one.weights)
        fastest, nearest = fastest_fitting(map(self._judged, ranked), MOST_PRICED)
        if fastest is not None:
            return fastest
        lacks = "" if nearest is None else f": at best {nearest}"
        problem = f"a generator, {self._weights / 2**30:.3g} GiB of weights, fits on no chips that are tried{lacks}"
        raise UserError(problem, field="--grpo", where=self._cluster.file,
                        accepted="shorter sequences, or more chips or memory in the cluster file")  # fmt: skip

    def _estimates(self, tp: int, rows: int) -> Iterator[_Estimate]:
        model = self._asked.model
        if model.num_heads % tp or model.num_kv_heads % tp:
            return
        by_kind: dict[str, list[Cell]] = {}
        for cell in tp_cells(self._cluster, tp):
            by_kind.setdefault(self._cluster.ranks[cell[0]].chip, []).append(cell)
        chains: Chains = []
        for cells in by_kind.values():
            depth = self._depth(cells[0], rows)
            if depth <= min(len(cells), model.num_layers):
                chains += [cells[i : i + depth] for i in range(0, len(cells) - depth + 1, depth)]
        every = [cell for cells in by_kind.values() for cell in cells]
        if not chains and every and len(every) <= model.num_layers:
            chains = [every]  # none of the kinds holds the model
        if chains:
            tokens = [self._token(chain, rows) for chain in chains]
            counts = _shared(tokens, self._asked.global_batch_size // rows)
            rollout = max(n * s for n, s in zip(counts, tokens, strict=True))
            yield _Estimate(rollout, self._weights_seconds(chains, counts), rows, chains, tokens)

    def _weights_seconds(self, chains: Chains, counts: Sequence[int]) -> float:
        """Until every pipeline that samples has the weights of a step."""
        g, used = self._grpo, [chain for chain, count in zip(chains, counts, strict=True) if count]
        arriving = {r: self._weights / len(chain) / len(cell) for chain in used for cell in chain for r in cell}
        return self._sent(arriving) * min(1.0, g.iterations / g.sync_every)

    def _depth(self, cell: Cell, rows: int) -> int:
        """Cells of this kind that hold weights and cache."""
        room = self._room(cell)
        return math.ceil((self._weights + rows * self._row) / room) if room > 0 else 1 << 30

    def _room(self, cell: Cell) -> float:
        chip = self._cluster.ranks[cell[0]].chip
        return len(cell) * (self._costs.memory_limit(chip) - self._costs.chip_rates(chip).overhead_bytes)

    def _token(self, chain: Sequence[Cell], rows: int) -> float:
        """Seconds to read weights and keys and values, stage after stage."""
        read = self._weights + rows * self._row
        bandwidths = [len(c) * self._costs.chip_rates(self._cluster.ranks[c[0]].chip).bytes_per_second for c in chain]
        return sum(read / len(chain) / bandwidth for bandwidth in bandwidths)

    def _judged(self, estimate: _Estimate) -> ForwardPlan | OverLimit | None:
        """The plan with its seconds, or the rank that lacks most; None: the model's tensors cannot be cut so."""
        asked, cluster, costs = self._asked, self._cluster, self._costs
        counts = _shared(estimate.tokens, asked.global_batch_size // estimate.rows)
        spelled = [
            {"micro_batch_size": estimate.rows, "num_micro_batches": count, "stages": self._stages(chain)}
            for chain, count in zip(estimate.chains, counts, strict=True) if count
        ]  # fmt: skip
        data = {"seq_length": asked.seq_length, "global_batch_size": asked.global_batch_size, "pipelines": spelled}
        try:
            plan = plan_from_dict(data, asked.model, cluster, asked.dtype)
        except UserError:
            return None
        role = ForwardRole(GENERATOR, CompiledPlan(plan, asked.model))
        memory = with_role({}, plan, role, asked.dtype, asked.options.logits_bytes, cluster)
        chips = {rank: cluster.ranks[rank].chip for rank in plan.ranks}
        limits = {rank: costs.memory_limit(chip) - int(costs.chip_rates(chip).overhead_bytes)
                  for rank, chip in chips.items()}  # fmt: skip
        if over := over_limit(memory, limits, chips):
            return over[0]
        rollout = max(price.seconds for price in self._price.pipelines(plan, None))
        return ForwardPlan(plan, rollout + estimate.weights)

    def _stages(self, chain: Sequence[Cell]) -> list[dict[str, Any]]:
        """Layers by the memory of the cells."""
        room, layers = [max(self._room(cell), 1.0) for cell in chain], self._asked.model.num_layers
        counts = [1 + n for n in _shared([1 / r for r in room], layers - len(chain))]
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [{"ranks": list(cell), "layers": [end - n, end], "tp": len(cell)}
                for cell, n, end in zip(chain, counts, ends, strict=True)]  # fmt: skip


def _shared(seconds: Sequence[float], count: int) -> list[int]:
    """``count`` pieces of work over workers that take so many seconds for each, such that the last one ends first."""
    counts, ends = [0] * len(seconds), [(each, i) for i, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(count):
        end, i = heapq.heappop(ends)
        counts[i] += 1
        heapq.heappush(ends, (end + seconds[i], i))
    return counts


class GeneratorSearch(RoleSearch):
    """Of a model to train and a cluster.

    Args:
        problem: of the model that is trained, on the whole cluster.
        g: how answers are sampled.
        progress: told what is found.
    """

    def __init__(self, problem: PlanningProblem, asked: ForwardQuestion, g: Grpo, progress: Progress | None) -> None:
        super().__init__(problem, asked, progress=progress)
        self._grpo = g
        self._links = RolloutCosts(problem.model, problem.cluster, problem.seq_length, problem.dtype,
                                   problem.options.costs.margin, g.max_new_tokens).costs.links  # fmt: skip

    def _role_plan(self, ranks: Sequence[int]) -> ForwardPlan:
        cluster = self._problem.cluster
        node_of, sampling = {rank.rank: rank.node for rank in cluster.ranks}, set(ranks)
        training = [rank for rank in node_of if rank not in sampling]
        by_node: dict[object, list[int]] = {}
        for rank in training:
            by_node.setdefault(node_of[rank], []).append(rank)

        def sent(arriving: Mapping[int, float]) -> float:
            """From the ranks that train in turn, where there are some from those of the same node."""
            flows = []
            for i, (number, size) in enumerate(arriving.items()):
                near = by_node.get(node_of[ranks[number]], training)
                flows.append((near[i % len(near)], ranks[number], size))
            arrival = self._links.exchange(flows)
            return arrival.seconds + arrival.latency

        return GeneratorPlans(self._asked, self._grpo, shrink(cluster, ranks), sent).best()

    def _step(self, trained: SimulatedPlan, ranks: frozenset[int], forward: ForwardPlan) -> float:
        """With the way of the weights between these two plans, where both have room."""
        joined = self._beside(trained.plan, ranks, forward).step_seconds
        return joined if joined < math.inf else super()._step(trained, ranks, forward)

    def _together(self, trained: float, role: float) -> float:
        rollout = role / self._grpo.iterations
        return max(trained, rollout) if self._grpo.ahead else trained + rollout

    def _others(self, whole: SearchResult) -> list[Alternative]:
        """In turn, by the ranks that train."""
        problem, g = self._problem, replace(self._grpo, ahead=False)
        alternatives = []
        for choice in (whole.best, *whole.others):
            predicted = predict_rollouts(choice.plan, problem.model, problem.cluster, problem.dtype,
                                         problem.options.costs, g, None)  # fmt: skip
            assert predicted.role is not None
            if predicted.over:
                problem_of = f"the plan does not fit: {predicted.over[0]}"
                alternatives.append(Alternative("same chips", math.inf, problem=problem_of))
                continue
            alternatives.append(Alternative(
                "same chips", predicted.step_seconds, predicted.role.step_seconds, predicted.role.seconds,
                choice.plan.ranks, choice.plan, prediction=predicted,
            ))  # fmt: skip
        return [min(alternatives, key=lambda one: one.step_seconds)]

    def _predicted(self, plan: Plan) -> Prediction:
        problem = self._problem
        role = role_of(plan, problem.model, GENERATOR, problem.model, 0, problem.cluster)
        return predict_rollouts(plan, problem.model, problem.cluster, problem.dtype, problem.options.costs, self._grpo,
                                role)  # fmt: skip
