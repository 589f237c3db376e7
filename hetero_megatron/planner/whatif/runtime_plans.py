"""The best plan that another runtime can express: equal degrees on all ranks, layers as it can divide them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import numpy as np

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.pipeline_time import best_split
from hetero_megatron.planner.estimate.template_score import TemplateScorer, make_scorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.uniform import SIZES
from hetero_megatron.planner.template.plan_template import StageTemplate, in_flight
from hetero_megatron.plans import Plan
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.plans.runtimes.degrees import layout, renumbered
from hetero_megatron.plans.runtimes.runtime import ForeignRuntime
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.utils.text import plural

PREDICTED = 24  # plans that are predicted, the best by estimate first
MOST = 200  # where none of them fits
TYPES = 3  # chip types in all orders; above, all types in the cluster file's order, and each alone


@dataclass(frozen=True)
class RuntimePlan:
    """The best plan of a runtime.

    Attributes:
        plan, prediction: its ranks are those of the cluster.
        considered: plans that it can express and that were estimated.
    """

    plan: Plan
    prediction: Prediction
    considered: int


@dataclass(frozen=True)
class _Candidate:
    seconds: float
    flags: MegatronParallel
    order: tuple[int, ...]


def best_for(
    runtime: ForeignRuntime, problem: PlanningProblem, progress: Callable[[str], None] | None = None
) -> RuntimePlan:
    """The fastest plan of equal degrees that ``runtime`` can express, on all chips or those of some types.

    Raises:
        UserError: it can express none that fits.
    """
    problem.check()
    if problem.dtype not in runtime.dtypes:
        raise UserError(f"{runtime.name} has not this dtype", field="--dtype", value=problem.dtype,
                        accepted=", ".join(runtime.dtypes))  # fmt: skip
    scorer = make_scorer(problem)
    rows = sorted(_candidates(runtime, problem, scorer), key=lambda row: row.seconds)
    best: tuple[Plan, Prediction] | None = None
    nearest = math.inf
    for i, row in enumerate(rows[:MOST]):
        if i >= PREDICTED and best is not None:
            break
        try:
            plan = renumbered(from_megatron(row.flags, problem.model), row.order)
            plan = with_dtypes(plan, scorer.costs)
            prediction = predict(plan, problem.model, problem.cluster, problem.dtype, scorer.costs)
        except UserError:  # a combination that no plan has, as experts and divided weights
            continue
        if prediction.over:
            nearest = min(nearest, max(over.over for over in prediction.over))
        elif best is None or prediction.step_seconds < best[1].step_seconds:
            best = plan, prediction
            if progress is not None:
                progress(f"{describe(row.flags)}: {prediction.step_seconds:.4g} s")
    if best is None:
        lacking = "" if math.isinf(nearest) else f"; the nearest lacks {nearest / 2**30:.2f} GiB on a chip"
        why = f"{runtime.name} can express no plan that fits: {plural(len(rows), 'plan')} of equal degrees{lacking}"
        raise UserError(why, field="--for", value=runtime.name, accepted="another runtime, or the plan without --for")
    return RuntimePlan(*best, len(rows))


def describe(flags: MegatronParallel) -> str:
    """Text such as ``tp 2, pp 4 [9,9,7,7], dp 1, micro-batch 1, recompute none``."""
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    cells = (flags.pipeline_model_parallel_layout or "").split("|")
    layers = f" [{','.join(str(cell.count('t')) for cell in cells)}]" if len(cells) > 1 else ""
    sharded = ", weights divided" if flags.use_torch_fsdp2 else ""
    recompute = flags.recompute_granularity or "none"
    dp, size = flags.world_size // (tp * pp), flags.micro_batch_size
    return f"tp {tp}, pp {pp}{layers}, dp {dp}, micro-batch {size}, recompute {recompute}{sharded}"


def _orders(cluster: Cluster, scorer: TemplateScorer) -> list[tuple[int, ...]]:
    """Ranks in the orders in which the runtime may number them: whole nodes, those of a chip type together."""
    able = {rank for group in scorer.pool.groups for node in group.ranks for rank in node}
    by_type: dict[str, list[int]] = {}
    for rank in cluster.ranks:
        if rank.rank in able:
            by_type.setdefault(rank.chip, []).append(rank.rank)
    names = list(by_type)
    orders = {tuple(sorted(able)): None}
    if len(names) <= TYPES:
        parts = [part for n in range(len(names), 0, -1) for part in combinations(names, n)]
        chosen = [order for part in parts for order in permutations(part)]
    else:
        chosen = [tuple(names), *((name,) for name in names)]
    for order in chosen:
        orders[tuple(rank for name in order for rank in by_type[name])] = None
    return list(orders)


def _candidates(runtime: ForeignRuntime, problem: PlanningProblem, scorer: TemplateScorer) -> Iterator[_Candidate]:
    sizes = problem.space.micro_batch_sizes or SIZES
    recomputes = [kind for kind in runtime.recompute if kind != "first" and problem.space.recompute in (None, kind)]
    batch = problem.global_batch_size
    for order in _orders(problem.cluster, scorer):
        for tp, pp, dp in _degrees(runtime, problem, order):
            for size, recompute, shard in product(sizes, recomputes, runtime.weights):
                if batch % (dp * size) or (dp == 1 and shard is not runtime.weights[0]):
                    continue
                flags = MegatronParallel(
                    len(order), problem.seq_length, size, batch, tp, pp,
                    recompute_granularity=None if recompute == "none" else recompute,
                    use_torch_fsdp2=dp > 1 and shard is not None,
                    torch_fsdp2_no_reshard_after_forward=dp > 1 and shard is False,
                )  # fmt: skip
                divided = _divided(flags, order, scorer, runtime.uneven)
                if divided is not None:
                    seconds, counts = divided
                    flags = replace(flags, pipeline_model_parallel_layout=layout(counts))
                    yield _Candidate(seconds, flags, order)


def _degrees(
    runtime: ForeignRuntime, problem: PlanningProblem, order: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """(tensor, pipeline, data parallel) over these ranks, tensor parallel groups inside nodes."""
    chips, ranks = len(order), problem.cluster.ranks
    for tp in range(1, (min(chips, problem.model.num_heads) if runtime.tensor else 1) + 1):
        blocks = [{ranks[rank].node for rank in order[i : i + tp]} for i in range(0, chips, tp)]
        if chips % tp or any(len(nodes) > 1 for nodes in blocks):
            continue
        for pp in range(1, (min(len(blocks), problem.model.num_layers) if runtime.pipeline else 1) + 1):
            dp, remainder = divmod(len(blocks), pp)
            if not remainder and problem.global_batch_size % dp == 0:
                yield tp, pp, dp


def _divided(
    flags: MegatronParallel, order: tuple[int, ...], scorer: TemplateScorer, uneven: bool
) -> tuple[float, tuple[int, ...]] | None:
    """(estimated seconds, layers of each stage), the slowest replica of a stage counting; None: it does not fit."""
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    dp, layers = flags.world_size // (tp * pp), scorer.costs.model.num_layers
    assert flags.global_batch_size is not None
    count, recompute = flags.global_batch_size // (dp * flags.micro_batch_size), flags.recompute_granularity or "none"
    alive, seconds = in_flight("1f1b", pp, count), []
    for p in range(pp):
        groups = {scorer.node[rank][0] for rank in order[p * dp * tp : (p + 1) * dp * tp]}
        row = []
        for n in range(layers + 1):
            stages = [StageTemplate(g, tp, 1, n, recompute) for g in groups]
            times = [scorer.stage(stage, flags.micro_batch_size, p == 0, p == pp - 1) for stage in stages]
            fits = flags.use_torch_fsdp2 or all(
                scorer.needs(s, flags.micro_batch_size, p == 0, p == pp - 1, alive[p], dp)[1] <= 0 for s in stages
            )
            row.append(max(x.forward + x.backward for x in times) if fits else math.inf)
        seconds.append(np.array(row))
    if not uneven or pp == 1:
        per_stage, remainder = divmod(layers, pp)
        slowest = max(float(row[per_stage]) for row in seconds)
        return None if remainder or math.isinf(slowest) else ((count + pp - 1) * slowest, (per_stage,) * pp)
    return best_split(seconds, [(0.0, 0.0)] * (pp - 1), count)
