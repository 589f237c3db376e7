"""Saying why no plan exists, and the smallest change that would help."""

from __future__ import annotations

import math
from dataclasses import replace

from hetero_megatron.cluster import Cluster, Link, format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.cost.memory import state_bytes
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS
from hetero_megatron.planner.search.layers_program import LayersProgram, grid
from hetero_megatron.planner.search.pipeline_dp import PipelineDP
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import parameter_count

MOST_NODES = 4096


def fits(evaluator: TemplateScorer, model: ModelSpec, space: SearchSpace) -> bool:
    """Whether some single pipeline over all chips holds the model, however slow."""
    pool = evaluator.pool
    if len(pool.groups) > MOST_GROUPS:  # the roomiest ones
        order = sorted(range(len(pool.groups)), key=lambda g: -evaluator.costs.memory_limit(pool.groups[g].chip))
        few = pool.restricted(sorted(order[:MOST_GROUPS]))
        return fits(TemplateScorer(evaluator.tables.over(few), few), model, space)
    search = PipelineDP(evaluator, model, 1, space, lambda candidate, seconds: True)
    sizes = space.micro_batch_sizes or (1,)
    program = LayersProgram(search, evaluator.pool.counts, min(sizes), 1)
    steps = grid(1e12)
    _, whole, _ = program.solve(range(steps.start, steps.start + 1))
    return any(float(layers.max()) >= model.num_layers for layers in whole.values())


def refuse(model: ModelSpec, cluster: Cluster, evaluator: TemplateScorer, space: SearchSpace) -> UserError:
    """The error for a model that no plan fits."""
    costs, pool, away = evaluator.costs, evaluator.pool, space.offload == "always"
    if away:
        evaluator = TemplateScorer(evaluator.tables.over(pool, offload=frozenset(g.chip for g in pool.groups)), pool)
    usable = sum((costs.memory_limit(g.chip) - costs.overhead(g.chip)) * g.chips for g in pool.groups)
    count = parameter_count(model)
    weights, gradients, optimizer = state_bytes(count, count, costs.item, costs.options.moments)
    what, state = "weights, gradients and optimizer", weights + gradients + optimizer
    if away:
        what, state = "weights and gradients, with the optimizer in host memory,", weights + gradients
    problem = (
        f"{model.name} fits in no plan of this cluster: {what} alone take {format_bytes(state)}, all chips together "
        f"have {format_bytes(usable)} to use"
    )
    changes = [*_nodes(evaluator, model, space), *_length(evaluator, model, space)]
    return UserError(
        problem, field="--model", value=model.name, accepted=" or ".join(changes) or "a smaller model or larger chips",
        where=cluster.file,
    )  # fmt: skip


def _nodes(evaluator: TemplateScorer, model: ModelSpec, space: SearchSpace) -> list[str]:
    """The fewest more nodes of one kind that would do."""
    found = []
    for g, group in enumerate(evaluator.pool.groups):
        low, high = 0, 1
        while high <= MOST_NODES and not fits(_grown(evaluator, g, high), model, space):
            low, high = high, high * 2
        if high > MOST_NODES:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if fits(_grown(evaluator, g, middle), model, space):
                high = middle
            else:
                low = middle
        chips = f"{group.per_node} x {group.chip}"
        found.append((high * group.per_node, f"{high} more node{'s' if high > 1 else ''} of {chips}"))
    return [text for _, text in sorted(found)[:1]]


def _grown(evaluator: TemplateScorer, g: int, more: int) -> TemplateScorer:
    """The evaluator of a cluster with ``more`` nodes in one group."""
    pool = evaluator.pool
    start = 1 + max(r for group in pool.groups for node in group.ranks for r in node)
    group = pool.groups[g]
    extra = tuple(tuple(range(start + i * group.per_node, start + (i + 1) * group.per_node)) for i in range(more))
    groups = tuple(replace(x, ranks=x.ranks + extra) if i == g else x for i, x in enumerate(pool.groups))
    known = next((x for row in pool.inter for x in row if x is not None), None) or next(
        (x for x in pool.intra if x is not None), Link(math.inf)
    )
    inter = tuple(tuple(x or known for x in row) for row in pool.inter)
    grown = DevicePool(groups, pool.intra, inter)
    return TemplateScorer(evaluator.tables.over(grown), grown)


def _length(evaluator: TemplateScorer, model: ModelSpec, space: SearchSpace) -> list[str]:
    """A shorter sequence, where that is all it takes."""
    costs = evaluator.costs
    length = costs.seq_length // 2
    while length >= 64:
        shorter = CostModel(model, costs.cluster, length, costs.dtype, costs.options)
        tables = evaluator.tables.over(evaluator.pool, shorter)
        if fits(TemplateScorer(tables, evaluator.pool), model, space):
            return [f"--seq-length {length}"]
        length //= 2
    return []
