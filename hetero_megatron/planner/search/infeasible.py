"""Explain why no plan exists, and find the smallest change that would help."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

from hetero_megatron.cluster import Link, format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS
from hetero_megatron.planner.search.layers_program import LayersProgram, ProgramInputs, grid
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.utils.text import plural

MOST_NODES = 4096


def fits(problem: PlanningProblem, scorer: TemplateScorer) -> bool:
    """Whether some single pipeline over all chips holds the model, however slow."""
    pool = scorer.pool
    if len(pool.groups) > MOST_GROUPS:  # those with the most memory per chip
        order = sorted(range(len(pool.groups)), key=lambda g: -scorer.costs.memory_limit(pool.groups[g].chip))
        return fits(problem, scorer.restricted(sorted(order[:MOST_GROUPS])))
    inputs = ProgramInputs(problem.with_batch(1), scorer)
    program = LayersProgram(inputs, pool.counts, min(problem.space.micro_batch_sizes or (1,)), 1)
    start = grid(1e12).start
    found, _ = program.solve(range(start, start + 1))
    return any(float(layers[1].max()) >= problem.model.num_layers for layers in found.values())


def refuse(problem: PlanningProblem, scorer: TemplateScorer) -> UserError:
    """The error for a model that fits in no plan."""
    costs, pool, model, away = scorer.costs, scorer.pool, problem.model, problem.space.offload == "always"
    if away:
        scorer = scorer.for_pool(pool, offload=frozenset(g.chip for g in pool.groups))
    usable = sum((costs.memory_limit(g.chip) - costs.overhead(g.chip)) * g.chips for g in pool.groups)
    weights, gradients, optimizer = costs.memory.whole
    what, state = "weights, gradients and optimizer", weights + gradients + optimizer
    if away:
        what, state = "weights and gradients, with the optimizer in host memory,", weights + gradients
    changes = [*_nodes(problem, scorer), *_length(problem, scorer)]
    return UserError(
        f"{model.name} fits in no plan of this cluster: {what} alone take {format_bytes(state)}, all chips together "
        f"have {format_bytes(usable)} to use",
        field="--model", value=model.name, accepted=" or ".join(changes) or "a smaller model or larger chips",
        where=problem.cluster.file,
    )  # fmt: skip


def _nodes(problem: PlanningProblem, scorer: TemplateScorer) -> list[str]:
    """The smallest number of additional nodes of one kind that would make the model fit, as text; empty if none does.
    """
    found = []
    for g, group in enumerate(scorer.pool.groups):

        def enough(more: int, g: int = g) -> bool:
            return fits(problem, _grown(scorer, g, more))

        doubled = next((2**i for i in range(MOST_NODES.bit_length()) if enough(2**i)), None)
        if doubled is None:
            continue
        low = doubled // 2 + 1
        count = low + bisect_left(range(low, doubled), True, key=enough)
        found.append((count * group.per_node, f"{plural(count, 'more node')} of {group.per_node} x {group.chip}"))
    return [text for _, text in sorted(found)[:1]]


def _grown(scorer: TemplateScorer, g: int, more: int) -> TemplateScorer:
    pool = scorer.pool
    start = 1 + max(r for group in pool.groups for node in group.ranks for r in node)
    group = pool.groups[g]
    extra = tuple(tuple(range(start + i * group.per_node, start + (i + 1) * group.per_node)) for i in range(more))
    groups = tuple(replace(x, ranks=x.ranks + extra) if i == g else x for i, x in enumerate(pool.groups))
    known = next((x for row in pool.inter for x in row if x is not None), None) or next(
        (x for x in pool.intra if x is not None), Link(math.inf)
    )
    inter = tuple(tuple(x or known for x in row) for row in pool.inter)
    return scorer.for_pool(DevicePool(groups, pool.intra, inter))


def _length(problem: PlanningProblem, scorer: TemplateScorer) -> list[str]:
    """A shorter sequence length that would make the model fit, as text; empty if none does."""
    length = problem.seq_length // 2
    while length >= 64:
        shorter = replace(problem, seq_length=length)
        costs = CostModel(problem.model, problem.cluster, length, problem.dtype, scorer.costs.options)
        if fits(shorter, TemplateScorer(scorer.tables.for_pool(scorer.pool, costs), scorer.pool)):
            return [f"--seq-length {length}"]
        length //= 2
    return []
